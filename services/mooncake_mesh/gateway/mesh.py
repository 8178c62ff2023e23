"""The mesh below the doors: runs each request's core, does what it commands, feeds back what happened.

Tokens come in on the stream ROUTER, from prefill workers (the first) and decode workers (the others). The loss of a
worker shows in two ways, whichever is first: its connection drops, or the conductor publishes that it is dead or
another incarnation.
"""

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Final, TypeVar

import structlog

from mooncake_mesh.errors import MooncakeError, Rejected
from mooncake_mesh.gateway.api import Readiness, TokenEvent, TokenRequest
from mooncake_mesh.gateway.core import CONDUCTOR_UNREACHABLE, KeySpace, RequestCore
from mooncake_mesh.gateway.known_members import KnownMembers
from mooncake_mesh.gateway.ledger import Ledger, RequestAccount
from mooncake_mesh.gateway.request_events import (
    AskAfterJob,
    AskPlacement,
    CallerLeft,
    CancelAt,
    DeadlinePassed,
    Emit,
    Fail,
    JobForgotten,
    JobsAccepted,
    Looked,
    NotPlaced,
    Placed,
    RequestCommand,
    RequestEvent,
    Started,
    StartJobs,
    WorkerLost,
)
from mooncake_mesh.gateway.request_story import RequestStory, Stories
from mooncake_mesh.gateway.worker_calls import WorkerCalls
from mooncake_mesh.kv.block_hash import key_root
from mooncake_mesh.mesh.conductors import Conductors, is_without_conductor
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_proto.client import RequestTrace
from mooncake_proto.control import (
    ClusterState,
    Health,
    MemberState,
    ModelCard,
    Ok,
    Role,
    StatusQuery,
    StatusReport,
)
from mooncake_proto.decisions import DecisionsQuery, DecisionsReport
from mooncake_proto.ids import JobId, RequestId
from mooncake_proto.serving import (
    DecodeGranted,
    FirstToken,
    JobFailed,
    Placement,
    TokenBatch,
    WorkerRef,
)
from mooncake_proto.serving import (
    Rejected as RejectedReply,
)

log = structlog.get_logger(__name__)

_Report = TypeVar("_Report", StatusReport, DecisionsReport)

_SCHEDULE_TIMEOUT_S: Final = 5.0
_START_TIMEOUT_S: Final = 5.0
_REPORT_TIMEOUT_S: Final = 1.0
_LOOK_EVERY_S: Final = 1.0
_CONDUCTOR_RETRY_AFTER_S: Final = 1.0
_WORKERS: Final = (Role.PREFILL, Role.DECODE)


class CacheSharing(enum.Enum):
    """Whose KV a request may find in the pool."""

    WITHIN_TENANT = "within_tenant"
    ACROSS_TENANTS = "across_tenants"


@dataclass(slots=True)
class _Running:
    """One request on its way; ``events`` holds at most what it generates."""

    core: RequestCore
    account: RequestAccount
    story: RequestStory
    events: asyncio.Queue[TokenEvent | MooncakeError] = field(default_factory=asyncio.Queue)
    deadline: asyncio.TimerHandle | None = None
    placing: asyncio.Task[None] | None = None


