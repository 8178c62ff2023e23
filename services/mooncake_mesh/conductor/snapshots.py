"""From what an instance reported and what was placed on it since to the view that a policy sees. Pure functions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, overload

from mooncake_mesh.mesh.peers import Lease
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.forecast import kv_limit_tokens
from mooncake_mesh.policy.queue_order import queue_up, waiting_prompt
from mooncake_mesh.policy.request_class import BEGUN, is_batch
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


class PromptTimes(dict[tuple[int, int], float]):
    """How long a prompt of (uncached, cached) tokens takes by the cost model.

    The same ones are reported with every beat while they wait.
    """

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self._cost = cost

    def __missing__(self, prompt: tuple[int, int]) -> float:
        if len(self) >= _MOST_PROMPTS:
            self.clear()
        known = self[prompt] = self._cost.prefill_s(*prompt)
        return known


class PromptQueue(Sequence[QueuedPrompt]):
    """The queue of one report, and what was placed after it. Immutable.

    Its prompts are made when somebody looks at one: there may be thousands, and most policies ask for their number.
    *arrivals_s* are those of the last ones, which others may overtake; None: nobody overtakes.
    """

    __slots__ = (
        "_arrivals_s",
        "_before",
        "_busy_until_s",
        "_made",
        "_pending",
        "_prefills_s",
        "_priorities",
        "_prompts",
        "_ttft_s",
    )

    def __init__(
        self,
        prompts: tuple[tuple[int, int], ...],
        prefills_s: Sequence[float],
        priorities: Sequence[int],
        arrivals_s: Sequence[float] | None,
        ttft_s: float | None,
    ) -> None:
        self._prompts = prompts
        self._prefills_s = prefills_s
        self._priorities = priorities
        self._arrivals_s = arrivals_s
        self._ttft_s = ttft_s
        self._pending: tuple[Pending, ...] = ()
        self._before: PromptQueue | None = None
        self._busy_until_s = 0.0
        self._made: tuple[QueuedPrompt, ...] | None = None

    def followed_by(self, pending: Sequence[Pending], busy_until_s: float) -> "PromptQueue":
        """With *pending* put where the instance will put them; all are computed by *busy_until_s*."""
        after = PromptQueue(self._prompts, self._prefills_s, self._priorities, self._arrivals_s, self._ttft_s)
        after._pending, after._busy_until_s = tuple(pending), busy_until_s
        after._before = self if self._before is None else self._before
        return after

    @property
    def is_ordered(self) -> bool:
        return self._arrivals_s is not None

    def __len__(self) -> int:
        return len(self._prompts) + len(self._pending)

    @property
    def least_urgent(self) -> int:
        """The largest priority among the reported ones."""
        return max(self._priorities, default=BEGUN)

    @property
    def reported_s(self) -> Sequence[float]:
        """How long each of the reported ones takes."""
        return self._prefills_s

    @overload
    def __getitem__(self, index: int) -> QueuedPrompt: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[QueuedPrompt, ...]: ...
    def __getitem__(self, index: int | slice) -> QueuedPrompt | tuple[QueuedPrompt, ...]:
        return self._all()[index]

    def __iter__(self) -> Iterator[QueuedPrompt]:
        return iter(self._all())

    def _all(self) -> tuple[QueuedPrompt, ...]:
        if self._made is None:
            self._made = tuple(self._in_order())
        return self._made

    def _in_order(self) -> list[QueuedPrompt]:
        """Of one report there are as many queues as placements until the next one, so its own part is made once."""
        queue = self._reported() if self._before is None else list(self._before._all())
        ends_s = self._busy_until_s - sum(work.prefill_s for work in self._pending)
        for work in self._pending:
            prompt = QueuedPrompt(tokens=work.tokens, prefill_s=work.prefill_s, priority=work.priority)
            has_to_wait = self.is_ordered and ends_s > work.placed_s
            queue_up(self._waiting(prompt, work.placed_s) if has_to_wait else prompt, queue, ends_s)
            ends_s += work.prefill_s
        return queue

    def _reported(self) -> list[QueuedPrompt]:
        reported = zip(self._prompts, self._prefills_s, self._priorities, strict=True)
        queue = [
            QueuedPrompt(tokens=uncached + cached, prefill_s=prefill_s, priority=priority)
            for (uncached, cached), prefill_s, priority in reported
        ]
        arrivals_s = self._arrivals_s or ()
        for i, arrival_s in enumerate(arrivals_s, start=len(queue) - len(arrivals_s)):
            queue[i] = self._waiting(queue[i], arrival_s)
        return queue

    def _waiting(self, prompt: QueuedPrompt, arrival_s: float) -> QueuedPrompt:
        return waiting_prompt(prompt, arrival_s, None if is_batch(prompt.priority) else self._ttft_s)


def reported_queue(
    load: Load, times: PromptTimes, factor: float, *, reported_s: float, ttft_s: float | None
) -> PromptQueue:
    """The prompts that a prefill instance has accepted and not computed, in their order.

    *ttft_s* is the objective that decides who may overtake whom.
    """
    prompts = load.queued_prompts or (((load.queued_tokens, 0),) if load.queued_tokens else ())
    priorities = load.queued_priorities if len(load.queued_priorities) == len(prompts) else (0,) * len(prompts)
    waits_s = load.queued_waits_s
    return PromptQueue(
        prompts,
        [factor * prefill_s for prefill_s in map(times.__getitem__, prompts)],
        priorities,
        None if waits_s is None else [reported_s - wait_s for wait_s in waits_s[: len(prompts)]],
        ttft_s,
    )


def prefill_view(
    lease: Lease,
    room: NodeRoom,
    reported: PromptQueue,
    pending: Sequence[Pending],
    pace: float,
    *,
    busy_until_s: float,
) -> InstanceView:
    """*pending* comes after what was *reported*; *busy_until_s* is reckoned: a report alone would be as late as its
    beat."""
    queue, least_urgent = reported, reported.least_urgent
    if pending:
        queue = reported.followed_by(pending, busy_until_s)
        least_urgent = max(least_urgent, *(work.priority for work in pending))
    return InstanceView(
        instance_id=lease.member.instance_id,
        node_id=lease.member.node_id,
        blocks_total=room.blocks_total,
        blocks_available=room.blocks_available,
        busy_until_s=busy_until_s,
        queue=queue,
        least_urgent=least_urgent,
        is_ordered=reported.is_ordered,
        factor=pace,
        pace=pace,
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
    )
