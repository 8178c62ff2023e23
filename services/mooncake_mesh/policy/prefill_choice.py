"""Which prefill instance computes a prompt, and where its cached prefix comes from: five policies to choose among.

``random``           any instance; uses what the instance's node happens to hold.
``load_balance``     the instance with the fewest accepted prompts.
``local``            the soonest first token, with the prefix that the instance's own node holds.
``kvcache_centric``  the papers' Algorithm 1: where the longest prefix in the cluster is longer than the local one by
                     more than a factor, it is copied first; else the difference is computed. The copy stays: that is
                     how hot prefixes spread.
``adaptive``         no factor: the soonest first token over all instances and, for each, over computing and over
                     copying from any holder, by estimated times.

All take the same arguments and look at nothing else. Ties break on ids, and nothing depends on the order of a view.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from mooncake_mesh.config_scheduling import PlacementKind
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.views import ClusterView, InstanceView, RequestShape
from mooncake_proto.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """As in :class:`~mooncake_mesh.policy.decisions.Placed`."""

    instance: InstanceView
    ttft_s: float
    local_blocks: int
    fetch_node: NodeId | None = None
    fetch_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that holds ``blocks`` of the prefix, and how long its link is busy before a copy can start."""

    node: NodeId
    blocks: int
    wait_s: float


class Estimates:
    """Times for one request. Most instances hold equally much of its prefix, so each is computed once.

    ``local`` are the blocks of its prefix that help, by node.
    """

    def __init__(self, request: RequestShape, cluster: ClusterView, cost: CostModel) -> None:
        self._request = request
        self._cost = cost
        self.now_s = cluster.now_s
        usable = request.usable_prefix_blocks
        self.local = {node: min(blocks, usable) for node, blocks in request.prefix_blocks.items()}
        self._prefill: dict[int, float] = {}
        self._copy: dict[int, float] = {}

    def queue_s(self, instance: InstanceView) -> float:
        """Until *instance* has computed what it has accepted."""
        left_s = instance.busy_until_s - self.now_s
        return left_s if left_s > 0.0 else 0.0

    def prefill_s(self, cached_blocks: int) -> float:
        """To compute what *cached_blocks* leave, before an instance's own factor."""
        known = self._prefill.get(cached_blocks)
        if known is None:
            cached = cached_blocks * self._request.block_tokens
            known = self._prefill[cached_blocks] = self._cost.prefill_s(self._request.prompt_tokens - cached, cached)
        return known

    def copy_s(self, blocks: int) -> float:
        """To copy *blocks* from another node, over a link that is free."""
        known = self._copy.get(blocks)
        if known is None:
            known = self._copy[blocks] = self._cost.transfer_s(blocks * self._request.block_bytes)
        return known

    def locally(self, instance: InstanceView) -> PrefillChoice:
        """*instance* with what its own node holds."""
        blocks = self.local.get(instance.node_id, 0)
        ttft_s = self.queue_s(instance) + instance.factor * self.prefill_s(blocks)
        return PrefillChoice(instance=instance, ttft_s=ttft_s, local_blocks=blocks)

    def fetching(self, instance: InstanceView, source: Source) -> PrefillChoice:
        """*instance* once it has copied what it lacks of *source*'s prefix."""
        local = self.local.get(instance.node_id, 0)
        copy_s = source.wait_s + self.copy_s(source.blocks - local)
        return PrefillChoice(
            instance=instance,
            ttft_s=self.queue_s(instance) + copy_s + instance.factor * self.prefill_s(source.blocks),
            local_blocks=local,
            fetch_node=source.node,
            fetch_blocks=source.blocks,
        )


PrefillPolicy = Callable[[RequestShape, Sequence[InstanceView], ClusterView, Estimates, float], PrefillChoice]
"""Choose among the given instances, at least one, all of which can take the prompt. The cluster tells of the sources;
the float is ``kvcache_balancing_threshold``."""


def choose_random(
    request: RequestShape, able: Sequence[InstanceView], _: ClusterView, estimates: Estimates, __: float
) -> PrefillChoice:
    ordered = sorted(able, key=_id)
    return estimates.locally(ordered[request.draw % len(ordered)])


