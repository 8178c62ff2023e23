"""The experiments on the papers' results: scale, search and report, on workloads small enough for a unit test."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper import markdown
from bench.paper_beyond import sized_decode_nodes
from bench.paper_cache import RunCache
from bench.paper_runs import Bench, Measured, greatest, mesh
from bench.report import Report
from bench.simulator_results import GiveUp
from bench.traces import TraceRequest
from bench.workloads import tool_agent
from mooncake_mesh.config_scheduling import AdmissionKind


def bench(requests: int = 0) -> Bench:
    b = Bench(report=Report("paper", "test"), seeds=(1, 2), requests=requests, say=lambda _: None)
    for seed in b.seeds:  # the whole workload takes seconds to make
        b.workloads[f"tool-agent/{seed}"] = tool_agent(requests=200, duration_s=30.0, seed=seed)
    return b


def test_a_row_is_met_when_the_mean_over_the_seeds_is() -> None:
    b = bench()
    b.row("A9", "x", Measured([1.0, 3.0]), "ratio", least=1.5, prototype="2", paper="2.5")
    b.row("A9", "y", Measured([1.0, 3.0]), "ratio", most=1.5, prototype="-")
    b.row("A9", "z", Measured([1.0]), "ratio", prototype="-")
    assert [row.met for row in b.report.rows] == [True, False, None]
    assert b.report.rows[0].aim == "≥ 1.5 (prototype 2, paper 2.5)"
    assert b.report.rows[0].spread == (1.0, 3.0)
    text = markdown(b.report)
    assert "**MISSED**" in text
    assert "| A9 x | 2 | ratio |" in text


def test_ratios_are_of_equal_seeds() -> None:
    assert Measured([2.0, 9.0]).over(Measured([1.0, 3.0])).values == [2.0, 3.0]


def test_a_workload_is_made_anew_for_each_seed() -> None:
    b = bench(requests=150)
    assert len(b.workload("tool-agent", seed=1)) == 150
    assert b.workload("tool-agent", seed=1) != b.workload("tool-agent", seed=2)
    assert b.workload("tool-agent", speed=2.0, seed=1)[-1].arrival_s == pytest.approx(
        b.workload("tool-agent", seed=1)[-1].arrival_s / 2
    )


@pytest.mark.parametrize("limit", [0.1, 0.97, 1.0, 1.02, 3.7])
@pytest.mark.parametrize("step", [1.03, 1.25])
def test_the_greatest_value_is_found_to_three_percent(limit: float, step: float) -> None:
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return value <= limit

    found = greatest(holds, 1.0, step)
    assert found <= limit < found * 1.032
    assert len(asked) == len(set(asked)), "runs are expensive"


def test_a_cached_run_says_what_the_run_said(tmp_path: Path) -> None:
    b = replace(bench(requests=60), cache=RunCache(folder=tmp_path))
    work = b.workload("tool-agent", speed=4.0, seed=1)
    system = mesh(1, 1, admission=AdmissionKind.EARLY)
    first, again = b.run(work, system), b.run(work, system)
    assert first is not again
    assert (again.share(30.0, 0.1), again.reasons(), again.samples) == (
        first.share(30.0, 0.1),
        first.reasons(),
        first.samples,
    )
    assert again.ttfts() == first.ttfts()


def test_a_hopeless_run_ends_early(tmp_path: Path) -> None:
    b = bench()
    slow = b.workload("tool-agent", speed=20.0, seed=1)
    whole = b.run(slow, mesh(1, 1))
    cut = b.run(slow, mesh(1, 1), GiveUp(ttft_s=30.0, tbt_s=0.1))
    assert cut.events < whole.events
    assert max(cut.share(30.0, 0.1), whole.share(30.0, 0.1)) < 0.9


def test_no_admission_lets_everything_in() -> None:
    assert mesh(2, 1).objectives.ttft_s is None
    strict = mesh(2, 1, admission=AdmissionKind.HOLD, tbt_s=0.05)
    assert (strict.objectives.ttft_s, strict.objectives.tbt_s) == (30.0, 0.05)


def test_longer_answers_ask_for_more_decode_nodes() -> None:
    work = tool_agent(requests=500, duration_s=60.0)
    longer = [
        TraceRequest(arrival_s=r.arrival_s, input_tokens=r.input_tokens, output_tokens=6 * r.output_tokens, keys=r.keys)
        for r in work
    ]
    assert 1 <= sized_decode_nodes(work, 0.5) < sized_decode_nodes(longer, 0.5) <= 15
