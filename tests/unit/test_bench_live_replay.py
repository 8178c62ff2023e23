"""How bench.live_replay scales a trace, what it tells the simulator, and how both runs come side by side."""

import math
from dataclasses import replace

import pytest

from bench.live_compare import compare, live_side, paired_ttfts, simulated_side
from bench.live_mesh import Measured, mesh_setup, node_kind, simulated
from bench.live_work import as_simulated, block_keys, demand, every_family, largest_block, scaled
from bench.report import Report
from bench.simulator_results import RequestRecord, RunResult
from mooncake_mesh.loadtest.outcomes import Ending, LoadObjectives, RequestResult
from mooncake_mesh.loadtest.trace_file import TraceLine
from mooncake_mesh.policy.cost_fit import PolynomialCost

_COST = PolynomialCost(
    prefill_base_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0,
    cached_token_s=0.0,
    step_base_s=0.02,
    step_sequence_s=0.01,
    step_context_token_s=0.0,
    transfer_base_s=0.0,
    transfer_byte_s=1e-9,
)
_MEASURED = Measured(cost=_COST, block_tokens=16, block_bytes=16 * 128, pool_blocks=1000, max_batch=64)
_OBJECTIVES = LoadObjectives(ttft_s=5.0, tbt_s=0.5)


def _line(at_s: float, *ids: int, short_by: int = 0, out: int = 512) -> TraceLine:
    return TraceLine(arrival_s=at_s, input_tokens=512 * len(ids) - short_by, output_tokens=out, block_ids=ids)


# --- the work ---------------------------------------------------------------------------------------------------------


def test_families_are_kept_whole() -> None:
    lines = [_line(0, 0, 1, 2), _line(1, 0, 5), _line(2, 0, 1, 2, 3), _line(3, 0, 7, 8), _line(4, 0, 5, 6)]
    assert every_family(lines, 1) == lines
    assert every_family(lines, 2) == [lines[0], lines[2], lines[3]]
    assert every_family(lines, 3) == [lines[0], lines[2]]
    with pytest.raises(ValueError, match="at least 1"):
        every_family(lines, 0)


def test_prompts_within_the_common_block_are_families_of_their_own() -> None:
    lines = [_line(at, 0, short_by=100 + at) for at in range(6)]
    assert every_family(lines, 3) == [lines[0], lines[3]]


def test_scaled_prompts_share_what_the_trace_s_share() -> None:
    whole, longer, other = scaled([_line(0, 0, 1, 2), _line(3, 0, 1, 2, 3), _line(6, 0, 9, short_by=256)], 16)
    assert [r.input_tokens for r in (whole, longer, other)] == [48, 64, 24]
    assert [r.output_tokens for r in (whole, longer, other)] == [16, 16, 16]
    assert [r.arrival_s for r in (whole, longer, other)] == [0, 3, 6], "time is not scaled"
    assert block_keys(longer, 16)[:3] == block_keys(whole, 16)
    assert block_keys(other, 16) == block_keys(whole, 16)[:1], "its second block is partial"


def test_keys_are_of_the_mesh_s_blocks_whatever_the_trace_s_became() -> None:
    first, second = scaled([_line(0, 0, 1, 2, 3), _line(1, 0, 1, 2, 9)], 10)
    ours, theirs = block_keys(first, 16), block_keys(second, 16)
    assert len(ours) == 2
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1], "three blocks of ten are shared, one of sixteen is whole within them"


def test_the_simulator_is_told_when_requests_were_sent() -> None:
    requests = scaled([_line(0, 0, 1), _line(3, 0, 2)], 16)
    work = as_simulated(requests, [10.5, 10.25], 16)
    assert [(r.arrival_s, r.keys) for r in work] == [
        (0.0, block_keys(requests[1], 16)),
        (0.25, block_keys(requests[0], 16)),
    ]


