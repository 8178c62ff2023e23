"""Where a request runs: the pair of instances, and where its cached prefix comes from.

Prefill goes where the first token is expected soonest. That expectation is queue + copy + computation, with the
prefix that the instance's own node holds, or with the longest one that another node holds where copying it first is
expected to be quicker. Decoding goes to the instance with the shortest expected step among those with room for the
KV. This is the shape of the paper's Algorithm 1; its balancing threshold would stand where :func:`_estimate` compares
the two sources.

Pure functions of snapshots: no clock, no randomness, ties break on ids, and nothing depends on the order of a view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.policy.cost_model import CostModel, instance_prefill_s, instance_queue_s, instance_step_s
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.ids import InstanceId, NodeId

GROWTH_TOKENS: Final = 256
"""How many of its new tokens a decode instance must have room for. Most answers end within it; asking for all of
``max_new_tokens`` would refuse work for room that is hardly ever used."""

RETRY_AFTER_S: Final = 1.0
"""Least time after which a refused request should come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """``fetch_prefix_blocks`` is the prefix, from the first block on, that the prefill node has after copying from
    ``fetch_node``; without a copy both say so by None and 0. Block counts are hints."""

    prefill: InstanceId
    decode: InstanceId
    local_prefix_blocks: int
    fetch_node: NodeId | None
    fetch_prefix_blocks: int
    ttft_est_s: float
    tbt_est_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """``unavailable``: nobody could serve this at all (503); otherwise the mesh is too busy for it now (429)."""

    reason: str
    unavailable: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    instance: InstanceView
    ttft_s: float
    local_blocks: int
    fetch_node: NodeId | None
    fetch_blocks: int


def place(request: RequestShape, cluster: ClusterView, cost: CostModel, objectives: Objectives) -> Placed | Refused:
    """Choose instances for *request*, or say why not."""
    prefill_blocks = request.blocks_for(request.prompt_tokens)
    decode_blocks = request.blocks_for(request.prompt_tokens + min(request.max_new_tokens, GROWTH_TOKENS))
    prefill = _with_room("prefill", cluster.prefill, prefill_blocks)
    if isinstance(prefill, Refused):
        return prefill
    decode = _with_room("decode", cluster.decode, decode_blocks)
    if isinstance(decode, Refused):
        return decode

    holder = _longest_holder(request)
    first = min(
        (_estimate(request, p, cost, holder) for p in prefill), key=lambda e: (e.ttft_s, e.instance.instance_id)
    )
    tbt_s, decode_id = min((instance_step_s(d, cost, request.prompt_tokens), d.instance_id) for d in decode)
    if objectives.ttft_s is not None and first.ttft_s > objectives.ttft_s:
        return _contended("ttft_objective", after_s=first.ttft_s - objectives.ttft_s)
    if objectives.tbt_s is not None and tbt_s > objectives.tbt_s:
        return _contended("tbt_objective")
    return Placed(
        prefill=first.instance.instance_id,
        decode=decode_id,
        local_prefix_blocks=first.local_blocks,
        fetch_node=first.fetch_node,
        fetch_prefix_blocks=first.fetch_blocks,
        ttft_est_s=first.ttft_s,
        tbt_est_s=tbt_s,
    )


def _with_room(pool: str, instances: Sequence[InstanceView], blocks: int) -> list[InstanceView] | Refused:
    """The instances that can take *blocks* now; at least one."""
    if not instances:
        return Refused(reason=f"no_{pool}_instance", unavailable=True, retry_after_s=RETRY_AFTER_S)
    if all(instance.blocks_total < blocks for instance in instances):
        return Refused(reason=f"{pool}_pool_too_small", unavailable=True, retry_after_s=RETRY_AFTER_S)
    fitting = [instance for instance in instances if instance.blocks_available >= blocks]
    return fitting or _contended(f"{pool}_pool_full")


def _contended(reason: str, *, after_s: float = 0.0) -> Refused:
    return Refused(reason=reason, unavailable=False, retry_after_s=max(RETRY_AFTER_S, after_s))


def _estimate(request: RequestShape, instance: InstanceView, cost: CostModel, holder: NodeId | None) -> _Estimate:
    """The quicker of the two sources of a prefix on *instance*; the local one when they are equal."""
    queue_s = instance_queue_s(instance, cost)
    local_blocks = _usable(request, instance.node_id)
    best = _Estimate(
        instance=instance,
        ttft_s=queue_s + _prefill_s(request, instance, cost, local_blocks),
        local_blocks=local_blocks,
        fetch_node=None,
        fetch_blocks=0,
    )
    fetch_blocks = 0 if holder is None else _usable(request, holder)
    if fetch_blocks <= local_blocks:
        return best
    fetch_s = cost.transfer_s((fetch_blocks - local_blocks) * request.block_bytes)
    ttft_s = queue_s + fetch_s + _prefill_s(request, instance, cost, fetch_blocks)
    if ttft_s >= best.ttft_s:
        return best
    return _Estimate(
        instance=instance, ttft_s=ttft_s, local_blocks=local_blocks, fetch_node=holder, fetch_blocks=fetch_blocks
    )


def _usable(request: RequestShape, node: NodeId) -> int:
    return min(request.prefix_blocks.get(node, 0), request.usable_prefix_blocks)


def _longest_holder(request: RequestShape) -> NodeId | None:
    """The node with the longest usable prefix. An instance on that very node finds nothing to copy there."""
    return min(request.prefix_blocks, key=lambda node: (-_usable(request, node), node), default=None)


def _prefill_s(request: RequestShape, instance: InstanceView, cost: CostModel, cached_blocks: int) -> float:
    cached_tokens = cached_blocks * request.block_tokens
    return instance_prefill_s(instance, cost, request.prompt_tokens - cached_tokens, cached_tokens)
