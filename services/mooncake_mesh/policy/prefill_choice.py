"""Which prefill instance computes a prompt, and where its cached prefix comes from: five policies to choose among.

``random``           any instance; uses what the instance's node happens to hold.
``load_balance``     the instance with the fewest accepted prompts.
``local``            the soonest first token, with the prefix that the instance's own node holds.
``kvcache_centric``  the papers' Algorithm 1: where the longest prefix in the cluster is longer than the local one by
                     more than a factor, it is copied first; else the difference is computed. The copy stays: that is
                     how hot prefixes spread.
``adaptive``         no factor: the soonest first token over all instances and, for each, over computing and over
                     copying from any holder, by estimated times.

What a node holds on SSD only has to be read first: a node's prefix may be used as far as it is in memory, or as a whole
once that is read, whichever is sooner. Reading begins when the request is placed, so it costs only what it takes longer
than the queue.

All take the same arguments and look at nothing else. Instances whose times are within AS_GOOD of the best are as good
as each other: one that need not copy is taken, and of those one by the request's draw, so that work and cached prefixes
spread. Nothing depends on the order of a view.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from mooncake_mesh.config_scheduling import PlacementKind
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.queue_order import begin_s
from mooncake_mesh.policy.views import ClusterView, InstanceView, RequestShape
from mooncake_proto.ids import NodeId

AS_GOOD: Final = 1.001
"""What differs by less than a thousandth must not decide. It is no more, as the shorter way leaves others more time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChoice:
    """As in :class:`~mooncake_mesh.policy.decisions.Placed`. ``delay_s``: by how much others, whom it overtakes, get
    their first tokens later, all together."""

    instance: InstanceView
    ttft_s: float
    local_blocks: int
    delay_s: float = 0.0
    fetch_node: NodeId | None = None
    fetch_blocks: int = 0
    read_node: NodeId | None = None
    read_blocks: int = 0
    read_limit_blocks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A node that holds ``blocks`` of the prefix, and how long its link is busy before a copy can start.

    The last ``read_blocks`` are on its SSD, and in its memory ``read_s`` from now.
    """

    node: NodeId
    blocks: int
    wait_s: float
    read_blocks: int = 0
    read_s: float = 0.0


class Estimates:
    """Times for one request. Most instances hold equally much of its prefix, so each is computed once.

    ``local`` are the blocks of its prefix that help, by node, and ``arena`` those of them that need not be read.
    """

    def __init__(self, request: RequestShape, cluster: ClusterView, cost: CostModel) -> None:
        self._request = request
        self._cost = cost
        self.now_s = cluster.now_s
        usable = request.usable_prefix_blocks
        self.local = {node: min(blocks, usable) for node, blocks in request.prefix_blocks.items()}
        self.arena = self.local
        if request.ssd_starts:
            starts = request.ssd_starts
            self.arena = {node: min(blocks, starts.get(node, blocks)) for node, blocks in self.local.items()}
        self._waits, self._rates = cluster.disk_wait_s, cluster.disk_bytes_per_s
        self._prefill: dict[int, float] = {}
        self._copy: dict[int, float] = {}

    def queue_s(self, instance: InstanceView, cached_blocks: int) -> float:
        """Until *instance* has computed what comes before a prompt of which *cached_blocks* are there.

        And what all that it overtakes lose by that together, so that nobody wins less than others lose.
        """
        left_s = instance.busy_until_s - self.now_s
        if left_s <= 0.0:
            return 0.0
        if not instance.is_ordered:
            return left_s
        service_s = instance.factor * self.prefill_s(cached_blocks)
        begins_s, overtaken = begin_s(instance, service_s, now_s=self.now_s, priority=self._request.priority)
        return begins_s - self.now_s + overtaken * service_s

    def delay_s(self, instance: InstanceView, cached_blocks: int) -> float:
        """The part of :meth:`queue_s` that others bear."""
        if not instance.is_ordered:
            return 0.0
        service_s = instance.factor * self.prefill_s(cached_blocks)
        return begin_s(instance, service_s, now_s=self.now_s, priority=self._request.priority)[1] * service_s

    def prefill_s(self, cached_blocks: int) -> float:
        """To compute what *cached_blocks* leave, before an instance's own factor."""
        known = self._prefill.get(cached_blocks)
        if known is None:
            cached = cached_blocks * self._request.block_tokens
            known = self._prefill[cached_blocks] = self._cost.prefill_s(self._request.prompt_tokens - cached, cached)
        return known

    def least_prefill_s(self) -> float:
        """The least of :meth:`prefill_s` over what any node holds, in whichever tier, and nothing."""
        return min(map(self.prefill_s, {0, *self.arena.values(), *self.local.values()}))

    def copy_s(self, blocks: int) -> float:
        """To copy *blocks* from another node, over a link that is free."""
        known = self._copy.get(blocks)
        if known is None:
            known = self._copy[blocks] = self._cost.transfer_s(blocks * self._request.block_bytes)
        return known

    def read_s(self, node: NodeId, blocks: int) -> float:
        """Until *node* has read *blocks* from its SSD, if that is asked for now."""
        n_bytes = blocks * self._request.block_bytes
        rate = self._rates.get(node, 0.0)
        return self._waits.get(node, 0.0) + (n_bytes / rate if rate > 0 else self._cost.ssd_read_s(n_bytes))

    def local_way(self, instance: InstanceView) -> tuple[float, int]:
        """Time to first token with what the instance's own node holds, and how many blocks of that it takes."""
        node = instance.node_id
        used = self.arena.get(node, 0)
        queue_s = self.queue_s(instance, used)
        ttft_s = queue_s + instance.factor * self.prefill_s(used)
        if self.arena is not self.local and (blocks := self.local.get(node, 0)) > used:
            ready_s = max(queue_s, self.read_s(node, blocks - used))
            read_ttft_s = ready_s + instance.factor * self.prefill_s(blocks)
            if read_ttft_s < ttft_s:
                return read_ttft_s, blocks
        return ttft_s, used

    def fetched_s(self, instance: InstanceView, source: Source) -> float:
        """Time to first token once *instance* has copied what its memory lacks of *source*'s prefix."""
        copy_s = source.wait_s + self.copy_s(source.blocks - self.arena.get(instance.node_id, 0))
        return (
            max(self.queue_s(instance, source.blocks), source.read_s)
            + copy_s
            + instance.factor * self.prefill_s(source.blocks)
        )

    def locally(self, instance: InstanceView) -> PrefillChoice:
        """*instance* with what its own node holds."""
        price_s, used = self.local_way(instance)
        arena = self.arena.get(instance.node_id, 0)
        delay_s = self.delay_s(instance, used)
        return PrefillChoice(
            instance=instance,
            ttft_s=price_s - delay_s,
            delay_s=delay_s,
            local_blocks=used,
            read_node=instance.node_id if used > arena else None,
            read_blocks=used - arena,
            read_limit_blocks=self._limit(instance, used),
        )

    def fetching(self, instance: InstanceView, source: Source) -> PrefillChoice:
        """*instance* once it has copied what it lacks of *source*'s prefix."""
        arena, delay_s = self.arena.get(instance.node_id, 0), self.delay_s(instance, source.blocks)
        return PrefillChoice(
            instance=instance,
            ttft_s=self.fetched_s(instance, source) - delay_s,
            delay_s=delay_s,
            local_blocks=arena,
            fetch_node=source.node,
            fetch_blocks=source.blocks,
            read_node=source.node if source.read_blocks else None,
            read_blocks=source.read_blocks,
            read_limit_blocks=self._limit(instance, arena),
        )

    def _limit(self, instance: InstanceView, used: int) -> int | None:
        """None where the node has nothing beyond what is used."""
        return used if self.local.get(instance.node_id, 0) > used else None


