import dataclasses
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.decisions import RETRY_AFTER_S, Placed, Refused
from mooncake_mesh.policy.placement import GROWTH_TOKENS, place
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.ids import InstanceId, NodeId

BLOCK_TOKENS, BLOCK_BYTES = 16, 1_000_000
COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.01,
    cached_token_s=0.0,
    step_base_s=0.01,
    step_sequence_s=0.001,
    step_context_token_s=0.00001,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e8,  # a block in 0.01 s, where computing it takes 0.16 s
)
SLOW_LINK = dataclasses.replace(COST, transfer_bytes_per_s=1e6)
ANY = Objectives()


def view(name: str, node: str | None = None, **fields: float) -> InstanceView:
    base = {"blocks_total": 10_000, "blocks_available": 10_000}
    identity = {"instance_id": InstanceId(name), "node_id": NodeId(node or f"node-{name}")}
    return InstanceView(**(base | identity | fields))  # type: ignore[arg-type]


def cluster(*prefill: InstanceView, decode: tuple[InstanceView, ...] = (view("d0"),)) -> ClusterView:
    return ClusterView(prefill=prefill, decode=decode)


def request(prompt_tokens: int = 161, max_new_tokens: int = 32, **prefix_blocks: int) -> RequestShape:
    """Keyword arguments: instance name → blocks of prefix on that instance's node."""
    return RequestShape(
        prompt_tokens=prompt_tokens,
        max_new_tokens=max_new_tokens,
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_BYTES,
        prefix_blocks={NodeId(f"node-{name}"): blocks for name, blocks in prefix_blocks.items()},
    )


def placed(outcome: Placed | Refused) -> Placed:
    assert isinstance(outcome, Placed)
    return outcome


def refused(outcome: Placed | Refused) -> Refused:
    assert isinstance(outcome, Refused)
    return outcome


# --- prefill ----------------------------------------------------------------------------------------------------------


def test_a_cold_idle_cluster_takes_the_first_instance() -> None:
    got = placed(place(request(), cluster(view("p1"), view("p0")), COST, ANY))
    assert got == Placed(
        prefill=InstanceId("p0"),
        decode=InstanceId("d0"),
        local_prefix_blocks=0,
        fetch_node=None,
        fetch_prefix_blocks=0,
        ttft_est_s=cast(float, pytest.approx(1.61)),
        tbt_est_s=cast(float, pytest.approx(0.01 + 0.001 + 0.00161)),
    )


def test_the_local_prefix_wins_on_idle_instances() -> None:
    got = placed(place(request(p1=10), cluster(view("p0"), view("p1")), COST, ANY))
    assert (got.prefill, got.local_prefix_blocks, got.fetch_node) == ("p1", 10, None)
    assert got.ttft_est_s == pytest.approx(0.01)


def test_a_long_queue_outweighs_a_prefix() -> None:
    crowded = cluster(view("p0"), view("p1", busy_until_s=10.0))
    got = placed(place(request(p1=10), crowded, SLOW_LINK, ANY))
    assert (got.prefill, got.local_prefix_blocks, got.fetch_node) == ("p0", 0, None)
    assert got.ttft_est_s == pytest.approx(1.61)


def test_a_prefix_is_copied_to_the_idle_instance_when_that_is_quicker() -> None:
    crowded = cluster(view("p0"), view("p1", busy_until_s=10.0))
    got = placed(place(request(p0=2, p1=10), crowded, COST, ANY))
    assert (got.prefill, got.local_prefix_blocks) == ("p0", 2)
    assert (got.fetch_node, got.fetch_prefix_blocks) == ("node-p1", 10)
    assert got.ttft_est_s == pytest.approx(8 * 0.01 + 0.01), "only the missing blocks are copied"


def test_nothing_is_copied_over_a_slow_link() -> None:
    got = placed(place(request(p1=10), cluster(view("p0")), SLOW_LINK, ANY))
    assert (got.fetch_node, got.fetch_prefix_blocks) == (None, 0)


