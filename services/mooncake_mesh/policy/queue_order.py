"""In which order an instance computes the prompts that wait for it.

A prompt that comes is put in from the tail: it overtakes one waiting prompt after the other until it meets one that it
may not overtake, and stays behind that. Nobody is ever moved otherwise, so each step is a rule about two prompts:

1. *Priority.* A more urgent one overtakes, whatever that costs the other; a less urgent one never does. Waiting counts:
   whoever has waited ``aging_s`` per step of priority between them is not overtaken any more.
2. *Fair share.* Of two tenants with equal priority, the one that has had less of its share overtakes; see
   :mod:`~mooncake_mesh.policy.fair_share`.
3. *Slack* (slack-preserving insertion). Otherwise the one that is due first overtakes, where a prompt is due at
   ``arrival + stretch × service``: a long prompt can wait longer in proportion. But only if the overtaken prompt is
   still expected to be computed within ``safety`` of its own objective afterwards. A prompt that is too late anyway
   loses nothing more, yet is not overtaken either: who waits in vain is refused (:func:`is_late`), not starved.

With an infinite ``safety`` rule 3 is plain earliest-deadline-first over relative deadlines; with one tenant, one
priority and no objective as well.

Pure functions of values; times are seconds of one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from mooncake_mesh.policy.views import ClusterView, InstanceView, QueuedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingPrompt:
    """A prompt that has been accepted and whose computation has not begun.

    ``service_s`` is how long it is expected to take once it is its turn; ``ttft_s`` its objective from arrival to first
    token, None for none. Lower ``priority`` is more urgent. ``share_start`` orders tenants: how much service, in units
    that only compare with each other, its tenant was due to have had when this prompt is served.
    """

    arrival_s: float
    service_s: float
    ttft_s: float | None = None
    priority: int = 0
    tenant: str = ""
    share_start: float = 0.0

    def latest_s(self, safety: float = 1.0) -> float:
        """When its first token is due at the latest, if it may take *safety* of its objective."""
        return inf if self.ttft_s is None else self.arrival_s + safety * self.ttft_s


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """``stretch``: how many times its own service a prompt can wait before it is due. ``safety``: part of the TTFT
    objective that overtaking may use up. ``aging_s``: how long a prompt waits until it counts as one step of priority
    more urgent."""

    stretch: float = 10.0
    safety: float = 0.95
    aging_s: float = 10.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")


DEFAULT_RULES: Final = QueueRules()


def insertion_index(
    new: WaitingPrompt, queue: Sequence[WaitingPrompt], *, free_s: float, rules: QueueRules = DEFAULT_RULES
) -> int:
    """Where in *queue*, next one first, *new* belongs: before the prompt at that index, or at the end.

    *free_s* is when the instance will be done with what it computes now; the prompts then follow one another. Takes
    time linear in the queue and changes nothing.
    """
    finish_s = free_s + sum(waiting.service_s for waiting in queue)
    index = len(queue)
    while index and _may_overtake(new, queue[index - 1], finish_s, rules):
        finish_s -= queue[index - 1].service_s
        index -= 1
    return index


def seen_by(priority: int, cluster: ClusterView) -> ClusterView:
    """*cluster* as a request of that priority meets it: without the queued prompts that it overtakes.

    Those that have waited long enough not to be overtaken are not told apart.
    """
    if all(instance.least_urgent <= priority for instance in cluster.prefill):
        return cluster
    return replace(cluster, prefill=[_without_less_urgent(instance, priority) for instance in cluster.prefill])


def begin_s(instance: InstanceView, service_s: float, *, now_s: float, priority: int = 0) -> tuple[float, int]:
    """When *instance* would begin a prompt that comes at *now_s* and takes *service_s*, and how many it would overtake.

    Less urgent prompts must not be in it any more (:func:`seen_by`); tenants are not told apart.
    """
    new = QueuedPrompt(
        tokens=0, prefill_s=service_s, priority=priority, due_s=now_s + DEFAULT_RULES.stretch * service_s
    )
    index, free_s = _behind(new, instance.queue, instance.busy_until_s)
    return max(now_s, free_s), len(instance.queue) - index


def queue_up(new: QueuedPrompt, queue: list[QueuedPrompt], busy_until_s: float) -> None:
    """Put *new* where its instance, which will have computed *queue* by *busy_until_s*, puts it."""
    queue.insert(_behind(new, queue, busy_until_s)[0], new)


def waiting_prompt(prompt: QueuedPrompt, arrival_s: float, ttft_s: float | None) -> QueuedPrompt:
    """*prompt* as one that others may overtake, by the default rules."""
    rules = DEFAULT_RULES
    return QueuedPrompt(  # not replace(): it takes three times as long, and this is done for every prompt that waits
        tokens=prompt.tokens,
        prefill_s=prompt.prefill_s,
        priority=prompt.priority,
        due_s=arrival_s + rules.stretch * prompt.prefill_s,
        latest_s=inf if ttft_s is None else arrival_s + rules.safety * ttft_s,
    )


def _behind(new: QueuedPrompt, queue: Sequence[QueuedPrompt], busy_until_s: float) -> tuple[int, float]:
    """The index in *queue* where *new* belongs, and when those before it are computed."""
    index = len(queue)
    while index and new.due_s is not None:
        other = queue[index - 1]
        if other.due_s is None or other.due_s <= new.due_s or other.priority != new.priority:
            break
        if busy_until_s + new.prefill_s > other.latest_s:
            break
        busy_until_s -= other.prefill_s
        index -= 1
    return index, busy_until_s


def _without_less_urgent(instance: InstanceView, priority: int) -> InstanceView:
    if instance.least_urgent <= priority:
        return instance
    ahead = tuple(prompt for prompt in instance.queue if prompt.priority <= priority)
    overtaken_s = sum(prompt.prefill_s for prompt in instance.queue if prompt.priority > priority)
    return replace(instance, queue=ahead, busy_until_s=instance.busy_until_s - overtaken_s, least_urgent=priority)


def is_late(prompt: WaitingPrompt, start_s: float) -> bool:
    """Whether *prompt* is expected to miss its objective even if its computation begins at *start_s*."""
    return start_s + prompt.service_s > prompt.latest_s()


def _may_overtake(new: WaitingPrompt, other: WaitingPrompt, finish_s: float, rules: QueueRules) -> bool:
    """*finish_s* is when *other* is expected to be computed if *new* stays behind it."""
    if new.priority != other.priority:
        return _aged(new, rules) < _aged(other, rules) and new.priority < other.priority
    if new.tenant != other.tenant and new.share_start != other.share_start:
        return new.share_start < other.share_start
    return _due_s(new, rules) < _due_s(other, rules) and finish_s + new.service_s <= other.latest_s(rules.safety)


def _aged(prompt: WaitingPrompt, rules: QueueRules) -> float:
    """Less is more urgent. All prompts age alike, so that the difference of two of them never changes."""
    return prompt.arrival_s + rules.aging_s * prompt.priority


def _due_s(prompt: WaitingPrompt, rules: QueueRules) -> float:
    return prompt.arrival_s + rules.stretch * prompt.service_s
