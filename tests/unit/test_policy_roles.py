"""When instances change between prefilling and decoding: what counts as demand, hysteresis, and how many at once."""

from dataclasses import replace

import pytest

from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.decisions import contended, unavailable
from mooncake_mesh.policy.roles import (
    Came,
    Candidate,
    Demand,
    Pools,
    RoleBalance,
    RoleRules,
    Switch,
    kv_demand,
    prompt_demand,
    refused_demand,
    refused_kv_demand,
    wanted_decode,
)
from mooncake_mesh.policy.sizing import TrafficMoments, decode_instances
from mooncake_mesh.policy.views import InstanceView, QueuedPrompt
from mooncake_proto.control import Role
from mooncake_proto.ids import InstanceId, NodeId

COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.001,
    cached_token_s=0.0,
    step_base_s=0.02,
    step_sequence_s=0.0,
    step_context_token_s=0.00002,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e9,
)
RULES = RoleRules()


def pools(prefill: int, decode: int, demand: Demand, now_s: float = 0.0, to_decode: int = 0) -> Pools:
    named = [(Role.PREFILL, f"p{i}") for i in range(prefill)] + [(Role.DECODE, f"d{i}") for i in range(decode)]
    return Pools(
        now_s=now_s,
        prefill=prefill,
        decode=decode,
        to_prefill=0,
        to_decode=to_decode,
        candidates=[
            Candidate(instance_id=InstanceId(name), role=role, work=float(9 - int(name[1:]))) for role, name in named
        ],
        demand=demand,
    )


def seen(balance: RoleBalance, sight: Pools, *, from_s: float, to_s: float) -> list[Switch]:
    """What is ordered first, with the same sight every two seconds."""
    now_s = from_s
    while now_s <= to_s:
        if switches := balance.seen(replace(sight, now_s=now_s)):
            return switches
        now_s += 2.0
    return []


def test_a_lasting_imbalance_moves_those_with_least_to_finish_and_several_at_once() -> None:
    balance = RoleBalance(RULES)
    sight = pools(8, 8, Demand(prefill=8.0, decode=1.4))
    assert seen(balance, sight, from_s=0.0, to_s=RULES.sustained_s - 1) == []
    switches = seen(balance, sight, from_s=RULES.sustained_s, to_s=30.0)
    assert [(s.instance_id, s.role) for s in switches] == [(f"d{i}", Role.PREFILL) for i in (7, 6, 5, 4)]
    assert switches[0].wanted_decode == 3
    assert (switches[0].prefill, switches[0].decode) == (8, 8)


def test_those_under_way_count_as_there_and_bound_how_many_more_go() -> None:
    demand = Demand(prefill=7.0, decode=8.0)
    going = pools(9, 4, demand, to_decode=3)
    switches = seen(RoleBalance(RULES), going, from_s=0.0, to_s=60.0)
    assert [s.role for s in switches] == [Role.DECODE]
    assert seen(RoleBalance(RULES), pools(8, 4, demand, to_decode=4), from_s=0.0, to_s=60.0) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "demand"),
    [
        (8, 8, Demand(prefill=4.0, decode=0.5)),  # prefill is asked for half of what it can do
        (13, 3, Demand(prefill=8.0, decode=1.4)),  # what sizing says
        (12, 4, Demand(prefill=9.0, decode=1.62)),  # within the margin of 13P3D
        (1, 1, Demand(prefill=9.0, decode=0.1)),  # one of each stays
        (1, 0, Demand(prefill=9.0, decode=0.0)),
    ],
)
def test_nobody_moves(prefill: int, decode: int, demand: Demand) -> None:
    assert seen(RoleBalance(RULES), pools(prefill, decode, demand), from_s=0.0, to_s=120.0) == []


def test_the_last_of_a_pool_stays_however_much_the_other_lacks() -> None:
    switches = seen(RoleBalance(RULES), pools(2, 14, Demand(prefill=0.1, decode=30.0)), from_s=0.0, to_s=120.0)
    assert len(switches) <= 1


def test_nobody_goes_back_before_there_was_rest() -> None:
    balance = RoleBalance(RULES)
    first = seen(balance, pools(8, 8, Demand(prefill=8.0, decode=1.4)), from_s=0.0, to_s=60.0)
    assert first
    back = pools(12, 4, Demand(prefill=1.0, decode=12.0))
    ordered_s = RULES.sustained_s
    assert seen(balance, back, from_s=ordered_s + 2, to_s=ordered_s + RULES.rest_s - 2) == []
    assert seen(balance, back, from_s=ordered_s + RULES.rest_s, to_s=ordered_s + RULES.rest_s + 4)


