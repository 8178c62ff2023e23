"""Calls, replies and one-way messages over ROUTER and DEALER.

A call carries a message id and a relative deadline; its reply carries that id in ``re``. The server runs a handler per
kind: a plain function runs in order, at once; a coroutine function runs as a task, so that a slow call delays nobody.
One call's failure is that call's answer and nothing else. When a caller stops waiting it says so (CancelCall), and the
handler is cancelled.
"""

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, overload

import structlog

from mooncake_mesh.errors import (
    CallTimeout,
    Draining,
    InternalError,
    MeshError,
    MooncakeError,
    PeerUnreachable,
    SlowReader,
    failure_of,
)
from mooncake_mesh.mesh import endpoint as sockets
from mooncake_mesh.mesh.connecting import Dealer, Link
from mooncake_mesh.mesh.curve import Audience, MeshKeys
from mooncake_mesh.mesh.log_allowance import LogAllowance
from mooncake_mesh.mesh.reply_stream import ReplyStream, raise_if_error
from mooncake_proto import codec
from mooncake_proto.control import CancelCall, Failure
from mooncake_proto.envelope import Envelope
from mooncake_proto.errors import MalformedMessage, UnknownKind, WireError
from mooncake_proto.ids import MessageId

log = structlog.get_logger(__name__)

_R = TypeVar("_R")
_R2 = TypeVar("_R2")

MAX_RUNNING_CALLS: Final = 4096
_CAUSED_BY_PEERS: Final = ("message_refused", "one_way_message_failed", "reply_undeliverable")


class Caller:
    """Who sent a message, and the way back to them. Valid for as long as their connection lives."""

    __slots__ = ("_server", "cause", "identity", "message_id")

    def __init__(self, server: "RpcServer", identity: bytes, envelope: Envelope) -> None:
        self._server = server
        self.identity = identity
        self.message_id = envelope.id
        self.cause = envelope.cause

    def reply(self, body: object) -> None:
        """Send *body* in answer. More than one answer is allowed (streams). Raises PeerUnreachable."""
        self._server.send(self.identity, body, Envelope(re=self.message_id))


Handler = Callable[[Any, Caller], object | Awaitable[object]]
"""Gets the body and the caller; returns the reply or None. Raising a MooncakeError replies with Failure."""


