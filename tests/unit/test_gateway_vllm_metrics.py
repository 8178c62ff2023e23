"""What a gateway tells under vLLM's metric names."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from mooncake_mesh.errors import Aborted, DeadlineExceeded, MooncakeError, Rejected
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.mesh_metrics import mesh_metrics
from mooncake_mesh.gateway.vllm_metrics import ENGINE, ChoiceMetrics, VllmMetrics
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, ModelCard, Role, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId, NodeId
from mooncake_proto.serving import FinishReason
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, Script, ask, card, fails, get, says

PATH: Final = "/v1/completions"
COUNTERS: Final = {"prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens", "request_success"}
GAUGES: Final = {"num_requests_running", "num_requests_waiting"}
HISTOGRAMS: Final = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
}

Told = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Told:
    """Every sample of vLLM's by its name (without the prefix) and labels; asserts that each is told once."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            if prefix == "vllm" and not name.endswith("_created"):
                key = (name, frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
    return found


def told(gateway: Gateway) -> Told:
    return samples(get(gateway, "/metrics").body.decode())


def value(found: Told, name: str, *, engine: str = ENGINE, **labels: str) -> float:
    return found[name, frozenset({"model_name": MODEL, "engine": engine, **labels}.items())]


def reasons(found: Told) -> dict[str, float]:
    """How many ended by which reason, without those that nothing ended by."""
    ended = {
        dict(labels)["finished_reason"]: n for (name, labels), n in found.items() if name == "request_success_total"
    }
    return {reason: n for reason, n in ended.items() if n}


def worker(role: Role, name: str, model: str = MODEL, **load: int) -> MemberState:
    return member(role, name, card(model), **load)


def member(role: Role, name: str, model: ModelCard | None = None, **load: int) -> MemberState:
    who = Member(
        role=role,
        instance_id=InstanceId(name),
        node_id=NodeId("node"),
        incarnation=Incarnation(name),
        endpoint="tcp://x",
        model=model,
    )
    values: dict[str, Any] = dict(load)
    return MemberState(member=who, health=Health.ALIVE, load=Load(**values), takes_work=True, last_beat_s=0.0)


def told_of(*members: MemberState) -> Told:
    report = StatusReport(
        cluster=ClusterState(conductor=Incarnation("c"), revision=1, members=members),
        healthy=True,
        reasons=(),
        indexed_blocks={},
        placed_total=0,
        rejected_total=0,
        uptime_s=1.0,
    )
    return samples(mesh_metrics(report).decode())


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_series_is_there_before_the_first_request_with_vllms_labels() -> None:
    found = told(Gateway(says("")))
    names = {name for name, _ in found}
    parts = {f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "count", "sum")}
    assert names == {f"{name}_total" for name in COUNTERS} | GAUGES | parts
    for name, labels in found:
        own = dict(labels)
        assert (own.pop("model_name"), own.pop("engine")) == (MODEL, "0")
        extra = {"request_success_total": {"finished_reason"}}.get(name, {"le"} if name.endswith("_bucket") else set())
        assert own.keys() == extra
    assert not any(found.values())


def test_types_are_vllms() -> None:
    text = get(Gateway(says("")), "/metrics").body.decode()
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert {types[f"vllm:{name}"] for name in COUNTERS} == {"counter"}
    assert {types[f"vllm:{name}"] for name in GAUGES} == {"gauge"}
    assert {types[f"vllm:{name}"] for name in HISTOGRAMS} == {"histogram"}


# --- requests over a scripted mesh ------------------------------------------------------------------------------------


def test_counters_grow_with_each_request_and_count_it_once() -> None:
    gateway = Gateway(says("abc", cached=2))
    for times in (1, 2):
        ask(gateway, PATH, {"prompt": "hello"})  # 6 tokens with the first one; 4 are drawn, the end included
        found = told(gateway)
        for name, once in {
            "prompt_tokens_total": 6,
            "prefix_cache_queries_total": 6,
            "prefix_cache_hits_total": 2,
            "generation_tokens_total": 4,
            "inter_token_latency_seconds_count": 3,
            "request_prompt_tokens_sum": 6,
            "request_generation_tokens_sum": 4,
            "time_to_first_token_seconds_count": 1,
            "e2e_request_latency_seconds_count": 1,
            "request_decode_time_seconds_count": 1,
            "request_time_per_output_token_seconds_count": 1,
        }.items():
            assert value(found, name) == times * once, name
        assert reasons(found) == {"stop": times}
        assert (value(found, "num_requests_running"), value(found, "num_requests_waiting")) == (0, 0)


