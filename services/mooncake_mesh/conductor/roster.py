"""The conductor's picture of its workers, kept between heartbeats: reported load and what was placed since. Pure.

A view is made when something about its instance changed, not for every request. Placed work counts at once, and until
a beat that came well after it: by then the instance reports it itself. Three things are placed: prompts (prefill
time), KV that will be decoded (tokens, and blocks of the decode node), and copies between nodes (time of a link).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from mooncake_mesh.conductor.placed_work import PlacedWork
from mooncake_mesh.conductor.reckoning import QueueReckoning
from mooncake_mesh.conductor.snapshots import (
    NodeRoom,
    Pending,
    PromptQueue,
    PromptTimes,
    decode_view,
    node_room,
    prefill_view,
    reported_queue,
)
from mooncake_mesh.mesh.peers import Lease, PeerTable
from mooncake_mesh.policy.admission import TBT_SHARE
from mooncake_mesh.policy.correction import Correction
from mooncake_mesh.policy.cost_model import CopyCorrected, CostModel, KindFactors
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives
from mooncake_proto.control import EstimateQuality, Health, Member, Role
from mooncake_proto.ids import InstanceId, NodeId

BEAT_LAG_S: Final = 0.1
"""Work placed this shortly before a beat arrives may not be in its load yet."""

_UNSEEN_S: Final = 10.0
"""How long an instance must have had nothing to do for its pace to be open again."""

_TTFT_WEIGHT: Final = 0.05

WORKERS: Final = (Role.PREFILL, Role.DECODE)

COPIES: Final = InstanceId("copies")
"""Under which name the estimates of copies between nodes are told."""

_S = TypeVar("_S")


@dataclass(slots=True)
class _Pool:
    """Views of one model's workers of one role; ``snapshot`` is what was handed out last."""

    positions: dict[InstanceId, int]
    views: list[InstanceView]
    snapshot: tuple[InstanceView, ...]