class RpcServer:
    """A bound ROUTER and its handlers. Create inside a running loop.

    At most MAX_RUNNING_CALLS coroutine handlers run at once; a call beyond that is answered ``overloaded`` (retryable).
    A handler that is cancelled answers nothing. Where keys are in use, only *audience* is let in.
    """

    def __init__(
        self,
        bind: str,
        handlers: dict[type, Handler],
        tasks: asyncio.TaskGroup,
        *,
        audience: Audience = Audience.MEMBERS,
    ) -> None:
        self._handlers: dict[type, tuple[Handler, bool]] = {}
        self.take(handlers)
        self._tasks = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._calls: dict[tuple[bytes, MessageId], asyncio.Task[None]] = {}
        self._is_closing = False
        self._channel = sockets.router(bind, lambda frames: self._accept(frames[0], frames[1:]), audience=audience)
        self.endpoint = self._channel.endpoint
        self.refused_messages = 0
        self._told = {event: LogAllowance() for event in _CAUSED_BY_PEERS}

    def take(self, handlers: dict[type, Handler]) -> None:
        """Answer with *handlers* from now on; kinds that none is for keep the one they have."""
        for cls, handler in handlers.items():
            self._handlers[cls] = (handler, inspect.iscoroutinefunction(handler))

    async def close(self) -> None:
        """Cancel running handlers and close the socket; what comes in meanwhile is answered ``draining``."""
        self._is_closing = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._channel.close()

    def send(self, identity: bytes, body: object, envelope: Envelope) -> None:
        """Send to one connected peer; raises PeerUnreachable."""
        self._channel.send_now([identity, *codec.encode(body, envelope)])

    def _accept(self, identity: bytes, frames: Sequence[bytes]) -> None:
        try:
            envelope, body = codec.decode(frames)
            if isinstance(body, CancelCall):
                self._cancel(identity, body.target)
                return
            entry = self._handlers.get(type(body))
            if entry is None:
                raise UnknownKind(f"this process does not take {type(body).__name__}")
            if (identity, envelope.id) in self._calls:
                raise MalformedMessage("an earlier call with this id still runs", path="header.id")
        except WireError as error:
            self._refuse(identity, codec.peek(frames), error)
            return
        caller = Caller(self, identity, envelope)
        handler, is_async = entry
        if self._is_closing:
            self._answer(caller, failure_of(Draining("this process is stopping")))
        elif not is_async:
            self._run_now(handler, body, caller)
        elif len(self._running) >= MAX_RUNNING_CALLS:
            self._answer(caller, Failure(code="overloaded", message="too many calls in progress", retryable=True))
        else:
            self._spawn(handler, body, caller, envelope.deadline_s)

    def _refuse(self, identity: bytes, envelope: Envelope, error: WireError) -> None:
        """Answer even a message without a readable id, so that a peer of another version learns what is wrong.

        Not a reply, though: two processes could go on refusing each other's refusals.
        """
        self.refused_messages += 1
        self._tell(log.warning, "message_refused", code=error.code, error=str(error)[:200])
        if not envelope.re:
            self._send_reply(Caller(self, identity, envelope), failure_of(error))

    def _run_now(self, handler: Handler, body: object, caller: Caller) -> None:
        try:
            self._answer(caller, handler(body, caller))
        except MooncakeError as error:
            self._answer(caller, failure_of(error))
        except Exception as error:  # noqa: BLE001  one message may not stop the process
            self._answer(caller, _crashed(error, body))

    def _spawn(self, handler: Handler, body: object, caller: Caller, deadline_s: float | None) -> None:
        task = self._tasks.create_task(self._run(handler, body, caller, deadline_s))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        if caller.message_id:
            key = (caller.identity, caller.message_id)
            self._calls[key] = task
            task.add_done_callback(lambda _: self._calls.pop(key, None))

    async def _run(self, handler: Handler, body: object, caller: Caller, deadline_s: float | None) -> None:
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                result = handler(body, caller)
                reply = await result if inspect.isawaitable(result) else result
        except MooncakeError as error:
            reply = failure_of(error)
        except Exception as error:  # noqa: BLE001  one call may not stop the process
            if deadline.expired() and isinstance(error, TimeoutError):
                reply = failure_of(CallTimeout(f"{type(body).__name__} took over {deadline_s:g} s"))
            else:
                reply = _crashed(error, body)
        self._answer(caller, reply)

    def _answer(self, caller: Caller, reply: object) -> None:
        if reply is None:
            return
        if caller.message_id:
            self._send_reply(caller, reply)
        elif isinstance(reply, Failure):
            self._tell(log.warning, "one_way_message_failed", code=reply.code, error=reply.message[:200])

    def _send_reply(self, caller: Caller, reply: object) -> None:
        try:
            try:
                caller.reply(reply)
            except (WireError, TypeError) as error:  # a reply that cannot travel must not leave its caller without one
                caller.reply(_crashed(error, reply))
        except PeerUnreachable:
            self._tell(log.info, "reply_undeliverable", kind=type(reply).__name__)

    def _tell(self, say: Callable[..., object], event: str, **fields: str) -> None:
        """Log what a peer can cause as often as it likes."""
        unsaid = self._told[event].take(asyncio.get_running_loop().time())
        if unsaid is not None:
            say(event, **fields, unsaid=unsaid)

    def _cancel(self, identity: bytes, target: MessageId) -> None:
        task = self._calls.get((identity, target))
        if task is not None:
            task.cancel()


def _crashed(error: Exception, body: object) -> Failure:
    log.error("handler_crashed", kind=type(body).__name__, exc_info=error)
    return failure_of(InternalError(f"{type(body).__name__}: {type(error).__name__}"))