def test_our_own_names_tell_the_same_as_before() -> None:
    gateway = Gateway(says("abc", cached=2))
    ask(gateway, PATH, {"prompt": "hello"})
    lines = get(gateway, "/metrics").body.decode().splitlines()
    for line in ("prompt_tokens_total 6.0", "generated_tokens_total 4.0", "time_between_tokens_seconds_count 3.0"):
        assert lines.count(f"mooncake_{line}") == 1


def test_the_unit_is_a_choice() -> None:
    gateway = Gateway(says("abc"))
    ask(gateway, PATH, {"prompt": ["hello", "you"], "n": 2})
    found = told(gateway)
    assert value(found, "prompt_tokens_total") == 2 * (6 + 4)
    assert value(found, "generation_tokens_total") == 4 * 4
    assert reasons(found) == {"stop": 4}


@pytest.mark.parametrize(
    ("script", "fields", "ended"),
    [
        (says("abc"), {"max_tokens": 2}, {"length": 1}),
        (says("abc"), {"stop": "b"}, {"stop": 1}),
        (fails(Aborted("lost"), after=b"a"), {}, {"error": 1}),
        (fails(Aborted("lost")), {}, {"error": 1}),
        (fails(DeadlineExceeded("late"), after=b"a"), {}, {"abort": 1}),
        (fails(Rejected("busy", unavailable=False, retry_after_s=1.0)), {}, {}),
        (says("abc"), {"temperature": "hot"}, {}),
    ],
    ids=["length", "stop string", "broken off", "failed", "deadline", "refused", "invalid"],
)
def test_how_it_ended(script: Script, fields: dict[str, Any], ended: dict[str, float]) -> None:
    gateway = Gateway(script)
    ask(gateway, PATH, {"prompt": "hello", **fields})
    found = told(gateway)
    assert reasons(found) == ended
    whole = ended.get("stop", 0) + ended.get("length", 0)
    assert value(found, "e2e_request_latency_seconds_count") == whole
    assert (value(found, "num_requests_running"), value(found, "num_requests_waiting")) == (0, 0)


def test_what_was_cancelled_inside_the_mesh_was_not_drawn() -> None:
    async def gives_up(_: TokenRequest) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(token=97, cached_tokens=0)
        yield TokenEvent(token=0, finish=FinishReason.CANCELLED)

    gateway = Gateway(gives_up)
    ask(gateway, PATH, {"prompt": "hello"})
    found = told(gateway)
    assert (reasons(found), value(found, "generation_tokens_total")) == ({"error": 1}, 1)


@pytest.mark.parametrize(("tokens", "state"), [(b"", "waiting"), (b"a", "running")])
def test_a_request_waits_until_its_first_token_and_is_aborted_when_its_client_leaves(tokens: bytes, state: str) -> None:
    taken = asyncio.Event()

    async def draws_and_hangs(_: TokenRequest) -> AsyncIterator[TokenEvent]:
        for token in tokens:
            yield TokenEvent(token=token, cached_tokens=0)
        taken.set()
        await asyncio.Event().wait()

    gateway = Gateway(draws_and_hangs)

    async def run() -> Told:
        exchange = Exchange(gateway.app, PATH, orjson.dumps({"model": MODEL, "prompt": "hello"}))
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            tasks.create_task(exchange.run())
            await taken.wait()
            scrape = await Exchange(gateway.app, "/metrics", method="GET").run()
            exchange.disconnect()
        return samples(scrape.body.decode())

    found = asyncio.run(run())
    counts = {name: value(found, f"num_requests_{name}") for name in ("waiting", "running")}
    assert counts == {"waiting": 0, "running": 0} | {state: 1}
    found = told(gateway)
    assert reasons(found) == {"abort": 1}
    assert (value(found, "num_requests_running"), value(found, "num_requests_waiting")) == (0, 0)


# --- times ------------------------------------------------------------------------------------------------------------


def play(choice: ChoiceMetrics, *events: tuple[float, TokenEvent], error: MooncakeError | None = None) -> None:
    with choice:
        for now_s, event in events:
            choice.token(event, now_s)
        if error is not None:
            raise error


FIRST: Final = TokenEvent(token=1, cached_tokens=4, queue_s=0.5, prefill_s=1.5)
LAST: Final = TokenEvent(token=3, finish=FinishReason.LENGTH)


