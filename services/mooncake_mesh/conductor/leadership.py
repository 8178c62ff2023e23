"""Whether this conductor leads: one seat in etcd, held by a lease. Pure.

The seat is a key that exists only while its holder's lease does, so it has one holder at a time. A holder that can no
longer renew must stop before etcd gives the seat away, and by its own clock, for it may not hear: what it was granted
counts from the moment *before* it asked (etcd counts from later), and it uses no more than SAFE_SHARE of that. So two
conductors never lead at once as long as no clock runs faster or slower than true time by a tenth.

::

    standby ──Won──► leading ──its time is over, SeatLost──► standby
                        └──StopAsked──► (the lease is given back)

A term has a number, its epoch, that grows with every change of the seat: the revision at which etcd created the key.
"""

from dataclasses import dataclass
from typing import Final

SAFE_SHARE: Final = 0.8
"""Of the lease: with clocks that are wrong by a tenth, 0.8 / 0.9 of it passes at most, where etcd waits 1 / 1.1."""
_RENEWALS: Final = 5
_LONGEST_LOOK_S: Final = 0.5
_LOOKS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """``wake_at`` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Won:
    """The seat was free and is ours, by a lease of ``ttl_s`` that was asked for at ``asked_s``."""

    asked_s: float
    lease: str
    ttl_s: float
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Somebody else has the seat: ``leader``, by its own words."""

    leader: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """The lease and the seat are ours still."""

    asked_s: float
    ttl_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLost:
    """etcd says that the lease is over, or the seat not ours any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """etcd did not answer, or not in a way that makes sense: nothing is known."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    pass


Event = TimePassed | Won | Taken | Renewed | SeatLost | Unreachable | StopAsked


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Take the seat if it is free. Ends in Won, Taken or Unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Ends in Renewed, SeatLost or Unreachable."""

    lease: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """The seat is free at once; no answer matters."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTerm:
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTerm:
    why: str


Command = Campaign | Renew | GiveBack | BeginTerm | EndTerm


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    lease: str
    epoch: int
    safe_until_s: float


class Leadership:
    """``handle(event, now) -> commands``; seconds of one clock that also runs while the process or machine sleeps.

    One question to etcd is open at a time: whoever acts on a command feeds its end back before the next one comes.
    ``leader`` is who else has the seat, and ``trouble`` why etcd could not be asked last, for people; "" when unknown.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._look_every_s = min(_LONGEST_LOOK_S, lease_s / _LOOKS)
        self._renew_every_s = lease_s / _RENEWALS
        self._term: _Term | None = None
        self._is_asking = False
        self._is_stopping = False
        self._ask_at_s = 0.0
        self.leader = ""
        self.trouble = ""

    def leads(self, now_s: float) -> bool:
        """To be asked at the moment of every act of a leader: a process may have slept since it last looked."""
        return self._term is not None and now_s < self._term.safe_until_s

    @property
    def epoch(self) -> int:
        """Of the term that has begun, 0 without one."""
        return 0 if self._term is None else self._term.epoch

    @property
    def is_over(self) -> bool:
        """After StopAsked, once nothing is open any more."""
        return self._is_stopping and not self._is_asking

    @property
    def wake_at_s(self) -> float | None:
        """When TimePassed is due; None: not before something else happens."""
        if self._term is None:
            return None if self._is_asking or self._is_stopping else self._ask_at_s
        return self._term.safe_until_s if self._is_asking else min(self._ask_at_s, self._term.safe_until_s)

    def handle(self, event: Event, now_s: float) -> list[Command]:
        commands = self._heard(event, now_s)
        if self._term is not None and not self.leads(now_s):
            commands += self._end("the lease could not be renewed in time")
        return commands + self._ask(now_s)

    def _heard(self, event: Event, now_s: float) -> list[Command]:
        match event:
            case TimePassed():
                return []
            case StopAsked():
                return self._stop()
        self._is_asking = False
        self._ask_at_s = now_s + self._look_every_s
        self.leader, self.trouble = "", ""
        match event:
            case Unreachable(why=why):
                self.trouble = why
            case Won():
                return self._won(event, now_s)
            case Taken(leader=leader):
                self.leader = leader
            case Renewed():
                self._renewed(event, now_s)
            case SeatLost() if self._term is not None:
                return self._end("etcd gave the seat up")
        return []

    def _won(self, won: Won, now_s: float) -> list[Command]:
        """A seat that came too late, or is not wanted any more, is given back."""
        if self._is_stopping or now_s >= _safe_until_s(won):
            return [GiveBack(lease=won.lease)]
        self._term = _Term(lease=won.lease, epoch=won.epoch, safe_until_s=_safe_until_s(won))
        self._ask_at_s = won.asked_s + self._renew_every_s
        return [BeginTerm(epoch=won.epoch)]

    def _renewed(self, renewed: Renewed, now_s: float) -> None:
        """Never of another term's lease: a term whose renewal is open ends in the time it has, and asks no more."""
        if self._term is not None and self.leads(now_s):
            until_s = max(self._term.safe_until_s, _safe_until_s(renewed))
            self._term = _Term(lease=self._term.lease, epoch=self._term.epoch, safe_until_s=until_s)
            self._ask_at_s = renewed.asked_s + self._renew_every_s

    def _end(self, why: str) -> list[Command]:
        """The lease is given back, so that nobody waits for its end; etcd may hear of it or not."""
        assert self._term is not None
        lease, self._term = self._term.lease, None
        return [EndTerm(why=why), GiveBack(lease=lease)]

    def _stop(self) -> list[Command]:
        self._is_stopping = True
        return [] if self._term is None else self._end("the process stops")

    def _ask(self, now_s: float) -> list[Command]:
        if self._is_asking or self._is_stopping or now_s < self._ask_at_s:
            return []
        self._is_asking = True
        if self._term is None:
            return [Campaign()]
        return [Renew(lease=self._term.lease, epoch=self._term.epoch)]


def _safe_until_s(granted: Won | Renewed) -> float:
    return granted.asked_s + SAFE_SHARE * granted.ttl_s