def test_demand_counts_a_prefix_once() -> None:
    requests = scaled([_line(0, 0, 1, out=32 * 512 // 16), _line(5, 0, 1, 2, out=32 * 512 // 16)], 16)
    asked = demand(requests, _COST, 10.0, 16)
    assert asked.hit_rate == pytest.approx(32 / 80)
    assert asked.prefill == pytest.approx((0.01 + 0.032 + 0.01 + 0.016) / 10)
    assert asked.decode == pytest.approx(62 * (0.02 + 8 * 0.01) / 8 / 10)
    assert asked.highest == asked.decode


def test_a_prompt_that_was_seen_whole_still_has_its_last_block_to_compute() -> None:
    requests = scaled([_line(0, 0, 1), _line(5, 0, 1)], 16)
    assert demand(requests, _COST, 10.0, 16).hit_rate == pytest.approx(16 / 64)


def test_the_scale_is_the_largest_that_the_load_allows() -> None:
    lines = [_line(n, 0, 2 * n + 1, 2 * n + 2) for n in range(20)]
    block = largest_block(lines, _COST, 20.0, 16, 0.3)
    assert demand(scaled(lines, block), _COST, 20.0, 16).highest <= 0.3
    assert demand(scaled(lines, block + 1), _COST, 20.0, 16).highest > 0.3
    assert largest_block(lines, _COST, 20.0, 16, 0.0) == 1


# --- the simulated mesh -----------------------------------------------------------------------------------------------


def test_a_node_takes_what_was_measured() -> None:
    cost = replace(_COST, prefill_pair_s=1e-6, cached_token_s=1e-5, step_context_token_s=1e-5)
    kind = node_kind(replace(_MEASURED, cost=cost))
    for uncached, cached in ((1, 0), (100, 0), (100, 1600)):
        assert kind.prefill_s(uncached, cached) == pytest.approx(cost.prefill_s(uncached, cached))
    for batch, context in ((1, 100), (16, 4000)):
        assert kind.decode_step_s(batch, context) == pytest.approx(cost.decode_step_s(batch, context))
    assert kind.kv_token_bytes == 128
    setup = mesh_setup(_MEASURED, _OBJECTIVES, 9)
    assert (setup.pool_blocks, setup.landing_blocks, setup.max_new_tokens) == (1000, 1000, 9)


def test_requests_apart_take_their_measured_time_and_find_their_prefix() -> None:
    requests = scaled([_line(0, 0, 1, out=128), _line(100, 0, 1, 2, out=128)], 16)
    results = [RequestResult(sent_s=at_s, input_tokens=1) for at_s in (7.0, 107.0)]
    first, second = simulated(requests, results, _MEASURED, _OBJECTIVES).records
    assert (first.ttft_s, second.ttft_s) == pytest.approx((0.01 + 0.032, 0.01 + 0.016), rel=0.01)
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert first.tbt_mean_s == pytest.approx(0.03, rel=0.05)


# --- side by side -----------------------------------------------------------------------------------------------------


def _live(sent_s: float, ttft_s: float, *, ending: Ending = Ending.OK, cached: int = 0) -> RequestResult:
    return RequestResult(
        sent_s=sent_s,
        input_tokens=100,
        ending=ending,
        token_s=[sent_s + ttft_s, sent_s + ttft_s + 0.1] if ending is Ending.OK else [],
        output_tokens=2,
        cached_tokens=cached,
        ended_s=sent_s + ttft_s + 0.1,
    )


def _said(index: int, arrival_s: float, ttft_s: float, *, refused: str = "") -> RequestRecord:
    return RequestRecord(
        index=index,
        arrival_s=arrival_s,
        input_tokens=100,
        output_tokens=2,
        refused=refused,
        cached_tokens=0 if refused else 32,
        computed_tokens=0 if refused else 68,
        first_token_s=math.nan if refused else arrival_s + ttft_s,
        finished_s=math.nan if refused else arrival_s + ttft_s + 0.05,
        tbt_s=0.05,
    )


def test_requests_are_paired_in_order_of_arrival_where_both_answered() -> None:
    results = [_live(2.0, 0.4), _live(1.0, 0.2), _live(3.0, 0.0, ending=Ending.FAILED), _live(4.0, 0.8)]
    records = [_said(0, 0.0, 0.1), _said(1, 1.0, 0.3), _said(2, 2.0, 0.5), _said(3, 3.0, 0.7, refused="late")]
    assert paired_ttfts(results, records) == [pytest.approx((0.2, 0.1)), pytest.approx((0.4, 0.3))]
    with pytest.raises(ValueError, match="zip"):
        paired_ttfts(results, records[:3])


def test_both_sides_count_alike() -> None:
    results = [_live(0.0, 1.0, cached=20), _live(1.0, 6.0, cached=0), _live(8.9, 0.0, ending=Ending.REFUSED)]
    live = live_side(results, _OBJECTIVES)
    assert (live.good, live.refused, live.failed, live.hit_rate) == (1, 1, 0, pytest.approx(0.1))
    assert (live.duration_s, live.goodput_per_s) == pytest.approx((9.0, 1 / 9))
    records = [_said(0, 0.0, 1.0), _said(1, 1.0, 6.0), _said(2, 8.9, 0.0, refused="tbt")]
    said = simulated_side(RunResult(name="", records=records), _OBJECTIVES)
    assert (said.good, said.refused, said.failed, said.hit_rate) == (1, 1, 0, pytest.approx(0.32))
    assert said.duration_s == pytest.approx(7.05)
    assert list(said.ttft_s) == pytest.approx([1.0, 6.0])


def test_the_table_has_the_simulator_s_word_over_what_was_measured() -> None:
    results = [_live(float(n), 0.2) for n in range(10)]
    records = [_said(n, float(n), 0.1 if n < 5 else 0.3) for n in range(10)]
    report = Report("x", "")
    said = simulated_side(RunResult(name="", records=records), _OBJECTIVES)
    compare(report, live_side(results, _OBJECTIVES), said, paired_ttfts(results, records))
    rows = {row.metric: row for row in report.rows}
    assert rows["TTFT P50"].ratio == pytest.approx(0.5)
    assert rows["TTFT P90"].ratio == pytest.approx(1.5)
    assert rows["TBT P90"].ratio == pytest.approx(0.5)
    paired = next(row for row in report.rows if row.metric.startswith("TTFT of the same request"))
    assert paired.ratio == pytest.approx(1.0)
    assert paired.spread == pytest.approx((0.5, 1.5))
    assert (rows["good"].value, rows["good"].baseline) == (10, 10)
