"""The experiments on the papers' results: scale, search and report, on workloads small enough for a unit test."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.paper import EXPERIMENTS
from bench.paper_beyond import b1_b2_sizing, sized_decode_nodes
from bench.paper_cache import RunCache
from bench.paper_jobs import Jobs
from bench.paper_report import PaperReport
from bench.paper_runs import Bench, Measured, System, greatest, mesh
from bench.simulator import MeshSetup
from bench.simulator_results import GiveUp, LoadSample, RequestRecord, RunResult
from bench.traces import TraceRequest
from bench.workloads import tool_agent
from mooncake_mesh.config_scheduling import AdmissionKind


def bench(requests: int = 0) -> Bench:
    b = Bench(report=PaperReport("test"), seeds=(1, 2), requests=requests, say=lambda _: None)
    for seed in b.seeds:  # the whole workload takes seconds to make
        b.workloads[f"tool-agent/{seed}"] = tool_agent(requests=200, duration_s=30.0, seed=seed)
    return b


def test_a_quantity_is_met_when_the_mean_over_the_seeds_is() -> None:
    b = bench()
    b.row("A9", "x", Measured([1.0, 3.0]), "ratio", least=1.5, prototype="2", paper="2.5")
    b.row("A9", "y", Measured([1.0, 3.0]), "ratio", most=1.5, why="a reason")
    b.row("A9", "z", Measured([1.0]), "ratio")
    assert [row.met for row in b.report.rows] == [True, False, None]
    assert b.report.rows[0].aim == "≥ 1.5 (prototype 2, paper 2.5)"
    assert b.report.rows[0].spread == (1.0, 3.0)


def test_the_report_has_a_section_for_each_experiment_and_all_aims_on_top(tmp_path: Path) -> None:
    b = bench(requests=40)
    b.report.title("A9", b1_b2_sizing)
    b.row("A9", "x", Measured([1.0, 3.0]), "ratio", least=1.5, prototype="2")
    b.row("B8", "y", Measured([1.0, 3.0]), "ratio", most=1.5, why="a reason")
    results = [b.run(b.workload("tool-agent", seed=seed), mesh(1, 1)) for seed in b.seeds]
    b.told("A9", "tool-agent 1x", "1P1D", results, admission="none")
    b.report.note("A9, B8: of two experiments")
    text = b.report.markdown([tmp_path / "pictures" / "B8.png"], tmp_path)
    top, first, second = text.split("## ")
    assert "1 of 2 aims are met" in top
    assert "| B8 | y | 2 | ≤ 1.5 | **MISSED** | - | - | a reason |" in top
    assert "| load | system | admission | good requests | good tokens | refused |" in first
    assert "of two experiments" in first
    assert "of two experiments" in second
    assert "![B8](pictures/B8.png)" in second
    plain = b.report.plain()
    assert "A9 tool-agent 1x, 1P1D, good tokens" in [row.metric for row in plain.rows]


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
@pytest.mark.parametrize("near", [0.4, 1.0, 3.0])
def test_the_greatest_value_is_found_to_three_percent_from_wherever_the_search_begins(
    limit: float, near: float
) -> None:
    asked: list[float] = []

    def holds(value: float) -> bool:
        asked.append(value)
        return value <= limit

    found = greatest(holds, near)
    assert found <= limit < found * 1.03
    assert found == greatest(holds, 1.0, stride=1), "where it begins does not matter"
    roughly = greatest(lambda value: value <= limit, near, stride=4, width=4)
    assert roughly <= found < roughly * 1.03**4
    asked.clear()
    greatest(holds, near)
    assert len(asked) == len(set(asked)), "runs are expensive"


def test_a_search_ends_where_everything_holds_or_nothing() -> None:
    assert greatest(lambda _: True, 1.0) > 30
    assert greatest(lambda _: False, 1.0) < 1 / 30


def test_the_best_of_a_sweep_runs_at_all_seeds() -> None:
    asked: list[tuple[object, int]] = []

    class Counted(Bench):
        def holds(self, name: str, system: System, speed: float, seed: int) -> bool:
            asked.append((system, seed))
            return speed <= {2: 1.3, 3: 1.35, 4: 0.5}[system.prefill if isinstance(system, MeshSetup) else 0]

    b = Counted(report=PaperReport("test"), seeds=(1, 2), requests=0, say=lambda _: None)
    systems: dict[str, System] = {f"{n}P": mesh(n, 1) for n in (2, 3, 4)}
    best, capacity = b.best_capacity("tool-agent", systems, dict.fromkeys(systems, 1.0))
    assert best == "3P"
    assert [value <= 1.35 < value * 1.03 for value in capacity.values] == [True, True]
    assert {system for system, seed in asked if seed == 2} == {systems["3P"]}


def test_runs_in_worker_processes_say_what_runs_here_say(tmp_path: Path) -> None:
    here = bench(requests=40)
    jobs = Jobs(1, tmp_path / "work")
    there = replace(here, cache=RunCache(folder=tmp_path / "runs"), jobs=jobs)
    try:
        systems: dict[str, System] = {"1P1D": mesh(1, 1), "again": mesh(1, 1)}
        runs = there.runs(systems, lambda seed: there.workload("tool-agent", speed=4.0, seed=seed))
        assert (jobs.done, jobs.waiting) == (2, 0), "who asks for what is being made waits for it"
    finally:
        jobs.end()
    for seed, result in zip(here.seeds, runs["again"], strict=True):
        made_here = here.run(here.workload("tool-agent", speed=4.0, seed=seed), mesh(1, 1))
        assert (result.ttfts(), result.tbts(), result.samples) == (
            made_here.ttfts(),
            made_here.tbts(),
            made_here.samples,
        )


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


class Told(Bench):
    """Runs are told, not made: with one request in twenty late, or one in five at higher rates."""

    def run(self, requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None = None) -> RunResult:
        duration_s = requests[-1].arrival_s - requests[0].arrival_s
        late = 20 if len(requests) / duration_s < 15 else 5
        records = [
            RequestRecord(
                index=i, arrival_s=r.arrival_s, input_tokens=r.input_tokens, output_tokens=r.output_tokens,
                input_blocks=10, cached_blocks=3, computed_tokens=r.input_tokens, prefill_s=1.0,
                first_token_s=r.arrival_s + (40.0 if i % late == 0 else 1.0), finished_s=r.arrival_s + 50.0,
                tbt_s=0.03, tbt_mean_s=0.02,
            )
            for i, r in enumerate(requests)
        ]  # fmt: skip
        sample = LoadSample(
            time_s=requests[-1].arrival_s, prefill_busy=1, prefill_queued=0, decode_running=1, decode_share=0.5
        )
        return RunResult("told", records, samples=[sample])


@pytest.mark.parametrize("id_", sorted(EXPERIMENTS))
def test_every_experiment_tells_what_it_ran_beside_its_aims(id_: str) -> None:
    b = Told(report=PaperReport("test"), seeds=(1, 2), requests=60, say=lambda _: None)
    small = tool_agent(requests=60, duration_s=30.0)
    b.workloads = dict.fromkeys(("tool-agent/1", "tool-agent/2", "conversation", "synthetic"), small)
    EXPERIMENTS[id_](b)
    quantities = b.report.section(id_).quantities
    assert any(quantity.has_aim for quantity in quantities)
    assert all(len(quantity.value.values) >= 1 for quantity in quantities)
    assert f"## {id_}\n" in b.report.markdown([], Path())
