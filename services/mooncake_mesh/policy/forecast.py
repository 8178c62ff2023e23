"""How loaded decoding is and will be, and when a refused request should come again.

Load is a ratio: 1 means that the KV fills the blocks, or that a step takes as long as the TBT objective allows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake_mesh.policy.cost_model import CostModel, StepCost
from mooncake_mesh.policy.views import ClusterView, InstanceView, QueuedPrompt
from mooncake_proto.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchForecast:
    """What an instance decodes at some moment. Not whole numbers where arrivals are spread over instances."""

    instance: InstanceView
    jobs: float
    tokens: float

    def with_added(self, jobs: float, tokens: float) -> "BatchForecast":
        return BatchForecast(instance=self.instance, jobs=self.jobs + jobs, tokens=self.tokens + tokens)

    def load(self, cost: CostModel, *, block_tokens: int, tbt_s: float | None) -> float:
        """As :func:`batch_load`."""
        instance = self.instance
        room_tokens = instance.blocks_total * block_tokens
        return batch_load(self.jobs, self.tokens, cost, room_tokens=room_tokens, tbt_s=tbt_s, factor=instance.factor)


def batch_load(
    jobs: float, tokens: float, cost: StepCost, *, room_tokens: int, tbt_s: float | None, factor: float = 1.0
) -> float:
    """KV over what fits or step over *tbt_s*, whichever is more. *factor* is how much slower than *cost* steps are."""
    filled = tokens / max(1, room_tokens)
    if tbt_s is None:
        return filled
    return max(filled, factor * cost.decode_step_s(round(jobs), round(tokens)) / tbt_s)


def decoding_now(instance: InstanceView) -> BatchForecast:
    """The batch as it is: what has been placed but has no KV yet does not count."""
    return BatchForecast(instance=instance, jobs=instance.running_jobs, tokens=instance.running_tokens)


def decoding_at(cluster: ClusterView, after_s: float, decode_s: float) -> list[BatchForecast]:
    """The batches *after_s* from now, if every request is decoded for *decode_s*: the papers' system-level forecast.

    Who will have been decoded that long has gone; prompts that will be computed by then have come, spread evenly.
    """
    jobs, tokens = _arrivals(cluster, after_s, decode_s)
    share = 1.0 / max(1, len(cluster.decode))
    return [
        _staying(instance, after_s, decode_s).with_added(jobs * share, tokens * share) for instance in cluster.decode
    ]


def kv_in_progress_tokens(cluster: ClusterView) -> int:
    """KV that is decoded, waits to be decoded or is being computed, all over the cluster."""
    running = sum(instance.running_tokens for instance in cluster.decode)
    waiting = sum(instance.waiting_tokens for instance in cluster.decode)
    return running + max(waiting, sum(prompt.tokens for prompt in _queued(cluster)))


def kv_capacity_tokens(decode: Sequence[InstanceView], block_tokens: int) -> int:
    """KV that can be decoded at a time: on each node what its blocks hold, or less where steps would get too long."""
    blocks: dict[NodeId, int] = {}
    limits: dict[NodeId, int] = {}
    for instance in decode:
        room = instance.blocks_total * block_tokens
        blocks[instance.node_id] = room
        limits[instance.node_id] = limits.get(instance.node_id, 0) + (instance.kv_limit_tokens or room)
    return sum(min(room, limits[node]) for node, room in blocks.items())


def kv_limit_tokens(cost: CostModel, *, factor: float, tbt_s: float, room_tokens: int, tokens_per_job: float) -> int:
    """Most KV, up to *room_tokens*, that one instance decodes in steps of at most *tbt_s*, at sequences of that length.

    Needs a step time that does not fall with more KV; at least 1.
    """

    def step_s(tokens: int) -> float:
        return factor * cost.decode_step_s(max(1, round(tokens / tokens_per_job)), tokens)

    if step_s(room_tokens) <= tbt_s:
        return max(1, room_tokens)
    low, high = 0, room_tokens
    while high - low > max(1, low >> 7):  # a large arena may hold a thousand times what a step has time for
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= tbt_s else (low, middle)
    return max(1, low)


def freed_after_s(excess: float, total: float, decode_s: float) -> float:
    """When *excess* of *total* KV will have gone: in steady state, all of it takes one *decode_s*."""
    return decode_s * min(1.0, excess / total) if total > 0 else 0.0


def _queued(cluster: ClusterView) -> Iterator[QueuedPrompt]:
    return (prompt for instance in cluster.prefill for prompt in instance.queue)


def _staying(instance: InstanceView, after_s: float, decode_s: float) -> BatchForecast:
    """A sequence that an instance counts but does not list is as young as can be."""
    gone = [tokens for tokens, decoded in instance.sequences if decoded * instance.step_s + after_s >= decode_s]
    return decoding_now(instance).with_added(-len(gone), -sum(gone))


def _arrivals(cluster: ClusterView, after_s: float, decode_s: float) -> tuple[int, int]:
    """Jobs and tokens that will have come by then and not gone again. KV that is on its way counts as there."""
    jobs = sum(instance.waiting_jobs for instance in cluster.decode)
    tokens = sum(instance.waiting_tokens for instance in cluster.decode)
    for prompt in _queued(cluster):
        jobs -= 1
        tokens -= prompt.tokens
    jobs, tokens = max(0, jobs), max(0, tokens)
    for instance in cluster.prefill:
        done_s = instance.busy_until_s - cluster.now_s - sum(prompt.prefill_s for prompt in instance.queue)
        for prompt in instance.queue:
            done_s += prompt.prefill_s
            if done_s <= after_s < done_s + decode_s:
                jobs += 1
                tokens += prompt.tokens
    return jobs, tokens