def test_times_are_those_of_the_tokens_and_of_the_worker() -> None:
    registry = CollectorRegistry()
    choice = VllmMetrics(registry).choice(MODEL, prompt_tokens=10, arrived_s=100.0)
    play(choice, (103.0, FIRST), (103.25, TokenEvent(token=2)), (104.0, LAST))
    labels = {"model_name": MODEL, "engine": ENGINE}
    sums = {name: registry.get_sample_value(f"vllm:{name}_sum", labels) for name in HISTOGRAMS}
    assert sums == {
        "time_to_first_token_seconds": 3.0,
        "inter_token_latency_seconds": 1.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 4.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 1.5,
        "request_decode_time_seconds": 1.0,
        "request_prompt_tokens": 10.0,
        "request_generation_tokens": 3.0,
    }


def test_one_token_has_no_mean_between_tokens() -> None:
    registry = CollectorRegistry()
    choice = VllmMetrics(registry).choice(MODEL, prompt_tokens=10, arrived_s=100.0)
    play(choice, (103.0, replace(FIRST, finish=FinishReason.LENGTH)))
    labels = {"model_name": MODEL, "engine": ENGINE}
    assert registry.get_sample_value("vllm:request_time_per_output_token_seconds_count", labels) == 0
    assert registry.get_sample_value("vllm:request_decode_time_seconds_count", labels) == 1


def test_models_are_told_apart() -> None:
    registry = CollectorRegistry()
    metrics = VllmMetrics(registry)
    metrics.serve("other")
    play(metrics.choice(MODEL, prompt_tokens=10, arrived_s=100.0), (103.0, FIRST), (104.0, LAST))
    name = "vllm:generation_tokens_total"
    counts = [registry.get_sample_value(name, {"model_name": m, "engine": ENGINE}) for m in (MODEL, "other")]
    assert counts == [2, 0]


# --- the mesh ---------------------------------------------------------------------------------------------------------


def test_the_pool_is_the_kv_cache_and_what_can_make_room_is_free() -> None:
    found = told_of(
        worker(Role.PREFILL, "p0"),
        worker(Role.DECODE, "d0"),
        member(Role.MESSENGER, "m0", blocks_total=100, blocks_free=20, blocks_cached=60, blocks_evictable=50),
        member(Role.MESSENGER, "m1", blocks_total=100, blocks_free=80),
    )
    assert value(found, "kv_cache_usage_perc") == 0.25
    assert value(found, "cache_config_info", block_size="16", num_gpu_blocks="200") == 1
    assert len([name for name, _ in found if name == "cache_config_info"]) == 1


def test_preemptions_are_told_for_each_decode_worker() -> None:
    found = told_of(
        worker(Role.PREFILL, "p0"),
        worker(Role.DECODE, "d0", preemptions=3),
        worker(Role.DECODE, "d1", preemptions=4),
    )
    assert value(found, "num_preemptions_total", engine="d0") == 3
    assert value(found, "num_preemptions_total", engine="d1") == 4
    assert {name for name, _ in found} == {"num_preemptions_total"}, "there is no pool"


def test_the_dead_do_not_count() -> None:
    gone = replace(member(Role.MESSENGER, "m1", blocks_total=100), health=Health.DEAD)
    lost = replace(worker(Role.DECODE, "d1", "old", preemptions=9), health=Health.DEAD)
    there = member(Role.MESSENGER, "m0", blocks_total=100, blocks_free=50)
    found = told_of(worker(Role.DECODE, "d0"), there, gone, lost)
    assert value(found, "kv_cache_usage_perc") == 0.5
    assert {dict(labels)["model_name"] for _, labels in found} == {MODEL}


def test_without_workers_no_model_is_told_of() -> None:
    assert told_of(member(Role.MESSENGER, "m0", blocks_total=100)) == {}


def test_behind_a_gateway_no_series_is_told_twice() -> None:
    gateway = Gateway(says("hi"))
    assert not any(name == "kv_cache_usage_perc" for name, _ in told(gateway)), "the conductor is silent"
    members = (worker(Role.DECODE, "d0"), member(Role.MESSENGER, "m0", blocks_total=8, blocks_free=6))
    gateway.mesh.known = StatusReport(
        cluster=ClusterState(conductor=Incarnation("c"), revision=1, members=members),
        healthy=True,
        reasons=(),
        indexed_blocks={},
        placed_total=0,
        rejected_total=0,
        uptime_s=1.0,
    )
    assert value(told(gateway), "kv_cache_usage_perc") == 0.25
    types = [line for line in get(gateway, "/metrics").body.decode().splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
