"""Which instances change their role now: the policy's rule over what the conductor knows of its workers. Pure.

An instance that was told to switch gets no more work, and is the conductor's until it registers in its new role. One
that does not seem to have heard it, or that never comes back, is given up after a while: it is what it says it is.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.conductor.roster import WORKERS, Roster
from mooncake_mesh.mesh.peers import Lease, PeerTable
from mooncake_mesh.policy.decisions import Refused
from mooncake_mesh.policy.replication import longest_prefix
from mooncake_mesh.policy.roles import (
    Came,
    Candidate,
    Demand,
    Pools,
    RoleBalance,
    RoleRules,
    Switch,
    kv_demand,
    prompt_demand,
    refused_demand,
    refused_kv_demand,
)
from mooncake_mesh.policy.views import InstanceView, Objectives, RequestShape
from mooncake_proto.control import Health, Role, SwitchRole, WorkerRole
from mooncake_proto.ids import InstanceId

_HEARD_WITHIN_S: Final = 5.0
_BACK_WITHIN_S: Final = 60.0
_QUEUE_S: Final = 30.0
"""In what time a queue is to be done where there is no objective for it."""


@dataclass(slots=True)
class _Leaving:
    """``since_s``: when it was ordered, or last seen to drain."""

    role: Role
    since_s: float
    has_heard: bool = False


class RoleKeeper:
    """Mutated only by its methods. Withdraws from *roster* who is to switch."""

    def __init__(self, rules: RoleRules, peers: PeerTable, roster: Roster, objectives: Objectives) -> None:
        self._balance = RoleBalance(rules)
        self._look_s = rules.look_s
        self._peers = peers
        self._roster = roster
        self._ttft_s = objectives.ttft_s or _QUEUE_S
        self._leaving: dict[InstanceId, _Leaving] = {}
        self._placed_s = 0.0
        self._refused_tokens = 0
        self._looked_s: float | None = None

    @property
    def demand(self) -> Demand:
        """Of late."""
        return self._balance.demand

    @property
    def switching(self) -> dict[InstanceId, Role]:
        """Who is on the way to which role."""
        return {instance_id: leaving.role for instance_id, leaving in sorted(self._leaving.items())}

    def placed(self, prefill_s: float) -> None:
        """A prompt was placed that takes so long."""
        self._placed_s += prefill_s

    def refused(self, refused: Refused, shape: RequestShape) -> None:
        """A request was not let in: it is asked of the pool that had no place for it."""
        match refused_demand(refused):
            case Role.PREFILL:
                cached = longest_prefix(shape) * shape.block_tokens
                self._placed_s += self._roster.cost.prefill_s(shape.prompt_tokens - cached, cached)
            case Role.DECODE:
                self._refused_tokens += shape.prompt_tokens

    def joined(self, instance_id: InstanceId) -> None:
        """A member registered: whatever it was told before is over."""
        self._leaving.pop(instance_id, None)

    def look(self, now_s: float) -> list[tuple[Lease, SwitchRole]]:
        """Time has passed. Whom to tell to switch now, with the words."""
        elapsed_s = now_s - self._looked_s if self._looked_s is not None else 0.0
        if self._looked_s is not None and elapsed_s < self._look_s:
            return []
        self._give_up(now_s)
        placed_s, self._placed_s, self._looked_s = self._placed_s, 0.0, now_s
        refused_tokens, self._refused_tokens = self._refused_tokens, 0
        if not elapsed_s:
            return []
        workers = [lease for lease in self._peers if lease.member.role in WORKERS and lease.health is not Health.DEAD]
        came = Came(prefill_s=placed_s / elapsed_s, refused_kv_tokens=refused_tokens / elapsed_s)
        switches = self._balance.seen(self._pools(workers, came, now_s))
        return [self._ordered(switch, now_s) for switch in switches]

    def _ordered(self, switch: Switch, now_s: float) -> tuple[Lease, SwitchRole]:
        lease = self._peers.get(switch.instance_id)
        assert lease is not None, "a candidate is there"
        self._leaving[switch.instance_id] = _Leaving(role=switch.role, since_s=now_s)
        self._roster.withdraw(switch.instance_id)
        word = SwitchRole(
            instance_id=switch.instance_id,
            incarnation=lease.member.incarnation,
            role=WorkerRole(switch.role.value),
            prefill_demand=round(switch.demand.prefill, 3),
            decode_demand=round(switch.demand.decode, 3),
            prefill=switch.prefill,
            decode=switch.decode,
        )
        return lease, word

    def _pools(self, workers: Iterable[Lease], came: Came, now_s: float) -> Pools:
        views: dict[Role, list[InstanceView]] = {Role.PREFILL: [], Role.DECODE: []}
        serving = {Role.PREFILL: 0, Role.DECODE: 0}
        candidates = []
        block_tokens = 1
        for lease in workers:
            view, role = self._roster.view(lease), lease.member.role
            views[role].append(view)  # who drains has work, too
            block_tokens = lease.member.model.block_tokens if lease.member.model is not None else block_tokens
            if not self._roster.takes_work(lease):
                continue
            serving[role] += 1
            if lease.member.can_switch:
                work = max(0.0, view.busy_until_s - now_s) if role is Role.PREFILL else float(view.running_tokens)
                candidates.append(Candidate(instance_id=view.instance_id, role=role, work=work))
        roles = [leaving.role for leaving in self._leaving.values()]
        prefill, decode = views[Role.PREFILL], views[Role.DECODE]
        return Pools(
            now_s=now_s,
            prefill=serving[Role.PREFILL],
            decode=serving[Role.DECODE],
            to_prefill=roles.count(Role.PREFILL),
            to_decode=roles.count(Role.DECODE),
            candidates=candidates,
            demand=Demand(
                prefill=prompt_demand(came, prefill, now_s, self._ttft_s),
                decode=kv_demand(decode, prefill, self._roster.cost, block_tokens),
            ),
            refused=refused_kv_demand(came, decode, block_tokens, self._roster.decode_s),
        )

    def _give_up(self, now_s: float) -> None:
        for instance_id, leaving in list(self._leaving.items()):
            lease = self._peers.get(instance_id)
            if lease is not None and lease.load.draining:
                leaving.since_s, leaving.has_heard = now_s, True
            patience_s = _BACK_WITHIN_S if leaving.has_heard or lease is None else _HEARD_WITHIN_S
            if now_s - leaving.since_s > patience_s:
                del self._leaving[instance_id]
                self._roster.restore(instance_id)
