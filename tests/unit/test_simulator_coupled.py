"""The coupled baselines: times that can be computed by hand, and whole books."""

from dataclasses import replace

import pytest

from bench.nodes import NODES
from bench.simulator_coupled import CoupledSetup, Router, baseline, simulate_coupled
from bench.simulator_engine import Batching, EngineSetup, PrefixCache
from bench.traces import TraceRequest
from bench.workloads import tool_agent
from mooncake_proto.ids import BlockKey

A800 = NODES["8xa800"]
NAMES = ("vllm", "vllm+prefix", "vllm-chunked", "vllm-chunked+prefix", "s1", "s2", "one-at-a-time")


def request(arrival_s: float, tokens: int, out: int, first_key: int = 0) -> TraceRequest:
    keys = tuple(BlockKey((first_key + i).to_bytes(16, "big")) for i in range(-(-tokens // 512)))
    return TraceRequest(arrival_s=arrival_s, input_tokens=tokens, output_tokens=out, keys=keys)


def test_a_lone_request_takes_what_the_node_says() -> None:
    record = simulate_coupled([request(0.0, 4096, 3)], baseline("vllm", 1)).records[0]
    assert record.ttft_s == pytest.approx(A800.prefill_s(4096, 0))
    assert record.finished_s - record.first_token_s == pytest.approx(
        A800.decode_step_s(1, 4097) + A800.decode_step_s(1, 4098)
    )


def test_a_prompt_that_comes_stops_the_decoding_of_others() -> None:
    first, second = simulate_coupled([request(0.0, 4096, 50), request(1.0, 30_000, 2)], baseline("vllm", 1)).records
    assert first.first_token_s < 1.0 < first.finished_s
    assert first.tbt_s * 5 > A800.prefill_s(30_000, 0)
    assert second.tbt_s < 0.05


def test_chunks_bound_the_pause_and_cost_time() -> None:
    work = [request(0.0, 4096, 200, 0), request(1.0, 30_000, 2, 100)]
    plain = simulate_coupled(work, baseline("vllm", 1)).records
    chunked = simulate_coupled(work, baseline("vllm-chunked", 1)).records
    adaptive = simulate_coupled(work, baseline("s2", 1, tbt_slo_s=0.1)).records
    assert chunked[0].tbt_s < 0.12 < plain[0].tbt_s
    assert adaptive[0].tbt_s <= 0.0881
    assert chunked[1].ttft_s > plain[1].ttft_s
    assert chunked[1].prefill_s > plain[1].prefill_s


@pytest.mark.parametrize("cache", [PrefixCache.HBM, PrefixCache.DRAM])
def test_a_cached_prefix_is_not_computed_again(cache: PrefixCache) -> None:
    setup = CoupledSetup(instances=1, engine=EngineSetup(kind=A800, cache=cache))
    record = simulate_coupled([request(0.0, 4096, 2), request(5.0, 4096, 2)], setup).records[1]
    assert record.cached_tokens == 7 * 512
    assert record.ttft_s == pytest.approx(A800.prefill_s(512, 3584))


def test_requests_for_which_there_is_no_room_wait() -> None:
    small = replace(A800, vram_kv_tokens=6_000)
    setup = CoupledSetup(instances=1, engine=EngineSetup(kind=small))
    work = [request(0.0, 4096, 100), request(0.1, 4096, 2), request(0.2, 9000, 2)]
    first, second, third = simulate_coupled(work, setup).records
    assert second.queue_s > 2.0
    assert second.first_token_s > first.finished_s
    assert third.refused == "kv_too_large"


def test_one_at_a_time_is_that() -> None:
    setup = CoupledSetup(instances=1, engine=EngineSetup(kind=A800, batching=Batching.ONE_AT_A_TIME))
    first, second = simulate_coupled([request(0.0, 4096, 100), request(0.1, 4096, 2)], setup).records
    assert second.first_token_s == pytest.approx(first.finished_s + A800.prefill_s(4096, 0))


@pytest.mark.parametrize("name", NAMES)
def test_every_request_ends_once_with_all_its_tokens(name: str) -> None:
    work = tool_agent(requests=150, duration_s=15.0)
    result = simulate_coupled(work, baseline(name, 3))
    assert len(result.served) == 150
    for record in result.records:
        n = record.output_tokens - 1
        assert n == 0 or record.tbt_mean_s * n == pytest.approx(record.finished_s - record.first_token_s), record
    again = simulate_coupled(work, baseline(name, 3))
    assert again.digest_rows() == result.digest_rows()


def test_a_router_that_knows_the_caches_uses_them() -> None:
    work = tool_agent(requests=300, duration_s=60.0)
    aware = baseline("s2", 4)
    blind = replace(aware, router=Router.ROUND_ROBIN)
    assert simulate_coupled(work, aware).token_hit() > simulate_coupled(work, blind).token_hit() + 0.05


def test_refusals_learn_how_much_later_than_predicted_first_tokens_come() -> None:
    """Prompts share their steps with those that decode: by the prefill time alone nearly all would come too late."""
    work = [request(0.4 * i, 8_192, 400, 1 + 100 * i) for i in range(400)]
    limited = replace(baseline("s2", 1), ttft_limit_s=10.0)
    result = simulate_coupled(work, limited)
    served = [record for record in result.records if not record.refused]
    assert 100 < len(served) < 400
    late = [record for record in served[len(served) // 2 :] if record.ttft_s > 10.0]
    assert len(late) <= len(served) / 10
    assert any(record.ttft_s > 1.05 * record.ttft_est_s for record in served)


def test_an_unknown_baseline_is_named() -> None:
    with pytest.raises(ValueError, match="there are vllm"):
        baseline("sglang", 1)