PrefillPolicy = Callable[[RequestShape, Sequence[InstanceView], ClusterView, Estimates, float], PrefillChoice]
"""Choose among the given instances, at least one, all of which can take the prompt. The cluster tells of the sources;
the float is ``kvcache_balancing_threshold``."""


def choose_random(
    request: RequestShape, able: Sequence[InstanceView], _: ClusterView, estimates: Estimates, __: float
) -> PrefillChoice:
    return estimates.locally(drawn(request, able))


def choose_least_loaded(
    request: RequestShape, able: Sequence[InstanceView], _: ClusterView, estimates: Estimates, __: float
) -> PrefillChoice:
    fewest = min(len(instance.queue) for instance in able)
    return estimates.locally(drawn(request, [instance for instance in able if len(instance.queue) == fewest]))


def choose_local(
    request: RequestShape, able: Sequence[InstanceView], _: ClusterView, estimates: Estimates, __: float
) -> PrefillChoice:
    return _soonest(request, able, estimates, ())


def choose_kvcache_centric(
    request: RequestShape, able: Sequence[InstanceView], cluster: ClusterView, estimates: Estimates, threshold: float
) -> PrefillChoice:
    """The test is the strict one of the FAST'25 paper; an instance that holds nothing is beyond any threshold."""
    frontier = sources(cluster, estimates)
    if not frontier:
        return _soonest(request, able, estimates, ())
    best = frontier[0]

    def way(instance: InstanceView) -> tuple[float, bool, InstanceView]:
        local_s, local_blocks = estimates.local_way(instance)
        if best.node != instance.node_id and best.blocks > threshold * local_blocks:
            return estimates.fetched_s(instance, best), True, instance
        return local_s, False, instance

    ways = [way(instance) for instance in able]
    limit_s = AS_GOOD * min([ttft_s for ttft_s, _, _ in ways])
    as_good = [(is_fetching, instance) for ttft_s, is_fetching, instance in ways if ttft_s <= limit_s]
    local = [instance for is_fetching, instance in as_good if not is_fetching]
    if local:
        return estimates.locally(drawn(request, local))
    return estimates.fetching(drawn(request, [instance for _, instance in as_good]), best)


