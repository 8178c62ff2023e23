"""When a decode instance computes a prompt itself, between its steps, and in how long chunks. Pure.

A prompt that is short, or whose prefix is on the decode node already (its last turn was decoded there), may have its
first token sooner there than at any prefill instance: all of those are busy, or would have to copy first. It is worth
it only where nobody who is decoded there is made to wait beyond the objective: a step and a chunk together have to stay
within it, and the instance computes one chunk before each step.

Where no time is gained, prompts stay with prefill instances: computing them disturbs nobody there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from mooncake_mesh.policy.admission import TBT_SHARE
from mooncake_mesh.policy.cost_model import CostModel, instance_step_s
from mooncake_mesh.policy.prefill_choice import Estimates, PrefillChoice, Source, sources
from mooncake_mesh.policy.request_class import is_batch
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape

LONGEST_CHUNK_TOKENS: Final = 512
"""What comes in during a chunk, a cancel or a sequence that is ready to be decoded, waits for its end."""

ROOM_SHARE: Final = 0.2
"""Part of the node's blocks that must stay available: those that are decoded grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InlineChoice:
    """``prompt.instance`` is the decode instance. ``chunk_tokens`` are whole blocks."""

    prompt: PrefillChoice
    chunk_tokens: int


def inline_choice(
    request: RequestShape,
    able: Sequence[InstanceView],
    cluster: ClusterView,
    estimates: Estimates,
    cost: CostModel,
    objectives: Objectives,
    *,
    sooner_than_s: float,
) -> InlineChoice | None:
    """The decode instance among the *able* ones that has the first token of *request* soonest; None where none has it
    before *sooner_than_s*, or none can compute it within the objective for the time between tokens.

    Batch requests stay with prefill instances, whose idle time they are to fill, and so does everything where there is
    no such objective.
    """
    if objectives.tbt_s is None or is_batch(request.priority):
        return None
    frontier = [source for source in sources(cluster, estimates) if not source.read_blocks]
    found: list[InlineChoice] = []
    for instance in able:
        if estimates.queue_s(instance, 0) >= sooner_than_s or not _has_room(request, instance):
            continue
        local = estimates.arena.get(instance.node_id, 0)
        better = [s for s in frontier if s.blocks > local and s.node != instance.node_id]
        for source in (None, *better):
            choice = _inline(request, instance, source, estimates, cost, objectives.tbt_s)
            if choice is not None and choice.prompt.ttft_s < sooner_than_s:
                found.append(choice)
    return min(found, key=lambda choice: (choice.prompt.ttft_s, choice.prompt.instance.instance_id), default=None)


def chunk_tokens_within(
    limit_s: float,
    instance: InstanceView,
    cost: CostModel,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    block_tokens: int,
) -> int:
    """The longest chunk, in whole blocks, that *instance* computes within *limit_s* behind all the rest of the prompt;
    0 if not even one block is."""
    uncached = prompt_tokens - cached_tokens
    fits, beyond = 0, min(ceil(uncached / block_tokens), max(1, LONGEST_CHUNK_TOKENS // block_tokens)) + 1
    while beyond - fits > 1:
        blocks = (fits + beyond) // 2
        tokens = min(blocks * block_tokens, uncached)
        if instance.factor * cost.prefill_s(tokens, prompt_tokens - tokens) <= limit_s:
            fits = blocks
        else:
            beyond = blocks
    return fits * block_tokens


def _inline(
    request: RequestShape,
    instance: InstanceView,
    source: Source | None,
    estimates: Estimates,
    cost: CostModel,
    tbt_s: float,
) -> InlineChoice | None:
    """*instance* with what its node has in memory, or once it has copied what that lacks of *source*'s prefix."""
    local = estimates.arena.get(instance.node_id, 0)
    used = local if source is None else source.blocks
    cached = used * request.block_tokens
    step_s = instance_step_s(instance, cost, request.prompt_tokens)
    chunk_tokens = chunk_tokens_within(
        tbt_s * TBT_SHARE - step_s,
        instance,
        cost,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=cached,
        block_tokens=request.block_tokens,
    )
    if not chunk_tokens:
        return None
    copy_s = 0.0 if source is None else source.wait_s + estimates.copy_s(used - local)
    chunks = ceil((request.prompt_tokens - cached) / chunk_tokens)
    own_s = instance.factor * (estimates.prefill_s(used) + (chunks - 1) * cost.prefill_s(0, 0))
    ahead_s = estimates.queue_s(instance, used)
    ttft_s = max(ahead_s, copy_s) + own_s
    if instance.running_jobs or instance.waiting_jobs:
        ttft_s += ceil((ahead_s + own_s) / (own_s / chunks)) * step_s if own_s else step_s
    return InlineChoice(
        prompt=PrefillChoice(
            instance=instance,
            ttft_s=ttft_s,
            local_blocks=local,
            fetch_node=None if source is None else source.node,
            fetch_blocks=0 if source is None else source.blocks,
            read_limit_blocks=local if estimates.local.get(instance.node_id, 0) > local else None,
        ),
        chunk_tokens=chunk_tokens,
    )


def _has_room(request: RequestShape, instance: InstanceView) -> bool:
    left = instance.blocks_available - request.blocks_for(request.prompt_tokens + 1)
    return left >= ROOM_SHARE * instance.blocks_total
