"""Simulated decode instances that compute prompts between steps: exact times, whole books, equal in any stride."""

from dataclasses import replace

import pytest

from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RunResult
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from tests.unit.test_simulator_mesh import busy, kind_of_node, request, setup

HYBRID = Scheduling(hybrid_decode=HybridDecodeKind.AUTO, hybrid_step_s=0.1)


def hybrid(prefill: int = 1, decode: int = 1, **changes: object) -> MeshSetup:
    return setup(prefill, decode, **{"scheduling": HYBRID, "decode_shares": True, **changes})


def inline(result: RunResult) -> list[int]:
    """The requests whose prompts were computed on a decode instance."""
    return [record.index for record in result.records if record.prefill and record.prefill == record.decode]


def test_a_prompt_is_computed_in_chunks_where_prefill_would_be_later() -> None:
    result = simulate([request(0.0, 2000, 1), request(0.5, 200, 3, "b")], hybrid())
    assert inline(result) == [1]
    record = result.records[1]
    # a chunk and one that is decoded in 0.1 s: 80 tokens. Two steps of 0.09 s, one of 0.05 s, then two of 0.01 s
    assert record.ttft_s == pytest.approx(2 * 0.090 + 0.050)
    assert record.finished_s == pytest.approx(0.5 + 0.230 + 2 * 0.010)
    assert record.tbt_s == pytest.approx(0.010)
    assert (record.prefill_s, record.queue_s) == (pytest.approx(0.230), 0.0)


def test_who_is_decoded_meanwhile_has_longer_steps_and_no_longer_than_allowed() -> None:
    work = [request(0.0, 100, 60, "a"), request(0.2, 2000, 1, "b"), request(0.305, 160, 2, "c")]
    result = simulate(work, hybrid())
    assert inline(result) == [2]
    first, _, third = result.records
    # third comes within the step that ends at 0.31 s; 80 tokens a step beside one that is decoded
    assert third.ttft_s == pytest.approx(0.005 + 2 * 0.091)
    assert first.finished_s == pytest.approx(0.1 + 59 * 0.010 + 2 * 0.081)
    assert first.tbt_s == pytest.approx((2 * 0.091 + 4 * 0.010) / 6), "of 59 intervals the longest six"
    assert third.prefill_s == pytest.approx(2 * 0.081)


def test_a_prefix_on_the_decode_node_and_one_on_another_need_not_be_computed() -> None:
    work = [
        request(0.0, 160, 2, "a"),
        request(1.0, 2000, 1, "b"),
        request(1.1, 176, 2, "a"),  # was decoded here
        request(1.5, 160, 2, "bc"),
        request(3.5, 2000, 1, "d"),
        request(3.6, 320, 2, "b" * 19 + "e"),
    ]
    result = simulate(work, hybrid())
    assert inline(result) == [2, 3, 5]
    assert [result.records[i].cached_tokens for i in (2, 3, 5)] == [160, 0, 304]
    assert result.records[2].ttft_s == pytest.approx(0.010 + 0.016)


def test_one_token_is_the_first_and_the_last() -> None:
    result = simulate([request(0.0, 2000, 1), request(0.5, 60, 1, "b")], hybrid())
    assert inline(result) == [1]
    assert result.records[1].finished_s == result.records[1].first_token_s == pytest.approx(0.5 + 0.070)


def test_a_computed_prompt_waits_for_its_gate_as_others_do() -> None:
    objectives = Objectives(ttft_s=30.0, tbt_s=0.1)
    scheduling = replace(HYBRID, admission=Admission(kind=AdmissionKind.HOLD, wip_limit=3.0))
    work = [request(0.0, 900, 300, "a"), *(request(0.1 + i / 1e3, 200, 100, "bcdefghij"[i]) for i in range(9))]
    kind = kind_of_node(vram_kv_tokens=1500)
    result = simulate(work, hybrid(objectives=objectives, scheduling=scheduling, kind=kind, decode_blocks=None))
    assert inline(result)
    assert all(record.tbt_s < 0.1 for record in result.served)
    late = [result.records[i] for i in inline(result) if result.records[i].is_whole]
    assert max(record.first_token_s for record in late) > 1.0, "some are computed long before they have a place"


@pytest.mark.parametrize("decode_blocks", [None, 60])
def test_every_request_ends_once_with_all_its_tokens(decode_blocks: int | None) -> None:
    result = simulate(busy(), hybrid(1, 2, decode_blocks=decode_blocks, max_new_tokens=64))
    assert len(inline(result)) > 20
    assert all(record.is_whole != bool(record.refused) for record in result.records)
    for record in result.served:
        n = record.output_tokens - 1
        assert n == 0 or record.tbt_mean_s * n == pytest.approx(record.finished_s - record.first_token_s), record


@pytest.mark.parametrize("decode_blocks", [None, 60])
def test_taking_many_steps_at_once_changes_nothing(decode_blocks: int | None) -> None:
    cost = kind_of_node(
        step_context_token_s=1.0371e-6, step_sequence_s=0.00101713, prefill_token_s=0.00100317, prefill_pair_s=1e-7
    )
    short = replace(HYBRID, hybrid_step_s=0.045)
    system = hybrid(1, 2, kind=cost, decode_blocks=decode_blocks, scheduling=short)
    at_once = simulate(busy(), system)
    one_by_one = simulate(busy(), replace(system, longest_window_steps=1))
    assert len(inline(at_once)) > 20
    assert at_once.events < one_by_one.events * 0.75
    for a, b in zip(at_once.records, one_by_one.records, strict=True):
        assert (a.prefill, a.decode, a.refused, a.cached_tokens) == (b.prefill, b.decode, b.refused, b.cached_tokens)
        assert a.finished_s == pytest.approx(b.finished_s, rel=1e-9, nan_ok=True)
        assert a.prefill_s == pytest.approx(b.prefill_s, rel=1e-9)
        assert a.tbt_s == pytest.approx(b.tbt_s, rel=0.01, nan_ok=True), "some steps of a window count as equal"