class Roster:
    """Mutated only by its methods. Reads *peers*, which its owner keeps; tells of every change of it by a method.

    ``cost`` is the cost model as it is known by now: copies corrected, instances by a factor of their own.
    """

    def __init__(
        self, *, peers: PeerTable, cost: CostModel, objectives: Objectives, kinds: Mapping[str, KindFactors]
    ) -> None:
        self._peers = peers
        self._modelled = self.cost = cost
        self._times = PromptTimes(cost)
        self._kinds = kinds
        self._copies = Correction()
        self._ttft_limit_s = objectives.ttft_s
        self._step_limit_s = None if objectives.tbt_s is None else objectives.tbt_s * TBT_SHARE
        self._messengers: dict[NodeId, InstanceId] = {}
        self._pending: defaultdict[InstanceId, deque[Pending]] = defaultdict(deque)
        self._queues: defaultdict[InstanceId, QueueReckoning] = defaultdict(QueueReckoning)
        self._reports: dict[InstanceId, tuple[Lease, float, PromptQueue]] = {}  # as of that lease and pace
        self._corrections: dict[InstanceId, Correction] = {}
        self._busy_s: dict[InstanceId, float] = {}
        self._seen: dict[InstanceId, int] = {}
        self._links_free_s: dict[NodeId, float] = {}
        self._disks_free_s: dict[NodeId, float] = {}
        self._disk_rates: dict[NodeId, float] = {}
        self._decode_spans_s: dict[InstanceId, float] = {}
        self._pools: dict[tuple[str, Role], _Pool] = {}
        self._workers: dict[NodeId, list[InstanceId]] = {}
        self._stale: set[InstanceId] = set()
        self._withdrawn: set[InstanceId] = set()
        self._ttft_s = 0.0
        self._decode_s = 0.0

    # --- what happened ------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A member registered, perhaps again: whatever was placed on an older life of it is gone."""
        if member.role is Role.MESSENGER:
            self._messengers[member.node_id] = member.instance_id
        self._pending.pop(member.instance_id, None)
        self._queues.pop(member.instance_id, None)
        self._seen.pop(member.instance_id, None)
        self._withdrawn.discard(member.instance_id)
        self.membership_changed()

    def withdraw(self, instance_id: InstanceId) -> None:
        """Place nothing on it until it registers anew, or is restored."""
        self._withdrawn.add(instance_id)
        self.membership_changed()

    def restore(self, instance_id: InstanceId) -> None:
        self._withdrawn.discard(instance_id)
        self.membership_changed()

    def gone(self, instance_id: InstanceId) -> None:
        """A member died or left."""
        self._pending.pop(instance_id, None)
        self._queues.pop(instance_id, None)
        self._reports.pop(instance_id, None)
        self._corrections.pop(instance_id, None)
        self._busy_s.pop(instance_id, None)
        self._seen.pop(instance_id, None)
        self._decode_spans_s.pop(instance_id, None)
        self.membership_changed()

    def membership_changed(self) -> None:
        """Who takes work may have changed: all views are made anew when they are next asked for."""
        self._pools.clear()
        self._workers.clear()
        self._stale.clear()

    def reported(self, lease: Lease, now_s: float) -> None:
        """A beat came: the load in *lease* takes over what was placed well before it."""
        member = lease.member
        pending = self._pending.get(member.instance_id)
        while pending and pending[0].placed_s <= now_s - BEAT_LAG_S:
            pending.popleft()
        if member.role is Role.MESSENGER:
            self._stale.update(self._workers_of(member.node_id))
            rate = lease.load.ssd_bytes_per_s
            if rate > 0 and rate != self._disk_rates.get(member.node_id):
                # Views that were handed out stay as they are.
                self._disk_rates = {**self._disk_rates, member.node_id: rate}
            self._learn_copies(lease)
        elif member.role in WORKERS:
            self._learn(lease, now_s)
            if member.role is Role.PREFILL:
                self._reckon(lease, now_s)
            self._stale.add(member.instance_id)

    def placed(self, work: PlacedWork, now_s: float) -> float:
        """Count *work* from now on; how long its prompt is expected to be computed."""
        decode = self._peers.get(work.decode)
        assert decode is not None, "placed on an instance of a view"
        tokens = work.uncached_tokens + work.cached_tokens
        prefill_s = self.pace(work.prefill) * self.cost.prefill_s(work.uncached_tokens, work.cached_tokens)
        self._pending[work.prefill].append(
            Pending(placed_s=now_s, tokens=tokens, prefill_s=prefill_s, priority=work.priority)
        )
        if work.decode != work.prefill:
            self._queues[work.prefill].placed(prefill_s, now_s)
            self._pending[work.decode].append(Pending(placed_s=now_s, tokens=tokens))
        messenger = self._messengers[decode.member.node_id]
        self._pending[messenger].append(Pending(placed_s=now_s, blocks=work.decode_blocks))
        self._stale.add(work.prefill)
        self._stale.update(self._workers_of(decode.member.node_id))
        self._ttft_s += (_TTFT_WEIGHT if self._ttft_s else 1.0) * (work.ttft_s - self._ttft_s)
        if work.copy_from is not None:
            self.copying(work.copy_from, work.copy_bytes, now_s)
        if work.read_from is not None:
            rate = self._disk_rates.get(work.read_from)
            read_s = work.read_bytes / rate if rate else self.cost.ssd_read_s(work.read_bytes)
            free_s = max(now_s, self._disks_free_s.get(work.read_from, now_s))
            self._disks_free_s[work.read_from] = free_s + read_s
        return prefill_s

    def copying(self, source: NodeId, n_bytes: int, now_s: float) -> None:
        """*n_bytes* will leave *source*: its link is taken that long."""
        free_s = max(now_s, self._links_free_s.get(source, now_s))
        self._links_free_s[source] = free_s + self.cost.transfer_s(n_bytes)

    # --- what is asked ------------------------------------------------------------------------------------------------

    def cluster(self, model: str, avoid: Iterable[InstanceId], now_s: float) -> ClusterView:
        """Instances of *model* that take work; those to avoid only where there is nobody else."""
        self._refresh()
        unwanted = set(avoid)
        return ClusterView(
            prefill=self._pool(model, Role.PREFILL, unwanted),
            decode=self._pool(model, Role.DECODE, unwanted),
            now_s=now_s,
            egress_wait_s=_waits(self._links_free_s, now_s),
            disk_wait_s=_waits(self._disks_free_s, now_s),
            disk_bytes_per_s=self._disk_rates,
            ttft_s=self._ttft_s,
            decode_s=self._decode_s,
        )

    @property
    def decode_s(self) -> float:
        """How long requests are decoded of late; 0 when that is not known."""
        return self._decode_s

    def takes_work(self, lease: Lease) -> bool:
        node = self.messenger(lease.member.node_id)
        return (
            lease.member.role in WORKERS
            and lease.health is Health.ALIVE
            and not lease.load.draining
            and lease.member.instance_id not in self._withdrawn
            and node is not None
            and node.health is Health.ALIVE
            and node.load.blocks_total > 0
        )

    def view(self, lease: Lease) -> InstanceView:
        """A worker as it is, with what was placed on it, whether it takes work or not."""
        member = lease.member
        node = self.messenger(member.node_id)
        room = NodeRoom(blocks_total=0, blocks_available=0)
        if node is not None:
            room = node_room(node.load, self._pending[node.member.instance_id])
        pending, pace = self._pending[member.instance_id], self.pace(member.instance_id)
        if member.role is Role.PREFILL:
            until_s = self._queues[member.instance_id].busy_until_s
            reported = self._reported(lease, pace)
            return prefill_view(lease, room, reported, pending, pace, busy_until_s=until_s)
        return decode_view(
            lease,
            room,
            pending,
            self.cost,
            self.factor(member.instance_id),
            step_limit_s=self._step_limit_s,
            pace=pace,
        )

    def is_getting_ready(self, model: str, role: Role) -> bool:
        """Whether an instance is alive that takes no work now: its node's arena, or a stage, is not there yet."""
        return any(
            lease.member.role is role
            and lease.member.model is not None
            and lease.member.model.name == model
            and lease.health is Health.ALIVE
            and not self.takes_work(lease)
            for lease in self._peers
        )

    def messenger(self, node_id: NodeId) -> Lease | None:
        """The lease of a node's messenger, however it is."""
        instance_id = self._messengers.get(node_id)
        lease = None if instance_id is None else self._peers.get(instance_id)
        return lease if lease is not None and lease.member.node_id == node_id else None

    def factor(self, instance_id: InstanceId) -> float:
        """By how much an instance is slower than the cost model says; 1 for an unknown one."""
        known = self._corrections.get(instance_id)
        return self._first_guess(instance_id) if known is None else known.factor

    def pace(self, instance_id: InstanceId) -> float:
        """Its factor as far as it is known for sure: what instances are compared by."""
        known = self._corrections.get(instance_id)
        return self._first_guess(instance_id) if known is None else known.pace

    def estimates(self) -> tuple[EstimateQuality, ...]:
        known = sorted(self._corrections.items())
        if self._copies.samples:
            known.append((COPIES, self._copies))
        return tuple(
            EstimateQuality(instance_id=name, factor=one.factor, error=one.error, samples=one.samples)
            for name, one in known
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _pool(self, model: str, role: Role, avoid: set[InstanceId]) -> tuple[InstanceView, ...]:
        pool = self._pools.get((model, role))
        if pool is None:
            pool = self._pools[model, role] = self._made(model, role)
        if not avoid:
            return pool.snapshot
        return tuple(view for view in pool.snapshot if view.instance_id not in avoid) or pool.snapshot

    def _made(self, model: str, role: Role) -> _Pool:
        leases = [
            lease
            for lease in self._peers
            if lease.member.role is role
            and lease.member.model is not None
            and lease.member.model.name == model
            and self.takes_work(lease)
        ]
        positions = {lease.member.instance_id: position for position, lease in enumerate(leases)}
        views = [self.view(lease) for lease in leases]
        return _Pool(positions=positions, views=views, snapshot=tuple(views))

    def _refresh(self) -> None:
        if not self._stale:
            return
        for pool in self._pools.values():
            touched = self._stale & pool.positions.keys()
            for instance_id in touched:
                lease = self._peers.get(instance_id)
                assert lease is not None, "who left has emptied the pools"
                pool.views[pool.positions[instance_id]] = self.view(lease)
            if touched:
                pool.snapshot = tuple(pool.views)
        self._stale.clear()
        known = [span_s for span_s in self._decode_spans_s.values() if span_s > 0]
        self._decode_s = sum(known) / len(known) if known else 0.0

    def _reported(self, lease: Lease, pace: float) -> PromptQueue:
        """The queue of a report, made once: between two beats only what is placed behind it changes."""
        instance_id = lease.member.instance_id
        known = self._reports.get(instance_id)
        if known is None or known[0] is not lease or known[1] != pace:
            queue = reported_queue(lease.load, self._times, pace, reported_s=lease.renewed_s, ttft_s=self._ttft_limit_s)
            known = self._reports[instance_id] = (lease, pace, queue)
        return known[2]

    def _reckon(self, lease: Lease, now_s: float) -> None:
        """Hold a prefill instance's report against its placements; those that it counts are pending no more."""
        instance_id, load = lease.member.instance_id, lease.load
        pace, pending = self.pace(instance_id), self._pending[instance_id]
        queued_s = self._reported(lease, pace).reported_s
        unseen_s = [work.prefill_s for work in pending]
        for _ in range(self._queues[instance_id].reported(queued_s, load.prefill_elapsed_s, unseen_s, now_s)):
            pending.popleft()

    def _learn(self, lease: Lease, now_s: float) -> None:
        """Compare what a beat reports with what the model says of it."""
        instance_id, load = lease.member.instance_id, lease.load
        known = self._corrections.get(instance_id)
        if load.running_jobs or load.queued_jobs or instance_id not in self._busy_s:
            self._busy_s[instance_id] = now_s
        elif known is not None and now_s - self._busy_s[instance_id] > _UNSEEN_S:
            self._corrections[instance_id] = known.unseen()
        if lease.member.role is Role.PREFILL:
            for uncached, cached, elapsed_s in self._fresh(instance_id, load.prefills, load.recent_prefills):
                self._observed(instance_id, self.cost.prefill_s(uncached, cached), elapsed_s)
            return
        for sequences, tokens, elapsed_s in self._fresh(instance_id, load.steps, load.recent_steps):
            self._observed(instance_id, self.cost.decode_step_s(sequences, tokens), elapsed_s)
        self._decode_spans_s[instance_id] = load.decoded_tokens * load.step_s

    def _learn_copies(self, lease: Lease) -> None:
        """One correction for all nodes: a copy takes what its link takes, whoever has it."""
        load, before = lease.load, self._copies
        for n_bytes, elapsed_s in self._fresh(lease.member.instance_id, load.copies, load.recent_copies):
            self._copies = self._copies.observed(self._modelled.transfer_s(n_bytes), elapsed_s)
        if self._copies is not before:
            self.cost = CopyCorrected(self._modelled, self._copies.factor)

    def _first_guess(self, instance_id: InstanceId) -> float:
        """What its kind's profile says of an instance that nothing is known of."""
        lease = self._peers.get(instance_id)
        kind = None if lease is None else self._kinds.get(lease.member.kind)
        if lease is None or kind is None:
            return 1.0
        return kind.prefill if lease.member.role is Role.PREFILL else kind.step

    def _fresh(self, instance_id: InstanceId, count: int, recent: Sequence[_S]) -> Sequence[_S]:
        """Those of the *recent* ones of *count* in all that were not reported before."""
        fresh = count - self._seen.get(instance_id, 0)
        self._seen[instance_id] = count
        return recent[-fresh:] if fresh > 0 else ()

    def _observed(self, instance_id: InstanceId, modelled_s: float, observed_s: float) -> None:
        known = self._corrections.get(instance_id)
        if known is None:
            guess = self._first_guess(instance_id)
            known = Correction(factor=guess, guess=guess)
        self._corrections[instance_id] = known.observed(modelled_s, observed_s)

    def _workers_of(self, node_id: NodeId) -> list[InstanceId]:
        known = self._workers.get(node_id)
        if known is None:
            known = self._workers[node_id] = [
                lease.member.instance_id
                for lease in self._peers
                if lease.member.role in WORKERS and lease.member.node_id == node_id
            ]
        return known


def _waits(free_s: dict[NodeId, float], now_s: float) -> dict[NodeId, float]:
    """How long each is taken; those that are free are forgotten."""
    waits = {node: until_s - now_s for node, until_s in free_s.items() if until_s > now_s}
    if len(waits) < len(free_s):
        for node in free_s.keys() - waits.keys():
            del free_s[node]
    return waits
