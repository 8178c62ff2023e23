"""Virtual time, links, and what is counted of a run."""

import csv
import math
from functools import partial
from pathlib import Path

import pytest

from bench.simulator_clock import Link, VirtualClock
from bench.simulator_results import RequestRecord, RunResult, TbtKind, longest_mean_s, mean_s, quantile, write_csv
from bench.traces import TraceRequest
from bench.workloads import homogeneous, long_context, replayed, tool_agent


def test_actions_of_one_moment_happen_in_the_order_they_were_scheduled() -> None:
    clock, seen = VirtualClock(), []

    def note(name: str) -> None:
        seen.append((clock.now_s, name))
        if name == "b":
            clock.at(0.0, lambda: note("late"))  # the past is now

    for name, at_s in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.0)):
        clock.at(at_s, partial(note, name))
    clock.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (1.0, "late"), (2.0, "c"), (2.0, "d")]


def test_a_link_sends_in_order() -> None:
    link = Link(100.0)
    assert link.send(1.0, 50) == 1.5
    assert link.send(1.2, 50) == 2.0
    assert link.send(5.0, 100) == 6.0
    assert link.sent_bytes == 200


def test_the_longest_tenth_of_the_intervals() -> None:
    assert longest_mean_s([(0.1, 18), (1.0, 1), (0.5, 1)]) == pytest.approx(0.75)
    assert longest_mean_s([(0.1, 9)]) == pytest.approx(0.1)
    assert longest_mean_s([(2.0, 1), (1.0, 99)]) == pytest.approx(1.1)
    assert math.isnan(longest_mean_s([]))
    assert mean_s([(1.0, 1), (0.5, 3)]) == pytest.approx(0.625)
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0, 4.0], 0.9) == 4.0


def record(index: int, ttft_s: float, tbt_s: float, *, mean_s: float = 0.05, tokens: int = 90) -> RequestRecord:
    return RequestRecord(
        index=index,
        arrival_s=1.0,
        input_tokens=tokens,
        output_tokens=10,
        computed_tokens=tokens,
        first_token_s=1.0 + ttft_s,
        finished_s=9.0,
        tbt_s=tbt_s,
        tbt_mean_s=mean_s,
    )


def test_only_whole_requests_inside_both_objectives_count() -> None:
    refused = RequestRecord(index=3, arrival_s=1.0, input_tokens=290, output_tokens=10, refused="ttft_objective")
    cut = record(4, 1.0, 0.01)
    cut.finished_s = math.nan
    result = RunResult("", [record(0, 1.0, 0.09), record(1, 40.0, 0.09), record(2, 1.0, 0.2), refused, cut])
    assert result.share(30, 0.1) == pytest.approx(1 / 5)
    assert result.token_share(30, 0.1) == pytest.approx(100 / 700)
    assert result.share(30, 0.1, TbtKind.MEAN) == pytest.approx(2 / 5)
    assert result.wasted_tokens(30, 0.1) == 3 * 90
    assert result.reasons() == {"ttft_objective": 1}


def test_a_table_of_requests_can_be_read_back(tmp_path: Path) -> None:
    write_csv(RunResult("", [record(0, 1.5, 0.09)]), tmp_path / "deep" / "requests.csv")
    with (tmp_path / "deep" / "requests.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["ttft_s"]) == pytest.approx(1.5)


def test_a_replay_is_moved_and_stretched_and_stays_in_order() -> None:
    trace = [TraceRequest(arrival_s=3.0 * (i // 4), input_tokens=9, output_tokens=2, keys=()) for i in range(40)]
    fast = replayed(trace, speed=2.0)
    assert fast[-1].arrival_s == pytest.approx(13.5)
    spread = replayed(trace, speed=2.0, jitter_seed=7)
    assert spread == replayed(trace, speed=2.0, jitter_seed=7)
    assert [r.arrival_s for r in spread] == sorted(r.arrival_s for r in spread)
    assert len({r.arrival_s for r in spread}) == 40
    with pytest.raises(ValueError, match="speed"):
        replayed(trace, speed=0)


def test_the_generated_workloads_have_the_shape_they_are_named_for() -> None:
    agents = tool_agent(requests=4_000, duration_s=600.0)
    assert agents == tool_agent(requests=4_000, duration_s=600.0)
    assert sum(r.input_tokens for r in agents) / 4_000 == pytest.approx(8_596, rel=0.1)
    assert sum(r.output_tokens for r in agents) / 4_000 == pytest.approx(182, rel=0.1)
    seen: set[bytes] = set()
    hits = 0
    for key in (key for r in agents for key in r.keys):
        hits += key in seen
        seen.add(key)
    assert hits / sum(len(r.keys) for r in agents) == pytest.approx(0.59, abs=0.03)
    even = homogeneous(agents, requests=2_000)
    assert {len(r.keys) for r in even} <= set(range(12, 21))
    assert 2_000 / even[-1].arrival_s == pytest.approx(17, rel=0.1)
    long = long_context(16_384, rate=1.0, requests=50)
    assert len(long) == 16 + 50
    assert all(r.keys[:16] in {other.keys[:16] for other in long[:16]} for r in long)
