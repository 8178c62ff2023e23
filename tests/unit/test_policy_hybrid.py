"""When a decode instance computes a prompt itself, and in what chunks."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.config_scheduling import HybridDecodeKind
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.decisions import Placed, Refused
from mooncake_mesh.policy.hybrid import longest_step_s
from mooncake_mesh.policy.mixed_step import longest_chunk
from mooncake_mesh.policy.placement import Scheduling, place
from mooncake_mesh.policy.request_class import BATCH_PRIORITY
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, QueuedPrompt, RequestShape
from mooncake_proto.ids import InstanceId, NodeId

BLOCK_TOKENS = 16
COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.001,
    cached_token_s=0.0,
    step_base_s=0.02,
    step_sequence_s=0.0,
    step_context_token_s=0.0,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e9,
)
OBJECTIVES = Objectives(ttft_s=30.0, tbt_s=0.1)
AUTO = Scheduling(hybrid_decode=HybridDecodeKind.AUTO)


def view(name: str, **fields: float) -> InstanceView:
    base = {"blocks_total": 1_000, "blocks_available": 1_000}
    identity = {"instance_id": InstanceId(name), "node_id": NodeId(f"node-{name}")}
    return InstanceView(**(identity | base | fields))  # type: ignore[arg-type]


def busy(until_s: float) -> InstanceView:
    return dataclasses.replace(view("p0", busy_until_s=until_s), queue=(QueuedPrompt(tokens=1_000, prefill_s=until_s),))


def request(prompt_tokens: int = 160, *, priority: int = 0, **prefix_blocks: int) -> RequestShape:
    return RequestShape(
        prompt_tokens=prompt_tokens,
        max_new_tokens=32,
        block_tokens=BLOCK_TOKENS,
        block_bytes=1_000,
        prefix_blocks={NodeId(f"node-{name}"): blocks for name, blocks in prefix_blocks.items()},
        priority=priority,
    )


def chosen(
    shape: RequestShape,
    *decode: InstanceView,
    prefill: InstanceView | None = None,
    objectives: Objectives = OBJECTIVES,
    scheduling: Scheduling = AUTO,
) -> Placed | Refused:
    return place(shape, ClusterView(prefill=(prefill or busy(1.0),), decode=decode), COST, objectives, scheduling)


def inline(outcome: Placed | Refused) -> str | None:
    """Where the prompt is computed between steps; None: at a prefill instance."""
    assert isinstance(outcome, Placed)
    assert (outcome.inline_step is not None) == (outcome.prefill == outcome.decode)
    return None if outcome.inline_step is None else outcome.prefill


def chunk(outcome: Placed | Refused, sequences: int) -> int:
    """The longest first chunk, with so many sequences that are decoded."""
    assert isinstance(outcome, Placed)
    assert outcome.inline_step is not None
    return longest_chunk(outcome.inline_step, sequences, 0, 0)


def test_a_prompt_is_computed_where_its_first_token_is_sooner() -> None:
    got = chosen(request(), view("d0", running_jobs=1))
    assert inline(got) == "d0"
    assert isinstance(got, Placed)
    # 0.085 s less a step of 0.02 s are 65 tokens: chunks of 64 tokens, three of them, with a step each
    assert (chunk(got, 1), got.tbt_est_s) == (64, 0.02)
    assert got.ttft_est_s == pytest.approx(0.160 + 3 * 0.02)


def test_nothing_moves_where_no_time_is_gained() -> None:
    assert inline(chosen(request(), view("d0"), prefill=view("p0"))) is None
    assert inline(chosen(request(), view("d0", running_jobs=1), prefill=busy(0.05))) is None
    assert inline(chosen(request(), view("d0", running_jobs=1), prefill=busy(0.07))) == "d0"


@pytest.mark.parametrize(
    "scheduling", [Scheduling(), Scheduling(hybrid_decode=HybridDecodeKind.OFF)], ids=["default", "off"]
)
def test_it_has_to_be_switched_on(scheduling: Scheduling) -> None:
    assert inline(chosen(request(), view("d0"), scheduling=scheduling)) is None


def test_who_is_decoded_keeps_the_objective() -> None:
    slow = view("d0", running_jobs=1, factor=4.0)  # a step of 0.08 s: not even a grain fits beside it
    assert inline(chosen(request(), slow, prefill=busy(20.0))) is None
    assert inline(chosen(request(), slow, view("d1"), prefill=busy(20.0))) == "d1"


def test_without_an_objective_or_for_batch_work_prompts_stay_with_prefill() -> None:
    assert inline(chosen(request(), view("d0"), objectives=Objectives())) is None
    bounded = dataclasses.replace(AUTO, hybrid_step_s=0.06)
    got = chosen(request(), view("d0"), objectives=Objectives(), scheduling=bounded)
    assert inline(got) == "d0", "a limit of its own is as good"
    assert chunk(got, 1) == 32
    batch = chosen(request(priority=BATCH_PRIORITY), view("d0"), prefill=view("p0", factor=10.0))
    assert inline(batch) is None


def test_room_is_left_for_those_that_grow() -> None:
    assert inline(chosen(request(), view("d0", blocks_available=211))) == "d0"
    assert inline(chosen(request(), view("d0", blocks_available=210))) is None


def test_prompts_that_wait_there_already_count() -> None:
    assert inline(chosen(request(), view("d0", busy_until_s=1.2), view("d1", busy_until_s=0.1))) == "d1"
    assert inline(chosen(request(), view("d0", busy_until_s=1.2))) is None


def test_what_is_cached_on_the_decode_node_need_not_be_computed() -> None:
    idle = view("p0")
    assert inline(chosen(request(d0=9), view("d0", running_jobs=1), prefill=idle)) is None, "copied in time"
    got = chosen(request(d0=9), view("d0", running_jobs=1), prefill=busy(0.1))
    assert inline(got) == "d0"
    assert isinstance(got, Placed)
    assert (got.local_prefix_blocks, got.fetch_node) == (9, None)
    assert got.ttft_est_s == pytest.approx(0.016 + 0.02)


def test_a_prefix_of_another_node_is_copied() -> None:
    got = chosen(request(p0=9), view("d0"))
    assert inline(got) == "d0"
    assert isinstance(got, Placed)
    assert (got.local_prefix_blocks, got.fetch_node, got.fetch_prefix_blocks) == (0, "node-p0", 9)


def test_a_sooner_first_token_lets_a_request_in() -> None:
    late = busy(40.0)
    assert isinstance(chosen(request(), view("d0"), prefill=late, scheduling=Scheduling()), Refused)
    assert inline(chosen(request(), view("d0"), prefill=late)) == "d0"


instances = st.builds(
    lambda i, busy_s, running, free, factor: view(
        f"i{i}", busy_until_s=busy_s, running_jobs=running, blocks_available=free, factor=factor
    ),
    i=st.integers(0, 50),
    busy_s=st.sampled_from([0.0, 0.1, 2.0]),
    running=st.integers(0, 3),
    free=st.sampled_from([0, 250, 1_000]),
    factor=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
)
pools = st.lists(instances, min_size=1, max_size=4, unique_by=lambda instance: instance.instance_id)


@given(
    prefill=pools,
    decode=pools,
    prefix=st.dictionaries(st.integers(0, 50).map("i{}".format), st.integers(0, 12), max_size=4),
    tokens=st.sampled_from([5, 160, 2_000]),
    shuffler=st.randoms(use_true_random=False),
)
def test_it_never_makes_a_first_token_later_nor_a_step_too_long(  # type: ignore[no-untyped-def]
    prefill, decode, prefix, tokens, shuffler
) -> None:
    shape = request(tokens, **prefix)
    apart = place(shape, ClusterView(prefill=prefill, decode=decode), COST, OBJECTIVES)
    got = place(shape, ClusterView(prefill=prefill, decode=decode), COST, OBJECTIVES, AUTO)
    shuffler.shuffle(prefill)
    shuffler.shuffle(decode)
    assert place(shape, ClusterView(prefill=prefill, decode=decode), COST, OBJECTIVES, AUTO) == got
    if not isinstance(got, Placed) or got.inline_step is None:
        assert got == apart
        return
    assert not isinstance(apart, Placed) or got.ttft_est_s < apart.ttft_est_s
    instance = next(one for one in decode if one.instance_id == got.decode)
    cached = max(got.local_prefix_blocks, got.fetch_prefix_blocks) * BLOCK_TOKENS
    limit_s = longest_step_s(OBJECTIVES)
    assert limit_s is not None
    longest = longest_chunk(got.inline_step, instance.running_jobs + 1, instance.running_tokens, cached)
    assert longest > 0
    assert instance.factor * COST.mixed_step_s(instance.running_jobs + 1, 0, longest, cached) <= limit_s + 1e-9