def choose_adaptive(
    request: RequestShape, able: Sequence[InstanceView], cluster: ClusterView, estimates: Estimates, _: float
) -> PrefillChoice:
    return _soonest(request, able, estimates, sources(cluster, estimates))


PREFILL_POLICIES: Final[dict[PlacementKind, PrefillPolicy]] = {
    PlacementKind.RANDOM: choose_random,
    PlacementKind.LOAD_BALANCE: choose_least_loaded,
    PlacementKind.LOCAL: choose_local,
    PlacementKind.KVCACHE_CENTRIC: choose_kvcache_centric,
    PlacementKind.ADAPTIVE: choose_adaptive,
}


def sources(cluster: ClusterView, estimates: Estimates) -> tuple[Source, ...]:
    """Nodes worth copying from, longest prefix first: each one's link or disk is free sooner than those before it.

    Among replicas that is the one which can send first, and of equals the first by id. A node that would have to read
    part of its prefix is there twice: with that part and without.
    """
    waits, arena_blocks = cluster.egress_wait_s, estimates.arena
    by_blocks: dict[int, tuple[float, NodeId, float, float, int]] = {}  # ready_s, node, wait_s, read_s, read_blocks
    for node, held in estimates.local.items():
        wait_s, blocks = waits.get(node, 0.0), arena_blocks[node]
        candidate = (wait_s, node, wait_s, 0.0, 0)
        known = by_blocks.get(blocks)
        if known is None or candidate < known:
            by_blocks[blocks] = candidate
        if held > blocks:
            read_s = estimates.read_s(node, held - blocks)
            candidate = (wait_s + read_s, node, wait_s, read_s, held - blocks)
            known = by_blocks.get(held)
            if known is None or candidate < known:
                by_blocks[held] = candidate
    found: list[Source] = []
    to_read: list[Source] = []
    soonest_s = inf  # of those found that need not read
    for blocks in sorted(by_blocks, reverse=True):
        _, node, wait_s, read_s, read_blocks = by_blocks[blocks]
        if not blocks or wait_s >= soonest_s:
            continue
        if to_read and any(longer.wait_s <= wait_s and longer.read_s <= read_s for longer in to_read):
            continue
        source = Source(node=node, blocks=blocks, wait_s=wait_s, read_blocks=read_blocks, read_s=read_s)
        found.append(source)
        if read_blocks:
            to_read.append(source)
        else:
            soonest_s = wait_s
    return tuple(found)


def _soonest(
    request: RequestShape, able: Sequence[InstanceView], estimates: Estimates, frontier: Sequence[Source]
) -> PrefillChoice:
    """The quickest way over all instances and sources. Of equal ways the local one."""
    limit_s = inf
    found: list[tuple[float, InstanceView, Source | None]] = []
    arena_blocks, now_s = estimates.arena, estimates.now_s
    is_tiered = arena_blocks is not estimates.local
    least_s = estimates.least_prefill_s()
    for instance in able:
        if instance.is_ordered:
            arena = arena_blocks.get(instance.node_id, 0)
            queue_s = estimates.queue_s(instance, arena)
        else:
            queue_s = instance.busy_until_s - now_s
            if queue_s < 0.0:
                queue_s = 0.0
            if queue_s + instance.factor * least_s > limit_s:
                continue  # no way of it can be as good as the best
            arena = arena_blocks.get(instance.node_id, 0)
        if is_tiered:
            ttft_s, _ = estimates.local_way(instance)
        else:
            ttft_s = queue_s + instance.factor * estimates.prefill_s(arena)
        from_source: Source | None = None
        for source in frontier:
            if source.blocks <= arena:
                break
            if source.node == instance.node_id:
                continue  # reading it is a local way
            if instance.is_ordered:
                queue_s = estimates.queue_s(instance, source.blocks)
            fetched_s = max(queue_s, source.read_s) + source.wait_s + estimates.copy_s(source.blocks - arena)
            fetched_s += instance.factor * estimates.prefill_s(source.blocks)
            if fetched_s < ttft_s:
                ttft_s, from_source = fetched_s, source
        if ttft_s <= limit_s:
            found.append((ttft_s, instance, from_source))
            limit_s = min(limit_s, AS_GOOD * ttft_s)
    assert found, "at least one instance can take the prompt"
    as_good = {instance.instance_id: (instance, source) for ttft_s, instance, source in found if ttft_s <= limit_s}
    local = [instance for instance, source in as_good.values() if source is None]
    instance = drawn(request, local or [instance for instance, _ in as_good.values()])
    _, chosen = as_good[instance.instance_id]
    return estimates.locally(instance) if chosen is None else estimates.fetching(instance, chosen)


def drawn(request: RequestShape, instances: Sequence[InstanceView]) -> InstanceView:
    """One of *instances*, all as good as each other, by the request's draw."""
    return instances[0] if len(instances) == 1 else sorted(instances, key=_id)[request.draw % len(instances)]


def _id(instance: InstanceView) -> str:
    return instance.instance_id
