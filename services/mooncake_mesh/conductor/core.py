"""What the conductor decides, pure: who belongs to the mesh, which node holds which block, where a request runs.

All of it is soft state. A restarted conductor learns the members from their registrations and the blocks from the
messengers' snapshots; requests that run never notice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mooncake_mesh.conductor.decision_log import DecisionLog
from mooncake_mesh.conductor.orders import Orders
from mooncake_mesh.conductor.placed_work import PlacedWork
from mooncake_mesh.conductor.replicator import Replicator
from mooncake_mesh.conductor.role_keeper import RoleKeeper
from mooncake_mesh.conductor.roster import WORKERS, Roster
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.kv.event_stream import FeedRefused, NodeFeed
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import HealthChanged, PeerEvent, PeerTable
from mooncake_mesh.policy.admission import elsewhere
from mooncake_mesh.policy.cost_model import CostModel, KindFactors
from mooncake_mesh.policy.decisions import Placed, Refused, unavailable
from mooncake_mesh.policy.decode_gate import gate_for
from mooncake_mesh.policy.draws import draw
from mooncake_mesh.policy.placement import DEFAULT_SCHEDULING, Scheduling, place
from mooncake_mesh.policy.queue_order import seen_by
from mooncake_mesh.policy.replication import Replica
from mooncake_mesh.policy.request_class import is_batch
from mooncake_mesh.policy.slo import ServiceLevels, SloMonitor, Unloaded
from mooncake_mesh.policy.views import ClusterView, Objectives, RequestShape
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, ModelCard, Role, StatusReport
from mooncake_proto.ids import BLOCK_KEY_BYTES, Incarnation, InstanceId, NodeId
from mooncake_proto.kvcache import KvEvents, KvEventsAck, KvSnapshot
from mooncake_proto.serving import DecodeGate, Outcome, Outcomes, Placement, Rejected, Schedule, WorkerRef
from mooncake_proto.transfer import ReadAhead, Replicate

_MISSING: Final = {f"no_{role.value}_instance": role for role in WORKERS}
_NOT_READY: Final = {role: unavailable(f"{role.value}_not_ready") for role in WORKERS}
"""Reasons for which it makes sense to ask again in a moment."""

_LEAST_KEEP_S: Final = 5.0
_KEEP_PER_TTFT: Final = 2.0
_MOST_KEEP_S: Final = 60.0
"""How long a messenger keeps what it was told to read: until the first token is well overdue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incompatible:
    """A member that cannot work with those that are here; ``difference`` names the field and both values."""

    difference: str


