"""What counts as good, what as wasted, and what is told of each class of requests."""

from dataclasses import replace

import pytest

from mooncake_mesh.policy.request_class import BATCH_PRIORITY, RequestClass, class_of
from mooncake_mesh.policy.slo import ServiceLevels, SloMonitor, Unloaded, longest_mean_s
from mooncake_proto.control import ClassReport
from mooncake_proto.serving import Ending, Outcome

UNLOADED = Unloaded(ttft_s=0.2, tbt_s=0.01)
WHOLE = Outcome(
    ending=Ending.FINISHED,
    priority=0,
    prompt_tokens=100,
    cached_tokens=40,
    computed_tokens=60,
    generated_tokens=10,
    ttft_s=1.0,
    tbt_s=0.05,
)
REFUSED = replace(WHOLE, ending=Ending.REFUSED, ttft_s=None, tbt_s=None, generated_tokens=0, reason="tbt_objective")


def report(*outcomes: Outcome, levels: ServiceLevels | None = None, now_s: float = 10.0) -> ClassReport:
    monitor = SloMonitor(levels or ServiceLevels(ttft_s=2.0, tbt_s=0.1), started_s=0.0)
    for outcome in outcomes:
        monitor.ended(outcome, UNLOADED, 10.0)
    [found] = monitor.report(now_s)
    return found


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"ttft_s": 2.0, "tbt_s": 0.1}, True),
        ({"ttft_s": 2.1}, False),
        ({"tbt_s": 0.11}, False),
        ({"tbt_s": None}, True),  # one token has no intervals
        ({"ending": Ending.FAILED}, False),
        ({"ending": Ending.REFUSED}, False),
    ],
)
def test_only_whole_requests_inside_both_objectives_are_good(change: dict[str, object], good: bool) -> None:
    found = report(replace(WHOLE, **change))  # type: ignore[arg-type]
    assert (found.requests, found.good) == (1, int(good))
    assert (found.good_tokens, found.wasted_tokens) == ((110, 0) if good else (0, 60))


def test_a_client_that_left_counts_neither_way() -> None:
    found = report(WHOLE, replace(WHOLE, ending=Ending.CANCELLED, ttft_s=50.0))
    assert (found.requests, found.cancelled, found.good, found.tokens, found.wasted_tokens) == (2, 1, 1, 110, 0)


def test_objectives_may_be_multiples_of_the_unloaded_times() -> None:
    levels = ServiceLevels(ttft_s=0.1, tbt_s=0.001, ttft_factor=10.0, tbt_factor=5.0)  # 2 s and 50 ms
    assert report(WHOLE, levels=levels).good == 1
    assert report(replace(WHOLE, ttft_s=2.1), levels=levels).good == 0
    assert report(replace(WHOLE, tbt_s=0.051), levels=levels).good == 0
    assert report(WHOLE, levels=levels).ttft.objective_s is None
    assert report(replace(WHOLE, ttft_s=1e6, tbt_s=1e6), levels=ServiceLevels()).good == 1, "no limits"


def test_classes_are_told_apart_and_batch_work_has_no_objective() -> None:
    monitor = SloMonitor(ServiceLevels(ttft_s=2.0, tbt_s=0.1), started_s=0.0)
    for priority in (BATCH_PRIORITY, 3, 0, -1, 0):
        monitor.ended(replace(WHOLE, priority=priority, ttft_s=100.0), UNLOADED, 1.0)
    told = [(one.name, one.requests, one.good) for one in monitor.report(1.0)]
    assert told == [("urgent", 1, 0), ("standard", 2, 0), ("background", 1, 0), ("batch", 1, 1)]
    assert [class_of(p) for p in (-100, 99, 100)] == [RequestClass.URGENT, RequestClass.BACKGROUND, RequestClass.BATCH]


def test_quantiles_are_of_those_that_had_the_time_and_refusals_keep_their_reason() -> None:
    found = report(*(replace(WHOLE, ttft_s=i / 10) for i in range(1, 11)), REFUSED, REFUSED)
    assert (found.ttft.p50_s, found.ttft.p90_s, found.ttft.p99_s, found.ttft.objective_s) == (0.5, 0.9, 1.0, 2.0)
    assert found.refusals == {"tbt_objective": 2}
    assert (found.refused, found.wasted_tokens) == (2, 120), "computed, and refused at decode"


def test_the_rate_is_that_of_the_last_minute() -> None:
    assert report(*[WHOLE] * 6).good_per_s == pytest.approx(0.6), "ten seconds after the start"
    assert report(*[WHOLE] * 6, now_s=69.0).good_per_s == pytest.approx(0.1)
    assert report(*[WHOLE] * 6, now_s=71.0).good_per_s == 0


@pytest.mark.parametrize(("n", "expected"), [(0, None), (1, 0.0), (10, 9.0), (11, 9.5), (20, 18.5)])
def test_tbt_is_the_mean_of_the_longest_tenth(n: int, expected: float | None) -> None:
    assert longest_mean_s([float(i) for i in range(n)]) == expected