def test_refusals_count_for_the_pool_that_had_no_place() -> None:
    full = replace(pools(8, 8, Demand(prefill=6.0, decode=7.5)), refused=6.0)
    switches = seen(RoleBalance(RULES), full, from_s=0.0, to_s=60.0)
    assert {switch.role for switch in switches} == {Role.DECODE}
    assert switches[0].demand.decode == pytest.approx(13.5)


def test_a_wish_that_passes_starts_anew() -> None:
    rules = replace(RULES, memory_s=0.01)
    balance = RoleBalance(rules)
    much, little = pools(8, 8, Demand(prefill=8.0, decode=1.4)), pools(8, 8, Demand(prefill=2.0, decode=1.4))
    assert seen(balance, much, from_s=0.0, to_s=8.0) == []
    assert seen(balance, little, from_s=9.0, to_s=9.0) == []
    assert seen(balance, much, from_s=10.0, to_s=18.0) == []
    assert seen(balance, much, from_s=20.0, to_s=22.0)


def test_what_is_wanted_is_what_sizing_says() -> None:
    moments = TrafficMoments(prefill_s=1.06, kv_token_s=2.47e5)
    demand = Demand(prefill=7.5 * 1.06, decode=7.5 * 2.47e5 / 1_280_000)
    assert wanted_decode(demand, 16) == decode_instances(moments, instances=16, kv_capacity_tokens=1_280_000) == 3


def test_prompts_ask_for_what_comes_and_for_the_queue_against_the_objective() -> None:
    queue = (QueuedPrompt(tokens=100, prefill_s=6.0),)
    busy = InstanceView(
        instance_id=InstanceId("p0"), node_id=NodeId("n0"), blocks_total=10, blocks_available=10, busy_until_s=30.0,
        queue=queue,
    )  # fmt: skip
    idle = replace(busy, instance_id=InstanceId("p1"), queue=())
    came = Came(prefill_s=1.5, refused_kv_tokens=0.0)
    assert prompt_demand(came, [busy, idle], 10.0, 30.0) == pytest.approx(1.5 + 5.0 / 30.0)


def decoding(jobs: int, tokens: int, waiting_tokens: int = 0) -> InstanceView:
    return InstanceView(
        instance_id=InstanceId("d0"), node_id=NodeId("n1"), blocks_total=1000, blocks_available=10, running_jobs=jobs,
        running_tokens=tokens, waiting_tokens=waiting_tokens,
    )  # fmt: skip


def test_kv_is_counted_as_if_the_instance_ran_full() -> None:
    """Ten times the KV makes steps three times as long: what is a tenth now would be three tenths."""
    share = kv_demand([decoding(4, 1000)], [], COST, 10)
    assert share == pytest.approx(0.1 * (0.02 + 10_000 * 0.00002) / (0.02 + 1000 * 0.00002))
    assert kv_demand([decoding(40, 10_000)], [], COST, 10) == pytest.approx(1.0)
    assert kv_demand([], [], COST, 10) == 0.0


def test_kv_that_waits_counts_and_prompts_that_are_not_computed_do_not() -> None:
    prompts = InstanceView(
        instance_id=InstanceId("p0"), node_id=NodeId("n0"), blocks_total=10, blocks_available=10,
        queue=(QueuedPrompt(tokens=2_000, prefill_s=2.0),),
    )  # fmt: skip
    assert kv_demand([decoding(0, 0, 7_000)], [prompts], COST, 10) == pytest.approx(0.5)


def test_what_was_refused_for_want_of_a_pool_is_asked_of_it() -> None:
    came = Came(prefill_s=0.0, refused_kv_tokens=100.0)
    assert refused_kv_demand(came, [decoding(0, 0)], 10, 30.0) == pytest.approx(0.3)
    assert refused_kv_demand(came, [], 10, 30.0) == 0.0
    assert refused_demand(contended("ttft_objective")) is Role.PREFILL
    assert refused_demand(contended("tbt_objective")) is Role.DECODE
    assert refused_demand(contended("kv_in_progress")) is Role.DECODE
    assert refused_demand(contended("batch_waits_for_idle_decode")) is None
    assert refused_demand(unavailable("no_decode_instance")) is None