class MeshClient:
    """Implements the ``Mesh`` of gateway/api.py. Create inside a running loop."""

    def __init__(
        self,
        conductors: Conductors,
        tasks: asyncio.TaskGroup,
        *,
        max_replacements: int,
        sharing: CacheSharing = CacheSharing.WITHIN_TENANT,
        on_end: Callable[[RequestStory], None] = lambda _: None,
    ) -> None:
        self._conductors = conductors
        self._tasks = tasks
        self._max_replacements = max_replacements
        self._sharing = sharing
        self._on_end = on_end
        self._workers = Phonebook(on_lost=self._endpoint_lost)
        self._calls = WorkerCalls(self._workers)
        self._running: dict[JobId, _Running] = {}
        self._accounts: dict[RequestId, RequestAccount] = {}
        self.ledger = Ledger()
        self._stories = Stories()
        self._members = KnownMembers()
        self._loop = asyncio.get_running_loop()
        self.stream_endpoint = ""

    def stream_handlers(self) -> dict[type, Handler]:
        """What the stream ROUTER takes."""
        return {
            FirstToken: self._first_token,
            DecodeGranted: self._decode_granted,
            TokenBatch: self._token_batch,
            JobFailed: self._job_failed,
        }

    def close(self) -> None:
        self._calls.close()
        self._workers.close()

    # --- the Mesh protocol --------------------------------------------------------------------------------------------

    def models(self) -> tuple[ModelCard, ...]:
        return tuple(state.member.model for state in self._serving() if state.member.model is not None)

    def readiness(self) -> Readiness:
        roles = {state.member.role for state in self._serving()}
        reasons = tuple(f"no {role.value} instance" for role in _WORKERS if role not in roles)
        return Readiness(ready=not reasons, reasons=reasons)

    async def generate(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        running = self._enter(request)
        account = self._accounts[request.request_id] = running.account
        try:
            while True:
                event = await running.events.get()
                if isinstance(event, MooncakeError):
                    account.failed(event)
                    raise event
                account.token(event, monotonic())
                yield event
                if event.finish is not None:
                    return
        finally:
            del self._accounts[request.request_id]
            self._leave(running)

    def satisfied(self, request_id: RequestId) -> None:
        account = self._accounts.get(request_id)
        if account is not None:
            account.satisfied()

    def traces(self, request_id: str, tenant: str) -> tuple[RequestTrace, ...]:
        return self._stories.find(request_id, tenant)

    async def report(self) -> StatusReport | None:
        return await self._told(StatusQuery(), StatusReport)

    async def decisions(self, *, after: int) -> DecisionsReport | None:
        return await self._told(DecisionsQuery(after=after), DecisionsReport)

    async def _told(self, query: object, expect: type[_Report]) -> _Report | None:
        try:
            return await self._conductors.leader.call(query, expect, timeout_s=_REPORT_TIMEOUT_S)
        except MooncakeError as error:
            log.info("conductor_silent", code=error.code)
            return None

    # --- for context caches -------------------------------------------------------------------------------------------

    def messengers(self) -> list[str]:
        """Endpoints of the messengers that are there now."""
        states = (state for state in self._members.members(monotonic()) if state.health is not Health.DEAD)
        return [state.member.endpoint for state in states if state.member.role is Role.MESSENGER]

    def key_space(self, model: str, tenant: str, cache_salt: str) -> KeySpace | None:
        """Where the keys of such requests lie; None while nobody serves *model*."""
        card = next((card for card in self.models() if card.name == model), None)
        if card is None:
            return None
        root = key_root(
            fingerprint=card.fingerprint,
            dtype=card.dtype,
            block_tokens=card.block_tokens,
            block_bytes=card.block_bytes,
            tenant=tenant if self._sharing is CacheSharing.WITHIN_TENANT else "",
            cache_salt=cache_salt,
        )
        return KeySpace(root=root, block_tokens=card.block_tokens)

    # --- one request --------------------------------------------------------------------------------------------------

    def _enter(self, request: TokenRequest) -> _Running:
        space = self.key_space(request.model, request.tenant, request.cache_salt)
        if space is None:
            raise Rejected("no_instances", unavailable=True, retry_after_s=_CONDUCTOR_RETRY_AFTER_S)
        started_s = monotonic()
        core = RequestCore(
            request,
            space,
            stream_endpoint=self.stream_endpoint,
            max_replacements=self._max_replacements,
            started_s=started_s,
        )
        story = self._stories.begin(request, started_s, time())
        running = _Running(core=core, account=RequestAccount(request, started_s), story=story)
        running.deadline = self._loop.call_later(request.deadline_s, self._feed, running, DeadlinePassed())
        self._feed(running, Started())
        return running

    def _leave(self, running: _Running) -> None:
        if running.deadline is not None:
            running.deadline.cancel()
        if running.placing is not None:
            running.placing.cancel()  # the conductor hears of it too, and may save itself the work
        core = running.core
        self.ledger.note(running.account.outcome(core.computed_tokens, core.placement))
        self._feed(running, CallerLeft())
        self._running.pop(running.core.job_id, None)
        self._on_end(running.story)

    def _feed(self, running: _Running, event: RequestEvent) -> None:
        before, now_s = running.core.job_id, monotonic()
        running.story.note(event, now_s)
        commands = running.core.handle(event, now_s)
        if running.core.job_id != before:
            self._running.pop(before, None)
        for command in commands:
            self._execute(running, command)
        if running.core.is_over:
            self._running.pop(running.core.job_id, None)

    def _execute(self, running: _Running, command: RequestCommand) -> None:
        match command:
            case Emit(event=event):
                running.events.put_nowait(event)
            case Fail(error=error):
                running.events.put_nowait(error)
            case AskPlacement():
                self._running[command.schedule.job_id] = running
                running.placing = self._tasks.create_task(self._place(running, command))
            case StartJobs():
                self._tasks.create_task(self._start(running, command))
            case CancelAt(workers=workers):
                for worker in workers:
                    self._tasks.create_task(self._calls.cancel(worker, command.job_id, command.reason))
            case AskAfterJob(workers=workers):
                for worker in workers:
                    self._tasks.create_task(self._ask_after(running, worker, command.job_id))

    async def _place(self, running: _Running, command: AskPlacement) -> None:
        job_id = command.schedule.job_id
        if command.after_s:
            await asyncio.sleep(command.after_s)
        if running.core.is_over:
            return
        try:
            reply = await self._conductors.leader.call(
                command.schedule,
                (Placement, RejectedReply),
                timeout_s=_SCHEDULE_TIMEOUT_S,
                connect_timeout_s=self._conductors.connect_timeout_s,
                cause=job_id,
            )
        except MooncakeError as error:
            if not is_without_conductor(error):  # its own word, or an answer that makes no sense
                self._feed(running, NotPlaced(job_id=job_id, error=error))
                return
            log.warning("conductor_unreachable", job_id=job_id, code=error.code)
            refusal = Rejected(CONDUCTOR_UNREACHABLE, unavailable=True, retry_after_s=_CONDUCTOR_RETRY_AFTER_S)
            self._feed(running, NotPlaced(job_id=job_id, error=refusal))
        else:
            self._feed(running, self._placement_event(reply))

    def _placement_event(self, reply: Placement | RejectedReply) -> RequestEvent:
        if isinstance(reply, Placement):
            return Placed(placement=reply)
        error = Rejected(reply.reason, unavailable=reply.unavailable, retry_after_s=reply.retry_after_s)
        return NotPlaced(job_id=reply.job_id, error=error)

    async def _start(self, running: _Running, command: StartJobs) -> None:
        """Send both jobs at once; neither waits for the other."""
        job_id, placement = command.placement.job_id, command.placement
        async with asyncio.TaskGroup() as calls:
            if command.prefill is not None:
                calls.create_task(self._submit(running, placement.prefill, command.prefill, job_id))
            if command.decode is not None:
                calls.create_task(self._submit(running, placement.decode, command.decode, job_id))
        self._feed(running, JobsAccepted(job_id=job_id))

    async def _submit(self, running: _Running, worker: WorkerRef, job: object, job_id: JobId) -> None:
        try:
            await self._workers.get(worker.endpoint).call(job, Ok, timeout_s=_START_TIMEOUT_S, cause=job_id)
        except MooncakeError as error:
            failed = JobFailed(
                job_id=job_id,
                instance_id=worker.instance_id,
                code=error.code,
                message=str(error)[:500],
                retryable=error.retryable,
            )
            self._feed(running, failed)

    async def watch(self) -> None:
        """Have every request look around once in a while, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            for running in list(self._running.values()):
                self._feed(running, Looked())

    async def _ask_after(self, running: _Running, worker: WorkerRef, job_id: JobId) -> None:
        if await self._calls.has_forgotten(worker, job_id):
            self._feed(running, JobForgotten(job_id=job_id, instance_id=worker.instance_id))

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _first_token(self, first: FirstToken, _: Caller) -> None:
        running = self._running.get(first.job_id)
        if running is not None:
            self._feed(running, first)

    def _decode_granted(self, granted: DecodeGranted, _: Caller) -> None:
        running = self._running.get(granted.job_id)
        if running is not None:
            self._feed(running, granted)

    def _token_batch(self, batch: TokenBatch, _: Caller) -> None:
        for entry in batch.entries:
            running = self._running.get(entry.job_id)
            if running is not None:
                self._feed(running, entry)

    def _job_failed(self, failed: JobFailed, _: Caller) -> None:
        running = self._running.get(failed.job_id)
        if running is not None:
            self._feed(running, failed)

    def heard(self, state: ClusterState) -> None:
        """The conductor published who is there."""
        self._members.heard(state, monotonic())
        alive = {
            (member.member.instance_id, member.member.incarnation)
            for member in state.members
            if member.health is not Health.DEAD
        }
        for running in list(self._running.values()):
            placement = running.core.placement
            for worker in (placement.prefill, placement.decode) if placement else ():
                if (worker.instance_id, worker.incarnation) not in alive and _is_known(worker, state):
                    self._feed(running, WorkerLost(instance_id=worker.instance_id))

    def _endpoint_lost(self, endpoint: str) -> None:
        for running in list(self._running.values()):
            placement = running.core.placement
            for worker in (placement.prefill, placement.decode) if placement else ():
                if worker.endpoint == endpoint:
                    self._feed(running, WorkerLost(instance_id=worker.instance_id))

    def _serving(self) -> list[MemberState]:
        return [state for state in self._members.members(monotonic()) if state.takes_work]


def _is_known(worker: WorkerRef, state: ClusterState) -> bool:
    """Whether *state* says anything of the worker: a conductor that just restarted may not have heard of it yet."""
    return any(member.member.instance_id == worker.instance_id for member in state.members)
