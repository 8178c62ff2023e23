"""The simulated mesh: exact times where they can be computed by hand, whole books, and the same run everywhere."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.nodes import NODES, NodeKind
from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RunResult
from bench.traces import TraceRequest
from mooncake_mesh.config_scheduling import AdmissionKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.ids import BlockKey

BLOCK = 16


def kind_of_node(**changes: Any) -> NodeKind:
    """1 ms a prompt token, 10 ms a step of any size, KV of 1 byte a token over 1 kB/s."""
    plain = NodeKind(
        name="plain",
        kv_token_bytes=1,
        prefill_base_s=0.0,
        prefill_token_s=0.001,
        prefill_pair_s=0.0,
        prefill_pad_tokens=0,
        cached_token_s=0.0,
        weights_s=0.0,
        step_base_s=0.010,
        step_sequence_s=0.0,
        step_context_token_s=0.0,
        load_bytes_per_s=1e9,
        network_bytes_per_s=1e9,
        vram_kv_tokens=4096,
        dram_kv_tokens=4096,
    )
    return replace(plain, **changes)


def setup(prefill: int = 1, decode: int = 1, **changes: object) -> MeshSetup:
    base = MeshSetup(prefill=prefill, decode=decode, kind=kind_of_node(), block_tokens=BLOCK)
    return replace(base, **changes)  # type: ignore[arg-type]


def request(arrival_s: float, tokens: int, out: int, prefix: str = "a") -> TraceRequest:
    """Equal *prefix* letters name equal blocks."""
    n = -(-tokens // BLOCK)
    text = prefix.ljust(n, prefix[-1])
    keys = tuple(BlockKey(hashlib.sha256(text[: i + 1].encode()).digest()[:16]) for i in range(n))
    return TraceRequest(arrival_s=arrival_s, input_tokens=tokens, output_tokens=out, keys=keys)


def busy(n: int = 120, seed: int = 1) -> list[TraceRequest]:
    random = Random(seed)
    at_s, made = 0.0, []
    for _ in range(n):
        at_s += random.expovariate(20)
        prefix = "".join(random.choice("xyz") for _ in range(4))
        made.append(request(at_s, random.randint(20, 200), random.randint(1, 60), prefix))
    return made


def test_one_request_takes_what_the_node_says() -> None:
    record = simulate([request(1.0, 100, 11)], setup()).records[0]
    assert record.ttft_s == pytest.approx(0.1)
    assert record.finished_s == pytest.approx(1.1 + 10 * 0.010)
    assert record.tbt_s == pytest.approx(0.010)
    assert record.tbt_mean_s == pytest.approx(0.010)


def test_the_second_of_two_waits_and_finds_the_prefix_of_the_first() -> None:
    first, second = simulate([request(0.0, 160, 2), request(0.001, 160, 2)], setup()).records
    assert second.queue_s == pytest.approx(0.159)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0), "its blocks were acquired before the first was done"
    third = simulate([request(0.0, 160, 2), request(1.0, 160, 2)], setup()).records[1]
    assert third.cached_tokens == 144, "of ten blocks one is computed again: its last token draws the first one"
    assert third.ttft_s == pytest.approx(0.016)


def test_kv_that_leaves_slowly_delays_the_second_token_and_not_the_first() -> None:
    slow = setup(kind=kind_of_node(network_bytes_per_s=100.0))
    record = simulate([request(0.0, 96, 3)], slow).records[0]
    assert record.ttft_s == pytest.approx(0.096)
    assert record.finished_s == pytest.approx(0.96 + 0.020)
    assert record.tbt_s == pytest.approx(0.96 - 0.096 + 0.010)


def test_a_prefix_is_copied_from_another_node_when_that_is_quicker() -> None:
    work = [request(0.0, 400, 2), request(1.0, 400, 2, "ab"), request(1.01, 400, 2, "a" * 24 + "c")]
    records = simulate(work, setup(prefill=2)).records
    assert {records[1].prefill, records[2].prefill} == {"prefill000", "prefill001"}
    assert records[2].cached_tokens == 384


def test_a_request_of_one_token_needs_no_decoding() -> None:
    record = simulate([request(0.0, 100, 1)], setup()).records[0]
    assert record.is_whole
    assert record.finished_s == record.first_token_s


@pytest.mark.parametrize("decode_blocks", [None, 40])
def test_every_request_ends_once_with_all_its_tokens(decode_blocks: int | None) -> None:
    result = simulate(busy(), setup(2, 2, decode_blocks=decode_blocks, max_new_tokens=64))
    assert all(record.is_whole != bool(record.refused) for record in result.records)
    for record in result.served:
        n = record.output_tokens - 1
        span_s = record.finished_s - record.first_token_s
        assert n == 0 or record.tbt_mean_s * n == pytest.approx(span_s), record


def test_a_full_decode_pool_makes_the_youngest_go_and_come_again() -> None:
    work = [request(0.001 * i, 60, 60, f"{i}") for i in range(4)]
    result = simulate(work, setup(decode_blocks=21, max_new_tokens=4))
    assert result.preempted > 0
    assert len(result.served) + result.rejected == 4
    assert result.records[0].is_whole, "the oldest stays"


def test_taking_many_steps_at_once_changes_nothing() -> None:
    cost = kind_of_node(step_context_token_s=1.0371e-6, step_sequence_s=0.00101713, prefill_token_s=0.00100317)
    at_once = simulate(busy(), setup(2, 2, kind=cost, decode_blocks=60))
    one_by_one = simulate(busy(), setup(2, 2, kind=cost, decode_blocks=60, longest_window_steps=1))
    assert at_once.events < one_by_one.events * 0.75
    for a, b in zip(at_once.records, one_by_one.records, strict=True):
        assert (a.prefill, a.decode, a.refused) == (b.prefill, b.decode, b.refused)
        assert a.finished_s == pytest.approx(b.finished_s, rel=1e-9, nan_ok=True)
        assert a.tbt_s == pytest.approx(b.tbt_s, rel=0.01, nan_ok=True), "steps of one window count with their mean"


def test_objectives_refuse_what_would_be_late() -> None:
    work = [request(0.001 * i, 200, 2, f"{i}") for i in range(20)]
    strict = simulate(work, setup(objectives=Objectives(ttft_s=0.5), decode_blocks=1000))
    assert strict.rejected > 10
    assert set(strict.reasons()) == {"ttft_objective"}
    assert max(strict.ttfts()) <= 0.55
    assert simulate(work, setup(decode_blocks=1000)).rejected == 0


def test_baseline_finds_out_at_the_end_of_prefill_that_nobody_can_decode() -> None:
    work = [request(0.001 * i, 100, 200, f"{i}") for i in range(12)]
    kinds = {
        kind: simulate(
            work,
            setup(
                2,
                kind=kind_of_node(vram_kv_tokens=660),
                objectives=Objectives(ttft_s=30.0, tbt_s=0.1),
                scheduling=Scheduling(admission=Admission(kind=kind)),
            ),
        )
        for kind in (AdmissionKind.BASELINE, AdmissionKind.HOLD)
    }
    late = kinds[AdmissionKind.BASELINE]
    assert set(late.reasons()) == {"tbt_objective_at_decode"}
    assert late.wasted_tokens(30.0, 0.1) >= 80 * late.rejected, "what was computed for them is lost"
    held = kinds[AdmissionKind.HOLD]
    assert held.wasted_tokens(30.0, 0.1) < late.wasted_tokens(30.0, 0.1)
    assert all(record.tbt_s < 0.1 for record in held.served), "the wait for a place counts as TTFT"


def _digest(result: RunResult) -> str:
    return hashlib.sha256(repr(result.digest_rows()).encode()).hexdigest()


def test_a_run_is_the_same_whenever_it_is_run() -> None:
    assert _digest(simulate(busy(), setup(3, 2))) == _digest(simulate(busy(), setup(3, 2)))
    assert _digest(simulate(busy(seed=2), setup(3, 2))) != _digest(simulate(busy(), setup(3, 2)))


def test_a_run_is_the_same_under_another_hash_seed() -> None:
    root = Path(__file__).resolve().parents[2]
    module = "tests.unit.test_simulator_mesh"
    code = f"from {module} import *; from {module} import _digest; print(_digest(simulate(busy(60), setup(3, 2))))"
    command = [sys.executable, "-c", code]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=root, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_kinds_of_node_are_calibrated() -> None:
    a800 = NODES["8xa800"]
    assert a800.prefill_s(12_000, 0) == pytest.approx(1.38, rel=0.02)
    assert a800.prefill_s(131_072, 0) == pytest.approx(29.8, rel=0.02)
    assert a800.decode_step_s(1, 0) == pytest.approx(0.0225, rel=0.01)
    assert a800.decode_step_s(100, 1_280_000) == pytest.approx(0.060, rel=0.02)
    assert a800.mixed_step_s(0, 0, 512, 0) - 0.010 == pytest.approx(1.25 * 512 * a800.prefill_token_s, rel=0.01)
    for n, published_s in ((8192, 1.002), (16384, 2.056), (32768, 4.479), (65536, 10.588), (131_072, 27.514)):
        assert NODES["8xa800-fit"].prefill_s(n, 0) == pytest.approx(published_s, rel=0.04)
