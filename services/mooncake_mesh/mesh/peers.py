"""Who is there: a lease table, pure.

Each member holds a lease that its beats renew. A lease that is not renewed becomes SUSPECT (place nothing new there),
then DEAD (its work is lost). A member that comes back with another incarnation is another process on the same address:
the old one is dead at that very moment, whatever its lease says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mooncake_proto.control import Health, Load, Member
from mooncake_proto.ids import Incarnation, InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    member: Member
    health: Health
    load: Load
    renewed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged:
    member: Member
    health: Health


PeerEvent = Joined | HealthChanged


class PeerTable:
    """Leases by instance id. Times are seconds of any monotonic clock, passed in.

    Who keeps the table calls :meth:`expire` at least every *look_every_s*, where that is given: what a call comes later
    than that, its keeper has slept, heard nobody's beats meanwhile, and so holds it against no lease.
    """

    def __init__(
        self,
        *,
        suspect_after_s: float,
        dead_after_s: float,
        forget_after_s: float = 60.0,
        look_every_s: float | None = None,
    ) -> None:
        if not 0 < suspect_after_s < dead_after_s <= forget_after_s:
            raise ValueError("suspect_after_s < dead_after_s <= forget_after_s must hold")
        self._suspect_after_s = suspect_after_s
        self._dead_after_s = dead_after_s
        self._forget_after_s = forget_after_s
        self._look_every_s = look_every_s
        self._looked_s: float | None = None
        self._leases: dict[InstanceId, Lease] = {}
        self.revision = 0

    def __iter__(self) -> Iterator[Lease]:
        """By instance id. Snapshot: leases may change while it is read."""
        return iter(list(self._leases.values()))

    def get(self, instance_id: InstanceId) -> Lease | None:
        return self._leases.get(instance_id)

    def join(self, member: Member, load: Load, now_s: float) -> list[PeerEvent]:
        """Enter or renew *member*, which says *load* of itself. Reports the death of an older incarnation before the
        joining of the new one."""
        events: list[PeerEvent] = []
        old = self._leases.get(member.instance_id)
        if old is not None and old.member.incarnation != member.incarnation and old.health is not Health.DEAD:
            events.append(HealthChanged(member=old.member, health=Health.DEAD))
        is_new = member.instance_id not in self._leases
        self._leases[member.instance_id] = Lease(member=member, health=Health.ALIVE, load=load, renewed_s=now_s)
        if is_new:  # joining is rare, reading the table in order is not
            self._leases = dict(sorted(self._leases.items()))
        self.revision += 1
        return [*events, Joined(member=member)]

    def beat(
        self, instance_id: InstanceId, incarnation: Incarnation, load: Load, now_s: float
    ) -> list[PeerEvent] | None:
        """Renew a lease. None when this incarnation is not known, or was declared dead: it has to join again."""
        lease = self._leases.get(instance_id)
        if lease is None or lease.member.incarnation != incarnation or lease.health is Health.DEAD:
            return None
        self._leases[instance_id] = Lease(member=lease.member, health=Health.ALIVE, load=load, renewed_s=now_s)
        if lease.health is Health.ALIVE:
            return []
        self.revision += 1
        return [HealthChanged(member=lease.member, health=Health.ALIVE)]

    def leave(self, instance_id: InstanceId, incarnation: Incarnation) -> list[PeerEvent]:
        """An orderly goodbye; of another incarnation it means nothing, and a death is reported once."""
        lease = self._leases.get(instance_id)
        if lease is None or lease.member.incarnation != incarnation:
            return []
        del self._leases[instance_id]
        self.revision += 1
        return [] if lease.health is Health.DEAD else [HealthChanged(member=lease.member, health=Health.DEAD)]

    def expire(self, now_s: float) -> list[PeerEvent]:
        """Move leases along by age; forget the long dead, so that the table stays bounded."""
        self._forgive(now_s)
        events: list[PeerEvent] = []
        for instance_id, lease in list(self._leases.items()):
            age_s = now_s - lease.renewed_s
            if lease.health is Health.DEAD:
                if age_s >= self._forget_after_s:
                    del self._leases[instance_id]
                    self.revision += 1
                continue
            health = (
                Health.DEAD
                if age_s >= self._dead_after_s
                else Health.SUSPECT
                if age_s >= self._suspect_after_s
                else Health.ALIVE
            )
            if health is not lease.health:
                self._leases[instance_id] = replace(lease, health=health)
                self.revision += 1
                events.append(HealthChanged(member=lease.member, health=health))
        return events

    def _forgive(self, now_s: float) -> None:
        slept_s = 0.0
        if self._look_every_s is not None and self._looked_s is not None:
            slept_s = max(0.0, now_s - self._looked_s - self._look_every_s)
        self._looked_s = now_s
        if slept_s:
            for instance_id, lease in self._leases.items():
                self._leases[instance_id] = replace(lease, renewed_s=min(now_s, lease.renewed_s + slept_s))
