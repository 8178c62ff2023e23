"""Copies of hot prefixes ahead of need: when one is worth making, from where and to which node. Pure.

A placement that copies a prefix leaves a copy behind, but only once a request has had to wait for it. So the work that
a prefix draws is remembered: its hits of late keep some number of instances busy, and as many nodes should have it as
are needed to do that work at half their time. Where every link that it could be copied over is taken for longer than
the copy itself needs, there should be one more.

Bandwidth is bounded by rest: a link that carried such a copy for a second carries no other one for the next ten.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, exp
from typing import Final

from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.views import ClusterView, RequestShape
from mooncake_proto.ids import BlockKey, InstanceId, NodeId

MEMORY_S: Final = 60.0
"""What was seen that long ago counts for a third."""

BUSY_SHARE: Final = 0.5
"""Share of its time that a node should at most be busy with one prefix."""

LEAST_HITS: Final = 3.0
ROOM_SHARE: Final = 0.25
"""A copy may take that much of what the target's arena has free or evictable."""

_MAX_PREFIXES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """What requests that found one prefix drew of late: how many they were, and their prefill time in all."""

    hits: float = 0.0
    work_s: float = 0.0
    at_s: float = 0.0

    def after(self, work_s: float, now_s: float) -> "Heat":
        """With one more hit, of *work_s*."""
        left = exp((self.at_s - now_s) / MEMORY_S)
        return Heat(hits=self.hits * left + 1.0, work_s=self.work_s * left + work_s, at_s=now_s)

    @property
    def busy_nodes(self) -> float:
        """How many instances its hits keep busy."""
        return self.work_s / MEMORY_S


class HotPrefixes:
    """Heat of prefixes by their last key; of those beyond a bound the ones not hit for longest are forgotten."""

    def __init__(self) -> None:
        self._heats: OrderedDict[BlockKey, Heat] = OrderedDict()

    def hit(self, key: BlockKey, work_s: float, now_s: float) -> Heat:
        heat = self._heats[key] = self._heats.get(key, Heat()).after(work_s, now_s)
        self._heats.move_to_end(key)
        if len(self._heats) > _MAX_PREFIXES:
            self._heats.popitem(last=False)
        return heat


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Copy the first ``blocks`` blocks from ``source`` to ``target``."""

    source: NodeId
    target: NodeId
    blocks: int


def replica(
    request: RequestShape,
    prefill: InstanceId,
    heat: Heat,
    cluster: ClusterView,
    cost: CostModel,
    resting_until_s: Mapping[NodeId, float],
) -> Replica | None:
    """The copy that is worth making of the longest prefix of *request* there is, which has that *heat*.

    *prefill* was chosen for the request: its node will have the prefix anyway. A node in *resting_until_s* sends no
    copy before that.
    """
    blocks = longest_prefix(request)
    if not blocks or heat.hits < LEAST_HITS:
        return None
    holders = [node for node, held in request.prefix_blocks.items() if held >= blocks]
    waits, copy_s = cluster.egress_wait_s, cost.transfer_s(blocks * request.block_bytes)
    is_congested = all(waits.get(node, 0.0) > copy_s for node in holders)
    wanted = ceil(heat.busy_nodes / BUSY_SHARE)
    if wanted <= 1 and not is_congested:
        return None  # one node has it, or will; most placements end here
    has_it = {*holders, *(view.node_id for view in cluster.prefill if view.instance_id == prefill)}
    copies = len(has_it & {view.node_id for view in cluster.prefill})
    if copies >= wanted and not is_congested:
        return None
    sources = [(waits.get(node, 0.0), node) for node in holders if resting_until_s.get(node, 0.0) <= cluster.now_s]
    targets = [
        (view.busy_until_s, view.node_id)
        for view in cluster.prefill
        if view.node_id not in has_it and blocks <= ROOM_SHARE * view.blocks_available
    ]
    if not sources or not targets:
        return None
    return Replica(source=min(sources)[1], target=min(targets)[1], blocks=blocks)


def longest_prefix(request: RequestShape) -> int:
    """Blocks of the longest prefix that any node holds and that helps."""
    return min(request.usable_prefix_blocks, max(request.prefix_blocks.values(), default=0))


def rest_s(copy_s: float, share: float) -> float:
    """How long a link carries no other copy after one of *copy_s*, so that they take *share* of its time, above 0."""
    return copy_s / share
