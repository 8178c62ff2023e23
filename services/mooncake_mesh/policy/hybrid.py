"""When a decode instance computes a prompt itself, between its steps, and in how long chunks. Pure.

A prompt that is short, or whose prefix is on the decode node already (its last turn was decoded there), may have its
first token sooner there than at any prefill instance: all of those are busy, or would have to copy first. It is worth
it only where nobody who is decoded there is made to wait beyond the objective: a step and a chunk together have to stay
within a bound, and the instance computes one chunk with each step.

Where no time is gained, prompts stay with prefill instances: computing them disturbs nobody there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.mixed_step import longest_chunk, mixed_step, step_s
from mooncake_mesh.policy.prefill_choice import Estimates, PrefillChoice, Source, sources
from mooncake_mesh.policy.request_class import is_batch
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.serving import MixedStep

STEP_SHARE: Final = 0.95
"""Part of the TBT objective that a step with a chunk may take. The rest is for those whose first step comes later than
their first token."""

ROOM_SHARE: Final = 0.2
"""Part of the node's blocks that must stay available: those that are decoded grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineChoice:
    """``prompt.instance`` is the decode instance."""

    prompt: PrefillChoice
    step: MixedStep


def longest_step_s(objectives: Objectives) -> float | None:
    """What a step with a chunk may take under *objectives*; None without one for the time between tokens."""
    return None if objectives.tbt_s is None else STEP_SHARE * objectives.tbt_s


def inline_choice(
    request: RequestShape,
    able: Sequence[InstanceView],
    cluster: ClusterView,
    estimates: Estimates,
    cost: CostModel,
    step_limit_s: float | None,
    *,
    sooner_than_s: float,
) -> InlineChoice | None:
    """The decode instance among the *able* ones that has the first token of *request* soonest; None where none has it
    before *sooner_than_s*, or none can compute it in steps of *step_limit_s* at most.

    Batch requests stay with prefill instances, whose idle time they are to fill, and so does everything where steps
    have no limit.
    """
    if step_limit_s is None or is_batch(request.priority):
        return None
    frontier = [source for source in sources(cluster, estimates) if not source.read_blocks]
    found: list[InlineChoice] = []
    for instance in able:
        if estimates.queue_s(instance, 0) >= sooner_than_s or not _has_room(request, instance):
            continue
        local = estimates.arena.get(instance.node_id, 0)
        better = [s for s in frontier if s.blocks > local and s.node != instance.node_id]
        for source in (None, *better):
            choice = _inline(request, instance, source, estimates, cost, step_limit_s)
            if choice is not None and choice.prompt.ttft_s < sooner_than_s:
                found.append(choice)
    return min(found, key=lambda choice: (choice.prompt.ttft_s, choice.prompt.instance.instance_id), default=None)


def _inline(
    request: RequestShape,
    instance: InstanceView,
    source: Source | None,
    estimates: Estimates,
    cost: CostModel,
    step_limit_s: float,
) -> InlineChoice | None:
    """*instance* with what its node has in memory, or once it has copied what that lacks of *source*'s prefix."""
    local = estimates.arena.get(instance.node_id, 0)
    used = local if source is None else source.blocks
    cached = used * request.block_tokens
    step = mixed_step(cost, instance.factor, step_limit_s)
    own_s = _chunks_s(instance, step, request.prompt_tokens, cached)
    if own_s is None:
        return None
    alone_s = instance.factor * estimates.prefill_s(used)
    ahead_s = estimates.queue_s(instance, used) * max(1.0, own_s / alone_s if alone_s else 1.0)
    copy_s = 0.0 if source is None else source.wait_s + estimates.copy_s(used - local)
    return InlineChoice(
        prompt=PrefillChoice(
            instance=instance,
            ttft_s=max(ahead_s, copy_s) + own_s,
            local_blocks=local,
            fetch_node=None if source is None else source.node,
            fetch_blocks=0 if source is None else source.blocks,
            read_limit_blocks=local if estimates.local.get(instance.node_id, 0) > local else None,
        ),
        step=step,
    )


def _chunks_s(instance: InstanceView, step: MixedStep, prompt_tokens: int, cached_tokens: int) -> float | None:
    """All chunks of a prompt with the steps of what runs on *instance* now, and one more: as if all whole ones were as
    the one in the middle. None where no chunk fits behind all of it."""
    sequences, context, uncached = instance.running_jobs + 1, instance.running_tokens, prompt_tokens - cached_tokens
    if not longest_chunk(step, sequences, context, prompt_tokens):
        return None
    middle = cached_tokens + uncached // 2
    chunk = longest_chunk(step, sequences, context, middle)
    whole, rest = divmod(uncached, chunk)
    last_s = step_s(step, sequences, context, rest, prompt_tokens - rest) if rest else 0.0
    return whole * step_s(step, sequences, context, chunk, middle) + last_s


def _has_room(request: RequestShape, instance: InstanceView) -> bool:
    left = instance.blocks_available - request.blocks_for(request.prompt_tokens + 1)
    return left >= ROOM_SHARE * instance.blocks_total