def test_the_local_prefix_is_preferred_when_both_take_as_long() -> None:
    even = dataclasses.replace(COST, prefill_token_s=0.0, transfer_bytes_per_s=float("inf"))
    assert placed(place(request(p0=1, p1=9), cluster(view("p0")), even, ANY)).fetch_node is None


def test_the_holder_may_be_a_node_without_prefill_instance() -> None:
    got = placed(place(request(d0=10), cluster(view("p0")), COST, ANY))
    assert (got.fetch_node, got.fetch_prefix_blocks) == ("node-d0", 10)


def test_of_equal_holders_the_first_node_is_asked() -> None:
    got = placed(place(request(z=10, y=10, x=9), cluster(view("p0")), COST, ANY))
    assert got.fetch_node == "node-y"


@pytest.mark.parametrize(("prompt_tokens", "usable"), [(160, 9), (161, 10), (16, 0), (17, 1), (1, 0)])
def test_one_prompt_token_is_always_computed(prompt_tokens: int, usable: int) -> None:
    local = placed(place(request(prompt_tokens, p0=99), cluster(view("p0")), COST, ANY))
    assert local.local_prefix_blocks == usable
    assert local.ttft_est_s > 0
    copied = placed(place(request(prompt_tokens, other=99), cluster(view("p0")), COST, ANY))
    assert copied.fetch_prefix_blocks == usable
    assert (copied.fetch_node is None) == (usable == 0)


# --- decode -----------------------------------------------------------------------------------------------------------


def test_decode_goes_where_the_step_is_shortest() -> None:
    decode = (view("d0", running_jobs=8, running_tokens=800), view("d1", running_jobs=2, running_tokens=9_000))
    assert placed(place(request(), cluster(view("p0"), decode=decode), COST, ANY)).decode == "d0"
    decode = (view("d0", running_jobs=8, running_tokens=800, factor=30.0, pace=30.0), decode[1])
    assert placed(place(request(), cluster(view("p0"), decode=decode), COST, ANY)).decode == "d1"


def test_of_equal_decode_instances_one_is_drawn() -> None:
    def drawn(*decode: InstanceView) -> set[str]:
        shapes = [replace(request(), draw=n) for n in range(8)]
        return {placed(place(shape, cluster(view("p0"), decode=decode), COST, ANY)).decode for shape in shapes}

    d1 = view("d1", running_jobs=2)
    assert drawn(d1, view("d2", running_jobs=2, factor=1.03)) == {"d1", "d2"}, "noise of a few percent decides nothing"
    assert drawn(d1, view("d2", running_jobs=3)) == {"d1"}, "a sequence more is more than noise here"