def choose_least_loaded(
    _: RequestShape, able: Sequence[InstanceView], __: ClusterView, estimates: Estimates, ___: float
) -> PrefillChoice:
    return estimates.locally(min(able, key=lambda instance: (len(instance.queue), instance.instance_id)))


def choose_local(
    _: RequestShape, able: Sequence[InstanceView], __: ClusterView, estimates: Estimates, ___: float
) -> PrefillChoice:
    return _soonest(able, estimates, ())


def choose_kvcache_centric(
    request: RequestShape, able: Sequence[InstanceView], cluster: ClusterView, estimates: Estimates, threshold: float
) -> PrefillChoice:
    """The test is the strict one of the FAST'25 paper; an instance that holds nothing is beyond any threshold."""
    frontier = sources(request, cluster)
    if not frontier:
        return _soonest(able, estimates, ())
    best = frontier[0]
    candidates = (
        estimates.fetching(instance, best)
        if best.blocks > threshold * estimates.local.get(instance.node_id, 0)
        else estimates.locally(instance)
        for instance in able
    )
    return min(candidates, key=lambda choice: (choice.ttft_s, choice.instance.instance_id))


def choose_adaptive(
    request: RequestShape, able: Sequence[InstanceView], cluster: ClusterView, estimates: Estimates, _: float
) -> PrefillChoice:
    return _soonest(able, estimates, sources(request, cluster))


PREFILL_POLICIES: Final[dict[PlacementKind, PrefillPolicy]] = {
    PlacementKind.RANDOM: choose_random,
    PlacementKind.LOAD_BALANCE: choose_least_loaded,
    PlacementKind.LOCAL: choose_local,
    PlacementKind.KVCACHE_CENTRIC: choose_kvcache_centric,
    PlacementKind.ADAPTIVE: choose_adaptive,
}


def sources(request: RequestShape, cluster: ClusterView) -> tuple[Source, ...]:
    """Nodes worth copying from, longest prefix first: each one's link is free sooner than those of all before it.

    Among replicas that is the one whose link is free first, and of equals the first by id.
    """
    usable, waits = request.usable_prefix_blocks, cluster.egress_wait_s
    by_blocks: dict[int, tuple[float, NodeId]] = {}
    for node, held in request.prefix_blocks.items():
        blocks = held if held < usable else usable
        candidate = (waits.get(node, 0.0), node)
        known = by_blocks.get(blocks)
        if known is None or candidate < known:
            by_blocks[blocks] = candidate
    found: list[Source] = []
    for blocks in sorted(by_blocks, reverse=True):
        wait_s, node = by_blocks[blocks]
        if blocks > 0 and (not found or wait_s < found[-1].wait_s):
            found.append(Source(node=node, blocks=blocks, wait_s=wait_s))
    return tuple(found)


def _soonest(able: Sequence[InstanceView], estimates: Estimates, frontier: Sequence[Source]) -> PrefillChoice:
    """The quickest way over all instances and sources. Of equal ways the local one; of equal instances the first id."""
    best: tuple[float, str] | None = None
    choice: tuple[InstanceView, Source | None] | None = None
    local_blocks, now_s, latest_s = estimates.local, estimates.now_s, inf
    for instance in able:
        if instance.busy_until_s > latest_s:
            continue  # its queue alone takes longer than the best way
        queue_s = max(0.0, instance.busy_until_s - now_s)
        local = local_blocks.get(instance.node_id, 0)
        ttft_s = queue_s + instance.factor * estimates.prefill_s(local)
        from_source: Source | None = None
        for source in frontier:
            if source.blocks <= local:
                break
            copied_s = source.wait_s + estimates.copy_s(source.blocks - local)
            fetched_s = queue_s + copied_s + instance.factor * estimates.prefill_s(source.blocks)
            if fetched_s < ttft_s:
                ttft_s, from_source = fetched_s, source
        if best is None or (ttft_s, instance.instance_id) < best:
            best, choice = (ttft_s, instance.instance_id), (instance, from_source)
            latest_s = now_s + ttft_s
    assert choice is not None, "at least one instance can take the prompt"
    instance, chosen = choice
    return estimates.locally(instance) if chosen is None else estimates.fetching(instance, chosen)


def _id(instance: InstanceView) -> str:
    return instance.instance_id