class RpcClient:
    """A DEALER to one peer. Create inside a running loop.

    When the connection drops, all open calls fail at once with PeerUnreachable and *on_lost* is called; the socket goes
    on connecting to the same address, so a later call reaches the peer's next incarnation. A peer that refuses our keys
    fails calls with KeyRefused, which is a PeerUnreachable. *keys* are those of the process unless given.
    """

    def __init__(
        self, endpoint: str, *, on_lost: Callable[[], None] | None = None, keys: MeshKeys | None = None
    ) -> None:
        self.endpoint = endpoint
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._open: dict[MessageId, asyncio.Queue[Any] | asyncio.Future[Any]] = {}
        self._channel = Dealer(endpoint, self._accept, self._link_changed, keys)
        self.is_connected = False
        self.late_replies = 0

    async def __aenter__(self) -> "RpcClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is still open and close the socket."""
        self.fail_open_calls("the client was closed")
        self._channel.close()

    def post(self, body: object, *, cause: str = "") -> None:
        """Send one way, now. Raises PeerUnreachable when there is no live connection or its queue is full."""
        self._channel.send_now(codec.encode(body, Envelope(cause=cause)))

    async def send(self, body: object, *, timeout_s: float, cause: str = "") -> None:
        """Send one way, waiting up to *timeout_s* for a connection. Raises PeerUnreachable."""
        await self._channel.send(codec.encode(body, Envelope(cause=cause)), timeout_s=timeout_s)

    @overload
    async def call(
        self,
        body: object,
        expect: type[_R],
        *,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        cause: str = "",
    ) -> _R: ...

    @overload
    async def call(
        self,
        body: object,
        expect: tuple[type[_R], type[_R2]],
        *,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        cause: str = "",
    ) -> _R | _R2: ...

    async def call(
        self,
        body: object,
        expect: type | tuple[type, ...],
        *,
        timeout_s: float,
        connect_timeout_s: float | None = None,
        cause: str = "",
    ) -> object:
        """Send *body* and wait for its reply of class *expect*; a connection has to stand within *connect_timeout_s*.

        Raises RemoteFailure (the peer's own error), PeerUnreachable, CallTimeout, or WireError for another class of
        reply.
        """
        message_id = self._next_id()
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        await self._channel.send(
            codec.encode(body, Envelope(id=message_id, deadline_s=timeout_s, cause=cause)),
            timeout_s=timeout_s if connect_timeout_s is None else connect_timeout_s,
        )
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[message_id] = reply
        try:
            async with asyncio.timeout_at(deadline_s):
                result = await reply
        except TimeoutError:
            self._say_cancelled(message_id)
            raise CallTimeout(f"{type(body).__name__} to {self.endpoint}: no reply in {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._say_cancelled(message_id)
            raise
        finally:
            self._open.pop(message_id, None)
        raise_if_error(result)
        if not isinstance(result, expect):
            raise WireError(f"{self.endpoint} answered {type(result).__name__} to {type(body).__name__}")
        return result

    @asynccontextmanager
    async def stream(
        self, body: object, *, timeout_s: float, connect_timeout_s: float | None = None, max_items: int = 1024
    ) -> AsyncIterator["ReplyStream"]:
        """Send *body* and read any number of replies; leaving the block tells the peer that nobody reads any more.

        *timeout_s* is the peer's deadline; a connection has to stand within *connect_timeout_s*. A reader that falls
        *max_items* replies behind loses them, and the peer is told to stop. Raises PeerUnreachable.
        """
        message_id = self._next_id()
        await self._channel.send(
            codec.encode(body, Envelope(id=message_id, deadline_s=timeout_s)),
            timeout_s=timeout_s if connect_timeout_s is None else connect_timeout_s,
        )
        queue: asyncio.Queue[Any] = asyncio.Queue(max_items)
        self._open[message_id] = queue
        replies = ReplyStream(queue, message_id)
        try:
            yield replies
        finally:
            # No longer open: the peer has heard already, or is gone.
            if self._open.pop(message_id, None) is not None and not replies.ended:
                self._say_cancelled(message_id)

    def _next_id(self) -> MessageId:
        return MessageId(f"{next(self._ids):x}")

    def _say_cancelled(self, message_id: MessageId) -> None:
        try:
            self.post(CancelCall(target=message_id))
        except PeerUnreachable:
            log.debug("cancel_undeliverable", endpoint=self.endpoint)

    def _accept(self, frames: list[bytes]) -> None:
        try:
            envelope, body = codec.decode(frames)
        except WireError as error:
            envelope = codec.peek(frames)
            body = Failure(code=error.code, message=f"bad reply from {self.endpoint}: {error}")
        self._deliver(envelope.re, body)

    def _deliver(self, message_id: MessageId, body: object) -> None:
        waiter = self._open.get(message_id)
        if waiter is None:
            self.late_replies += 1
        elif isinstance(waiter, asyncio.Future):
            if not waiter.done():
                waiter.set_result(body)
        elif waiter.full():
            del self._open[message_id]
            _end(waiter, SlowReader(f"{waiter.qsize()} replies lay unread"))
            self._say_cancelled(message_id)
        else:
            waiter.put_nowait(body)

    def _link_changed(self, link: Link) -> None:
        self.is_connected = link is Link.UP
        if self.is_connected:
            return
        self.fail_open_calls("the connection was lost")
        if self._on_lost is not None:
            self._on_lost()

    def fail_open_calls(self, why: str) -> None:
        """Every call that waits for a reply fails with PeerUnreachable now; a reply that comes later is nobody's."""
        # Errors are results here, not exceptions, so that one which nobody awaits any more makes no noise.
        waiters = list(self._open.values())
        self._open.clear()
        for waiter in waiters:
            error = PeerUnreachable(f"{self.endpoint}: {why}")
            if isinstance(waiter, asyncio.Queue):
                _end(waiter, error)
            elif not waiter.done():
                waiter.set_result(error)


def _end(queue: asyncio.Queue[Any], error: MeshError) -> None:
    """Make *error* the last item, at the cost of what is unread when the queue is full."""
    if queue.full():
        while not queue.empty():
            queue.get_nowait()
    queue.put_nowait(error)