class ConductorCore:
    """Mutated only by its methods; times come in as arguments, seconds of one monotonic clock.

    ``orders`` is what messengers must be told of placements and workers of their role, ``decisions`` the last
    placements. *seed* is where the chance of the ``random`` policy comes from: equal seeds and events give equal
    decisions. *levels* is what ended requests are held against, *objectives* where None; *kinds* how much slower than
    *cost* the kinds of instances are.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        peers: PeerTable,
        index: PrefixIndex,
        cost: CostModel,
        objectives: Objectives,
        started_s: float,
        scheduling: Scheduling = DEFAULT_SCHEDULING,
        seed: int = 0,
        levels: ServiceLevels | None = None,
        kinds: Mapping[str, KindFactors] = MappingProxyType({}),
    ) -> None:
        self._incarnation = incarnation
        self._peers = peers
        self._index = index
        self._objectives = objectives
        self._started_s = started_s
        self._scheduling = scheduling
        self._seed = seed
        self._feeds: dict[NodeId, NodeFeed] = {}
        self._roster = Roster(peers=peers, cost=cost, objectives=objectives, kinds=kinds)
        self._cards: dict[str, ModelCard] | None = None
        share = scheduling.replication_share
        self._replicator = Replicator(cost, share) if share > 0 else None
        rules = scheduling.roles
        self._roles = RoleKeeper(rules, peers, self._roster, objectives) if rules is not None else None
        self.orders = Orders()
        self.decisions = DecisionLog(scheduling, objectives)
        self._slo = SloMonitor(
            levels or ServiceLevels(ttft_s=objectives.ttft_s, tbt_s=objectives.tbt_s), started_s=started_s
        )
        self.placed_total = 0
        self.rejected_total = 0

    # --- members ------------------------------------------------------------------------------------------------------

    def register(self, member: Member, load: Load, now_s: float) -> list[PeerEvent] | Incompatible:
        """Enter a member, which reports *load*, or say what keeps it out."""
        if member.role in WORKERS:
            difference = self._difference(member)
            if difference is not None:
                return Incompatible(difference=difference)
        if member.role is Role.MESSENGER:
            feed = self._feeds.get(member.node_id)
            if feed is None or feed.incarnation != member.incarnation:
                self._feeds[member.node_id] = NodeFeed(self._index, member.node_id, member.incarnation)
        events = self._after(self._peers.join(member, load, now_s))
        self._roster.joined(member)
        if self._roles is not None:
            self._roles.joined(member.instance_id)
        if lease := self._peers.get(member.instance_id):
            self._roster.reported(lease, now_s)
        return events

    def heartbeat(
        self, instance_id: InstanceId, incarnation: Incarnation, load: Load, now_s: float
    ) -> list[PeerEvent] | None:
        """Renew a member's lease; None when it has to register again.

        A load that changes who takes work (a pool was cut, a worker drains) counts as an event: others wait for it.
        """
        before = self._peers.get(instance_id)
        events = self._peers.beat(instance_id, incarnation, load, now_s)
        if events is None:
            return None
        if events == [] and before is not None and _availability(before.load) != _availability(load):
            events = [HealthChanged(member=before.member, health=Health.ALIVE)]
        if lease := self._peers.get(instance_id):
            self._roster.reported(lease, now_s)
        return self._after(events)

    def goodbye(self, instance_id: InstanceId, incarnation: Incarnation) -> list[PeerEvent]:
        return self._after(self._peers.leave(instance_id, incarnation))

    def expire(self, now_s: float) -> list[PeerEvent]:
        """Time has passed: suspect and dead members, and instances that are to change their role."""
        events = self._after(self._peers.expire(now_s))
        for lease, word in self._roles.look(now_s) if self._roles is not None else ():
            self.orders.add(lease.member.endpoint, word)
        return events

    def _after(self, events: list[PeerEvent]) -> list[PeerEvent]:
        """A dead messenger's blocks are gone; so is the work placed on a dead worker."""
        if events:
            self._cards = None
            self._roster.membership_changed()
        for event in events:
            if isinstance(event, HealthChanged) and event.health is Health.DEAD:
                self._roster.gone(event.member.instance_id)
                feed = self._feeds.get(event.member.node_id)
                if feed is not None and feed.incarnation == event.member.incarnation:
                    del self._feeds[event.member.node_id]
                    self._index.drop_node(event.member.node_id)
        return events

    def _difference(self, member: Member) -> str | None:
        """What *member* has otherwise than the workers that are here; KV could not travel between them."""
        if member.model is None:
            return f"a {member.role.value} instance must say which model it serves"
        for lease in self._peers:
            other = lease.member
            if lease.health is Health.DEAD or other.model is None or other.instance_id == member.instance_id:
                continue
            for name in ("name", "fingerprint", "dtype", "block_tokens", "block_bytes"):
                mine, theirs = getattr(member.model, name), getattr(other.model, name)
                if mine != theirs:
                    return f"{name}: {member.instance_id} has {mine}, {other.instance_id} has {theirs}"
        return None

    # --- blocks -------------------------------------------------------------------------------------------------------

    def kv_events(self, batch: KvEvents) -> KvEventsAck | FeedRefused | None:
        """Apply a messenger's events; None for a node whose messenger is not registered."""
        feed = self._feeds.get(batch.node_id)
        return None if feed is None else feed.feed(batch)

    def kv_snapshot(self, snapshot: KvSnapshot) -> KvEventsAck | FeedRefused | None:
        """As :meth:`kv_events`, all keys of a node at once."""
        feed = self._feeds.get(snapshot.node_id)
        return None if feed is None else feed.snapshot(snapshot)

    # --- placing ------------------------------------------------------------------------------------------------------

    def schedule(self, request: Schedule, now_s: float) -> Placement | Rejected:
        """Choose instances for a request, by what is known now."""
        card = self._card(request.model)
        if card is None:
            self.decisions.note(request, unavailable("no_worker"), self._roster.cost, now_s)
            return self._rejected(request, "no_worker", unavailable=True, retry_after_s=1.0)
        keys = list(split_keys(request.keys))
        prefix_blocks = self._index.prefix_blocks(keys)
        shape = RequestShape(
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            block_tokens=card.block_tokens,
            block_bytes=card.block_bytes,
            prefix_blocks=prefix_blocks,
            ssd_starts=self._index.ssd_starts(keys, prefix_blocks),
            draw=draw(self._seed, self.placed_total + self.rejected_total),
            priority=request.priority,
        )
        view = self._roster.cluster(request.model, request.avoid, now_s)
        placed = self._placed(request, shape, view)
        self.decisions.note(request, placed, self._roster.cost, now_s, shape, view)
        if isinstance(placed, Refused):
            if self._roles is not None:
                self._roles.refused(placed, shape)
            return self._rejected(
                request, placed.reason, unavailable=placed.unavailable, retry_after_s=placed.retry_after_s
            )
        self.placed_total += 1
        prefill_s = self._roster.placed(PlacedWork.of(shape, placed), now_s)
        if self._roles is not None:
            self._roles.placed(prefill_s)
        self._announce(request, placed)
        copy = self._replicator.placed(shape, request.keys, placed, view) if self._replicator is not None else None
        if copy is not None:
            self._replicate(copy, request, shape, now_s)
        return self._placement(request, placed, self._gate(shape, placed, view), prefill_s)

    def _placed(self, request: Schedule, shape: RequestShape, view: ClusterView) -> Placed | Refused:
        cost, objectives = self._roster.cost, self._objectives
        if request.refused_by:
            decode_s = self._scheduling.admission.decode_time_s(view)
            others = elsewhere(shape, view, request.refused_by, cost, objectives, decode_s)
            if isinstance(others, Refused):
                return others
            view = others
        view = seen_by(request.priority, view)
        placed = place(shape, view, cost, objectives, self._scheduling)
        role = _MISSING.get(placed.reason) if isinstance(placed, Refused) else None
        return placed if role is None or not self._roster.is_getting_ready(request.model, role) else _NOT_READY[role]

    def _gate(self, shape: RequestShape, placed: Placed, view: ClusterView) -> DecodeGate | None:
        instance = next(instance for instance in view.decode if instance.instance_id == placed.decode)
        admission = self._scheduling.admission
        return gate_for(
            instance,
            view,
            self._roster.cost,
            self._objectives,
            admission,
            prompt_tokens=shape.prompt_tokens,
            block_tokens=shape.block_tokens,
        )

    def _replicate(self, copy: Replica, request: Schedule, shape: RequestShape, now_s: float) -> None:
        source, target = self._messenger(copy.source), self._messenger(copy.target)
        if source and target:
            keys = request.keys[: copy.blocks * BLOCK_KEY_BYTES]
            self._roster.copying(copy.source, copy.blocks * shape.block_bytes, now_s)
            self.orders.add(target, Replicate(keys=keys, source=source, tenant=request.tenant))

    def _announce(self, request: Schedule, placed: Placed) -> None:
        """Have the disk read now what the request will want from it once its turn has come."""
        if placed.read_node is not None:
            n_blocks = max(placed.local_prefix_blocks, placed.fetch_prefix_blocks)
            ahead = ReadAhead(
                job_id=request.job_id,
                keys=request.keys[: n_blocks * BLOCK_KEY_BYTES],
                keep_s=min(_MOST_KEEP_S, _LEAST_KEEP_S + _KEEP_PER_TTFT * placed.ttft_est_s),
                tenant=request.tenant,
            )
            self.orders.add(self._messenger(placed.read_node), ahead)

    def _placement(self, request: Schedule, placed: Placed, gate: DecodeGate | None, prefill_s: float) -> Placement:
        fetch_from = "" if placed.fetch_node is None else self._messenger(placed.fetch_node)
        return Placement(
            job_id=request.job_id,
            prefill=self._worker_ref(placed.prefill),
            decode=self._worker_ref(placed.decode),
            local_prefix_blocks=placed.local_prefix_blocks,
            fetch_from=fetch_from,
            fetch_prefix_blocks=placed.fetch_prefix_blocks if fetch_from else 0,
            ttft_est_s=placed.ttft_est_s,
            tbt_est_s=placed.tbt_est_s,
            gate=gate,
            read_limit_blocks=placed.read_limit_blocks,
            prefill_est_s=prefill_s,
            ttft_slo_s=None if is_batch(request.priority) else self._objectives.ttft_s,
            inline_step=placed.inline_step,
        )

    def _rejected(self, request: Schedule, reason: str, *, unavailable: bool, retry_after_s: float) -> Rejected:
        self.rejected_total += 1
        return Rejected(job_id=request.job_id, reason=reason, unavailable=unavailable, retry_after_s=retry_after_s)

    def _messenger(self, node_id: NodeId) -> str:
        lease = self._roster.messenger(node_id)
        return lease.member.endpoint if lease is not None and lease.health is Health.ALIVE else ""

    def _worker_ref(self, instance_id: InstanceId) -> WorkerRef:
        lease = self._peers.get(instance_id)
        assert lease is not None, "placed on an instance that was in the view"
        member = lease.member
        return WorkerRef(
            instance_id=member.instance_id,
            incarnation=member.incarnation,
            endpoint=member.endpoint,
            node_id=member.node_id,
            messenger_endpoint=self._messenger(member.node_id),
        )

    def _card(self, model: str) -> ModelCard | None:
        """What the workers of *model* that are not dead agree on."""
        if self._cards is None:
            self._cards = {}
            for lease in self._peers:
                card = lease.member.model
                if card is not None and lease.health is not Health.DEAD:
                    self._cards.setdefault(card.name, card)
        return self._cards.get(model)

    # --- how requests ended -------------------------------------------------------------------------------------------

    def outcomes(self, batch: Outcomes, now_s: float) -> None:
        """Requests that a gateway saw end."""
        for outcome in batch.outcomes:
            self._slo.ended(outcome, self._unloaded(outcome), now_s)

    def _unloaded(self, outcome: Outcome) -> Unloaded:
        """As the cost model has it, corrected for the instances it ran on."""
        cached = min(outcome.cached_tokens, outcome.prompt_tokens)
        prefill_s = self._roster.cost.prefill_s(outcome.prompt_tokens - cached, cached)
        context = outcome.prompt_tokens + outcome.generated_tokens // 2
        step_s = self._roster.cost.decode_step_s(1, context)
        return Unloaded(
            ttft_s=self._roster.factor(InstanceId(outcome.prefill)) * prefill_s,
            tbt_s=self._roster.factor(InstanceId(outcome.decode)) * step_s,
        )

    # --- telling ------------------------------------------------------------------------------------------------------

    @property
    def revision(self) -> int:
        return self._peers.revision

    def cluster_state(self, now_s: float) -> ClusterState:
        return ClusterState(
            conductor=self._incarnation,
            revision=self._peers.revision,
            members=tuple(
                MemberState(
                    member=lease.member,
                    health=lease.health,
                    load=lease.load,
                    takes_work=self._roster.takes_work(lease),
                    last_beat_s=now_s - lease.renewed_s,
                )
                for lease in self._peers
            ),
        )

    def status(self, now_s: float) -> StatusReport:
        reasons = self._missing()
        return StatusReport(
            cluster=self.cluster_state(now_s),
            healthy=not reasons,
            reasons=reasons,
            indexed_blocks={node: self._index.blocks(node) for node in sorted(self._feeds)},
            placed_total=self.placed_total,
            rejected_total=self.rejected_total,
            uptime_s=now_s - self._started_s,
            estimates=self._roster.estimates(),
            classes=self._slo.report(now_s),
        )

    def _missing(self) -> tuple[str, ...]:
        """What the mesh lacks to serve, and members that are not well."""
        leases = list(self._peers)
        reasons = [
            f"no {role.value} instance that takes work"
            for role in WORKERS
            if not any(lease.member.role is role and self._roster.takes_work(lease) for lease in leases)
        ]
        if not any(lease.member.role is Role.GATEWAY and lease.health is Health.ALIVE for lease in leases):
            reasons.append("no gateway")
        reasons += [
            f"{lease.member.instance_id} is {lease.health.value}"
            for lease in leases
            if lease.health is not Health.ALIVE
        ]
        return tuple(reasons)


def _availability(load: Load) -> tuple[bool, bool]:
    return (load.blocks_total > 0, load.draining)