def test_decode_needs_room_for_the_prompt_and_some_growth() -> None:
    need = -(-(161 + 32) // BLOCK_TOKENS)
    short, enough = view("d0", blocks_available=need - 1), view("d1", blocks_available=need, running_jobs=50)
    assert placed(place(request(), cluster(view("p0"), decode=(short, enough)), COST, ANY)).decode == "d1"
    full = refused(place(request(), cluster(view("p0"), decode=(short,)), COST, ANY))
    assert full == Refused(reason="decode_pool_full", unavailable=False, retry_after_s=RETRY_AFTER_S)


def test_growth_is_asked_for_up_to_a_bound() -> None:
    need = -(-(161 + GROWTH_TOKENS) // BLOCK_TOKENS)
    just = cluster(view("p0"), decode=(view("d0", blocks_total=need, blocks_available=need),))
    assert placed(place(request(max_new_tokens=100_000), just, COST, ANY)).decode == "d0"


# --- saying no --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "reason"),
    [
        ((), (view("d0"),), "no_prefill_instance"),
        ((view("p0"),), (), "no_decode_instance"),
        ((view("p0", blocks_total=3, blocks_available=3),), (view("d0"),), "prefill_pool_too_small"),
        ((view("p0"),), (view("d0", blocks_total=3, blocks_available=3),), "decode_pool_too_small"),
    ],
)
def test_nobody_could_serve(prefill: tuple[InstanceView, ...], decode: tuple[InstanceView, ...], reason: str) -> None:
    got = refused(place(request(), ClusterView(prefill=prefill, decode=decode), COST, ANY))
    assert (got.reason, got.unavailable) == (reason, True)
    assert got.retry_after_s > 0


def test_a_full_prefill_pool_is_contended() -> None:
    got = refused(place(request(), cluster(view("p0", blocks_available=10)), COST, ANY))
    assert (got.reason, got.unavailable) == ("prefill_pool_full", False)


def test_an_objective_out_of_reach_is_refused_until_the_queue_is_shorter() -> None:
    busy = cluster(view("p0", busy_until_s=10.0))
    got = refused(place(request(), busy, COST, Objectives(ttft_s=5.0)))
    assert (got.reason, got.unavailable) == ("ttft_objective", False)
    assert got.retry_after_s == pytest.approx(10.0 + 1.61 - 5.0)
    assert placed(place(request(), busy, COST, Objectives(ttft_s=11.61))).ttft_est_s == pytest.approx(11.61)


def test_a_tbt_objective_out_of_reach_is_refused() -> None:
    slow = cluster(view("p0"), decode=(view("d0", running_jobs=100, running_tokens=10_000),))
    got = refused(place(request(), slow, COST, Objectives(tbt_s=0.1)))
    assert (got.reason, got.unavailable) == ("tbt_objective", False)


@pytest.mark.parametrize("field", ["prompt_tokens", "max_new_tokens", "block_tokens", "block_bytes"])
def test_a_request_has_a_shape(field: str) -> None:
    nothing: dict[str, Any] = {field: 0}
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(request(), **nothing)


# --- any cluster ------------------------------------------------------------------------------------------------------

instances = st.builds(
    lambda i, node, queued, running, free: view(
        f"i{i}", f"node-{node}", busy_until_s=queued, running_jobs=running, blocks_available=free
    ),
    i=st.integers(0, 50),
    node=st.integers(0, 4),
    queued=st.sampled_from([0.0, 1.0, 20.0]),
    running=st.integers(0, 3),
    free=st.sampled_from([0, 12, 10_000]),
)
pools = st.lists(instances, max_size=5, unique_by=lambda instance: instance.instance_id)
prefixes = st.dictionaries(st.integers(0, 5).map(str), st.integers(0, 12), max_size=5)


@given(pools, pools, prefixes, st.sampled_from([COST, SLOW_LINK]), st.randoms(use_true_random=False))
def test_the_order_of_a_view_does_not_matter(prefill, decode, prefix, cost, shuffler) -> None:  # type: ignore[no-untyped-def]
    straight = place(request(**prefix), ClusterView(prefill=tuple(prefill), decode=tuple(decode)), cost, ANY)
    for entries in (prefill, decode):
        shuffler.shuffle(entries)
    mixed_prefix = dict(reversed(prefix.items()))
    assert (
        place(request(**mixed_prefix), ClusterView(prefill=tuple(prefill), decode=tuple(decode)), cost, ANY) == straight
    )


@given(pools, prefixes, st.sampled_from([COST, SLOW_LINK]))
def test_no_instance_and_no_source_would_be_quicker(prefill, prefix, cost) -> None:  # type: ignore[no-untyped-def]
    shape = request(**prefix)
    outcome = place(shape, cluster(*prefill), cost, ANY)
    fitting = [p for p in prefill if p.blocks_available >= 11]
    if not fitting:
        assert isinstance(outcome, Refused)
        return
    usable = {node: min(blocks, 10) for node, blocks in shape.prefix_blocks.items()}
    every_way = [
        p.busy_until_s
        + max(0, blocks - usable.get(p.node_id, 0)) / cost.transfer_bytes_per_s * BLOCK_BYTES
        + cost.prefill_s(161 - max(blocks, usable.get(p.node_id, 0)) * BLOCK_TOKENS, 0)
        for p in fitting
        for blocks in [0, *usable.values()]
    ]
    got = placed(outcome)
    assert got.ttft_est_s <= min(every_way) + 1e-9
    assert any(got.ttft_est_s == pytest.approx(way) for way in every_way)
