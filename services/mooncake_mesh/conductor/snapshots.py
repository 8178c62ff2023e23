"""From what an instance reported and what was placed on it since to the view that a policy sees. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.mesh.peers import Lease
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.forecast import kv_limit_tokens
from mooncake_mesh.policy.request_class import BEGUN
from mooncake_mesh.policy.views import InstanceView, QueuedPrompt
from mooncake_proto.control import Load

_MOST_PROMPTS: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Placed, and not taken over by a beat yet.

    At a prefill instance a prompt, at a decode instance KV, at a messenger blocks that decoding will reserve. A prompt
    that a decode instance computes itself is one at that.
    """

    placed_s: float
    tokens: int = 0
    prefill_s: float = 0.0
    priority: int = 0
    blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoom:
    """Blocks of the arena on an instance's node."""

    blocks_total: int
    blocks_available: int


def node_room(reported: Load, pending: Sequence[Pending]) -> NodeRoom:
    """What a messenger reported, less what was promised to decode instances since.

    Prompts take no share of that: at a prefill instance they wait in line and hold blocks one after the other.
    """
    reserved = sum(work.blocks for work in pending)
    return NodeRoom(
        blocks_total=reported.blocks_total,
        blocks_available=max(0, reported.blocks_free + reported.blocks_evictable - reserved),
    )


class PromptTimes:
    """Prompts of a queue with the time that each takes. The same ones are reported with every beat while they wait."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: dict[tuple[int, int, float, int], QueuedPrompt] = {}

    def queued(self, uncached: int, cached: int, factor: float, priority: int = 0) -> QueuedPrompt:
        """A prompt at an instance that is *factor* times as slow as the model says."""
        key = (uncached, cached, factor, priority)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_PROMPTS:
                self._known.clear()
            prefill_s = factor * self._cost.prefill_s(uncached, cached)
            known = self._known[key] = QueuedPrompt(tokens=uncached + cached, prefill_s=prefill_s, priority=priority)
        return known


def reported_queue(load: Load, times: PromptTimes, factor: float) -> list[QueuedPrompt]:
    """The prompts that a prefill instance has accepted and not computed, in their order."""
    prompts = load.queued_prompts or (((load.queued_tokens, 0),) if load.queued_tokens else ())
    priorities = load.queued_priorities if len(load.queued_priorities) == len(prompts) else (0,) * len(prompts)
    return [
        times.queued(uncached, cached, factor, priority)
        for (uncached, cached), priority in zip(prompts, priorities, strict=True)
    ]


def prefill_view(
    lease: Lease,
    room: NodeRoom,
    pending: Sequence[Pending],
    times: PromptTimes,
    pace: float,
    *,
    busy_until_s: float,
    last_placed: int,
) -> InstanceView:
    """*busy_until_s* is reckoned; a report alone would be as late as its beat."""
    queue = reported_queue(lease.load, times, pace)
    queue += [QueuedPrompt(tokens=work.tokens, prefill_s=work.prefill_s, priority=work.priority) for work in pending]
    return InstanceView(
        instance_id=lease.member.instance_id,
        node_id=lease.member.node_id,
        blocks_total=room.blocks_total,
        blocks_available=room.blocks_available,
        busy_until_s=busy_until_s,
        queue=tuple(queue),
        least_urgent=max((prompt.priority for prompt in queue), default=BEGUN),
        factor=pace,
        pace=pace,
        last_placed=last_placed,
    )


def decode_view(
    lease: Lease,
    room: NodeRoom,
    pending: Sequence[Pending],
    cost: CostModel,
    factor: float,
    *,
    step_limit_s: float | None,
    pace: float,
    last_placed: int,
) -> InstanceView:
    """*step_limit_s* bounds the KV it may run; without one its blocks do.

    A worker that can decode fewer blocks at a time than its node takes in (device memory beside host memory) says so
    in its own load.
    """
    load = lease.load
    blocks_total = load.blocks_total or room.blocks_total
    busy_until_s = lease.renewed_s + factor * sum(cost.prefill_s(*prompt) for prompt in load.queued_prompts)
    for work in pending:
        if work.prefill_s:
            busy_until_s = max(busy_until_s, work.placed_s) + work.prefill_s
    limit_tokens = 0
    if step_limit_s is not None and lease.member.model is not None:
        room_tokens = blocks_total * lease.member.model.block_tokens
        known = load.running_tokens / load.running_jobs if load.running_jobs else room_tokens
        limit_tokens = kv_limit_tokens(
            cost, factor=factor, tbt_s=step_limit_s, room_tokens=room_tokens, tokens_per_job=max(1.0, known)
        )
    return InstanceView(
        instance_id=lease.member.instance_id,
        node_id=lease.member.node_id,
        blocks_total=blocks_total,
        blocks_available=room.blocks_available,
        busy_until_s=busy_until_s,
        running_jobs=load.running_jobs,
        running_tokens=load.running_tokens,
        waiting_jobs=load.queued_jobs + len(pending),
        waiting_tokens=load.queued_tokens + sum(work.tokens for work in pending),
        sequences=load.sequences,
        step_s=load.step_s,
        kv_limit_tokens=limit_tokens,
        max_batch=load.max_batch,
        factor=factor,
        pace=pace,
        last_placed=last_placed,
    )
