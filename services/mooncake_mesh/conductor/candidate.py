"""A conductor among others: acts on its Leadership, asks etcd, and has terms begin and end."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, assert_never

import structlog

from mooncake_mesh.conductor.etcd import Etcd, EtcdError
from mooncake_mesh.conductor.leadership import (
    BeginTerm,
    Campaign,
    Command,
    EndTerm,
    Event,
    GiveBack,
    Leadership,
    Renew,
    Renewed,
    SeatLost,
    StopAsked,
    Taken,
    TimePassed,
    Unreachable,
    Won,
)
from mooncake_mesh.conductor.term import Mandate
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_proto.control import LeaderReport
from mooncake_proto.ids import InstanceId

log = structlog.get_logger(__name__)

_CALLS_PER_LEASE: Final = 5
_LONGEST_CALL_S: Final = 2.0
"""A call to etcd may take a fifth of a lease, so that a renewal that fails is tried again in time. At the end nobody
waits for one longer than that."""


class Candidate:
    """*holder* is what it writes into its seat; *lead* is run for each term and cancelled at its end.

    Raises ConfigError for certificates that cannot be used.
    """

    def __init__(
        self,
        config: EtcdConfig,
        holder: str,
        lead: Callable[[Mandate], Coroutine[Any, Any, None]],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._core = Leadership(lease_s=config.lease_s)
        self._etcd = Etcd(config, timeout_s=min(_LONGEST_CALL_S, config.lease_s / _CALLS_PER_LEASE))
        self._holder = holder
        self._lead = lead
        self._tasks = tasks
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._term: asyncio.Task[None] | None = None
        self._giving_back: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Compete for the seat until :meth:`stop`; it is given back by then, where etcd can be reached."""
        while not self._core.is_over:
            event = await self._next_event()
            leader, trouble = self._core.leader, self._core.trouble
            for command in self._core.handle(event, _now_s()):
                await self._do(command)
            self._tell(leader, trouble)
        await asyncio.gather(*self._giving_back)

    def stop(self) -> None:
        self._events.put_nowait(StopAsked())

    def report(self, me: InstanceId) -> LeaderReport:
        return LeaderReport(
            instance_id=me,
            leads=self._core.leads(_now_s()),
            epoch=self._core.epoch,
            leader=self._core.leader,
            trouble=self._core.trouble,
        )

    async def _next_event(self) -> Event:
        wake_at_s = self._core.wake_at_s
        try:
            async with asyncio.timeout(None if wake_at_s is None else max(0.0, wake_at_s - _now_s())):
                return await self._events.get()
        except TimeoutError:
            return TimePassed()

    async def _do(self, command: Command) -> None:
        match command:
            case Campaign():
                self._tasks.create_task(self._answered(self._campaign()))
            case Renew(lease=lease, epoch=epoch):
                self._tasks.create_task(self._answered(self._renew(lease, epoch)))
            case GiveBack(lease=lease):
                giving = self._tasks.create_task(self._give_back(lease))
                self._giving_back.add(giving)
                giving.add_done_callback(self._giving_back.discard)
            case BeginTerm(epoch=epoch):
                log.info("leading", epoch=epoch)
                self._term = self._tasks.create_task(self._lead(Mandate(epoch=epoch, runs=lambda: self._leads(epoch))))
            case EndTerm(why=why):
                log.warning("leading_no_more", why=why)
                await self._end_term()
            case _:
                assert_never(command)

    def _leads(self, epoch: int) -> bool:
        return self._core.epoch == epoch and self._core.leads(_now_s())

    async def _end_term(self) -> None:
        if self._term is not None:
            self._term.cancel()
            await asyncio.gather(self._term, return_exceptions=True)
            self._term = None

    async def _answered(self, question: Coroutine[Any, Any, Event]) -> None:
        try:
            self._events.put_nowait(await question)
        except EtcdError as error:
            self._events.put_nowait(Unreachable(why=str(error)))

    async def _campaign(self) -> Event:
        seat = await self._etcd.seat()
        if seat is not None:
            return Taken(leader=seat.holder)
        asked_s = _now_s()
        grant = await self._etcd.grant()
        try:
            mine = await self._etcd.take(grant.lease, self._holder)
        except EtcdError:  # the seat may be ours all the same
            await self._give_back(grant.lease)
            raise
        if mine is None:
            await self._give_back(grant.lease)
            return Taken(leader="")
        return Won(asked_s=asked_s, lease=grant.lease, ttl_s=grant.ttl_s, epoch=mine.epoch)

    async def _renew(self, lease: str, epoch: int) -> Event:
        """The lease may live and the seat be gone all the same: somebody can delete a key by hand."""
        asked_s = _now_s()
        ttl_s = await self._etcd.keep_alive(lease)
        seat = await self._etcd.seat() if ttl_s else None
        if seat is None or seat.epoch != epoch:
            return SeatLost()
        return Renewed(asked_s=asked_s, ttl_s=ttl_s)

    async def _give_back(self, lease: str) -> None:
        try:
            await self._etcd.revoke(lease)
        except EtcdError as error:
            log.info("lease_not_given_back", error=str(error))

    def _tell(self, leader: str, trouble: str) -> None:
        """Say what has changed since *leader* and *trouble*, and not each time that it has not."""
        core = self._core
        if core.trouble and not trouble:
            log.error("etcd_unreachable", error=core.trouble, effect="no conductor can take over or go on leading")
        elif trouble and not core.trouble:
            log.info("etcd_reachable")
        if core.leader and core.leader != leader:
            log.info("standby", leader=core.leader)


def _now_s() -> float:
    """A clock that goes on while the machine is suspended, as a lease does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
