"""When a decode instance computes a prompt itself, between its steps, and in how long chunks. Pure.

A prompt that is short, or whose prefix is on the decode node already (its last turn was decoded there), may have its
first token sooner there than at any prefill instance: all of those are busy, or would have to copy first. It is worth
it only where nobody who is decoded there is made to wait beyond the objective: a step and a chunk together have to stay
within a bound, and the instance computes one chunk with each step.

Where no time is gained, prompts stay with prefill instances: computing them disturbs nobody there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.prefill_choice import Estimates, PrefillChoice, Source, sources
from mooncake_mesh.policy.request_class import is_batch
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape

CHUNK_GRAIN_TOKENS: Final = 16
"""Chunks are as many tokens or a multiple. Blocks can be much longer, and whole ones would leave no fitting chunk."""

LONGEST_CHUNK_TOKENS: Final = 2048

STEP_SHARE: Final = 0.85
"""Part of the TBT objective that a step with a chunk may take. The rest is for those who join while the prompt is
computed: its chunks stay as long as they were when it was placed."""

ROOM_SHARE: Final = 0.2
"""Part of the node's blocks that must stay available: those that are decoded grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineChoice:
    """``prompt.instance`` is the decode instance."""

    prompt: PrefillChoice
    chunk_tokens: int


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
        if estimates.queue_s(instance) >= sooner_than_s or not _has_room(request, instance):
            continue
        local = estimates.arena.get(instance.node_id, 0)
        better = [s for s in frontier if s.blocks > local and s.node != instance.node_id]
        for source in (None, *better):
            choice = _inline(request, instance, source, estimates, cost, step_limit_s)
            if choice is not None and choice.prompt.ttft_s < sooner_than_s:
                found.append(choice)
    return min(found, key=lambda choice: (choice.prompt.ttft_s, choice.prompt.instance.instance_id), default=None)


def chunk_tokens_within(
    limit_s: float, instance: InstanceView, cost: CostModel, *, prompt_tokens: int, cached_tokens: int
) -> int:
    """The longest chunk, in whole grains, that takes *limit_s* at most behind all the rest of the prompt, with a step
    of all that run and wait on *instance* and of one more; 0 if not even one grain does."""
    uncached = prompt_tokens - cached_tokens
    fits, beyond = 0, min(ceil(uncached / CHUNK_GRAIN_TOKENS), LONGEST_CHUNK_TOKENS // CHUNK_GRAIN_TOKENS) + 1
    while beyond - fits > 1:
        grains = (fits + beyond) // 2
        tokens = min(grains * CHUNK_GRAIN_TOKENS, uncached)
        if mixed_step_s(instance, cost, tokens, prompt_tokens - tokens, more=1) <= limit_s:
            fits = grains
        else:
            beyond = grains
    return fits * CHUNK_GRAIN_TOKENS


def mixed_step_s(
    instance: InstanceView, cost: CostModel, chunk_tokens: int, chunk_start: int, *, more: int = 0
) -> float:
    """A step of all that run and wait on *instance*, and of so many *more* sequences, with a chunk."""
    return instance.factor * cost.mixed_step_s(
        instance.running_jobs + instance.waiting_jobs + more,
        instance.running_tokens + instance.waiting_tokens,
        chunk_tokens,
        chunk_start,
    )


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
    chunk_tokens = chunk_tokens_within(
        step_limit_s, instance, cost, prompt_tokens=request.prompt_tokens, cached_tokens=cached
    )
    if not chunk_tokens:
        return None
    own_s = _chunks_s(instance, cost, request.prompt_tokens, cached, chunk_tokens)
    alone_s = instance.factor * estimates.prefill_s(used)
    ahead_s = estimates.queue_s(instance) * max(1.0, own_s / alone_s if alone_s else 1.0)
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
        chunk_tokens=chunk_tokens,
    )


def _chunks_s(
    instance: InstanceView, cost: CostModel, prompt_tokens: int, cached_tokens: int, chunk_tokens: int
) -> float:
    """All chunks of a prompt: the whole ones as one in the middle of them, and the last."""
    whole, rest = divmod(prompt_tokens - cached_tokens, chunk_tokens)
    last_s = mixed_step_s(instance, cost, rest, prompt_tokens - rest) if rest else 0.0
    if not whole:
        return last_s
    middle = cached_tokens + (whole - 1) * chunk_tokens // 2
    return whole * mixed_step_s(instance, cost, chunk_tokens, middle) + last_s


def _has_room(request: RequestShape, instance: InstanceView) -> bool:
    left = instance.blocks_available - request.blocks_for(request.prompt_tokens + 1)
    return left >= ROOM_SHARE * instance.blocks_total
