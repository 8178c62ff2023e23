"""Calls and their answers over real sockets in one process."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import zmq
import zmq.asyncio

from mooncake_mesh.errors import (
    CallTimeout,
    InvalidRequest,
    PeerUnreachable,
    Rejected,
    RemoteFailure,
    SlowReader,
)
from mooncake_mesh.mesh import endpoint, rpc
from mooncake_mesh.mesh.rpc import Caller, Handler, RpcClient, RpcServer
from mooncake_proto import codec
from mooncake_proto.client import Cancel, Generate, GenerationDelta, GenerationEnd, ModelsQuery, Operation
from mooncake_proto.control import CancelCall, Failure, Ok, Ping, Pong, Role
from mooncake_proto.envelope import VERSION_FRAME, Envelope
from mooncake_proto.errors import WireError
from mooncake_proto.ids import Incarnation, InstanceId, MessageId
from tests.unit.mesh_doubles import (
    RawPeer,
    Run,
    ScriptedRouter,
    on_both_loops,
    reply_when_there_is_room,
    serving,
    soon,
    until,
)

pytestmark = on_both_loops

PONG = Pong(role=Role.GATEWAY, instance_id=InstanceId("g"), incarnation=Incarnation("i"))


def generate(text: str = "x") -> Generate:
    return Generate(operation=Operation.CHAT, request=text.encode())


def ping(_: Ping, __: Caller) -> Pong:
    return PONG


class Stalled:
    """A coroutine handler that never answers by itself; tells how its calls begin and end."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []

    async def handle(self, request: Generate, _: Caller) -> Ok:
        name = request.request.decode()
        self.started.append(name)
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return Ok()


# --- replies find their calls -----------------------------------------------------------------------------------------


def test_replies_come_in_any_order_and_find_their_call(run: Run[None]) -> None:
    gate: dict[str, asyncio.Event] = {"first": asyncio.Event(), "second": asyncio.Event()}

    async def echo(request: Generate, _: Caller) -> GenerationEnd:
        await gate[request.request.decode()].wait()
        return GenerationEnd(response=request.request)

    async def scenario() -> None:
        async with serving({Generate: echo}) as server, RpcClient(server.endpoint) as client:
            first = asyncio.ensure_future(client.call(generate("first"), GenerationEnd, timeout_s=10))  # noqa: TID251
            second = asyncio.ensure_future(client.call(generate("second"), GenerationEnd, timeout_s=10))  # noqa: TID251
            gate["second"].set()
            assert (await second).response == b"second"
            assert not first.done()
            gate["first"].set()
            assert (await first).response == b"first"

    run(scenario())


def test_a_reply_that_comes_too_late_is_dropped(run: Run[None]) -> None:
    async def scenario() -> None:
        callers: list[Caller] = []
        async with (
            serving({Generate: lambda _, caller: callers.append(caller), Ping: ping}) as server,
            RpcClient(server.endpoint) as client,
        ):
            await client.call(Ping(), Pong, timeout_s=5)  # the short time is for the reply, not for the connection too
            with pytest.raises(CallTimeout, match=r"Generate to tcp.*: no reply in 0\.05 s"):
                await client.call(generate(), Ok, timeout_s=0.05)
            await until(lambda: callers)
            callers[0].reply(Ok())
            assert await client.call(Ping(), Pong, timeout_s=5) == PONG
            assert client.late_replies == 1

    run(scenario())


def test_a_reply_of_another_class_is_a_wire_error(run: Run[None]) -> None:
    async def scenario() -> None:
        async with serving({Ping: lambda _, __: Ok()}) as server, RpcClient(server.endpoint) as client:
            with pytest.raises(WireError, match="answered Ok to Ping"):
                await client.call(Ping(), Pong, timeout_s=5)

    run(scenario())


def test_one_way_messages_keep_their_order(run: Run[None]) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        async with (
            serving({Cancel: lambda cancel, _: seen.append(cancel.target), Ping: ping}) as server,
            RpcClient(server.endpoint) as client,
        ):
            await client.call(Ping(), Pong, timeout_s=5)
            for number in range(2000):
                client.post(Cancel(target=str(number)))
            await client.call(Ping(), Pong, timeout_s=5)
            assert seen == [str(number) for number in range(2000)]

    run(scenario())


# --- one call's failure is that call's answer -------------------------------------------------------------------------


def test_a_handler_that_crashes_fails_its_call_only(run: Run[None]) -> None:
    def crash(_: ModelsQuery, __: Caller) -> None:
        raise KeyError("plain")

    async def crash_later(_: Generate, __: Caller) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        handlers: dict[type, Any] = {ModelsQuery: crash, Generate: crash_later, Ping: ping}
        async with serving(handlers) as server, RpcClient(server.endpoint) as client:
            for body, error in ((ModelsQuery(), "KeyError"), (generate(), "ZeroDivisionError")):
                with pytest.raises(RemoteFailure, match=error) as caught:
                    await client.call(body, Ok, timeout_s=5)
                assert (caught.value.code, caught.value.retryable) == ("internal_error", False)
            assert await client.call(Ping(), Pong, timeout_s=5) == PONG

    run(scenario())


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_our_errors_travel_with_what_they_know(run: Run[None], kind: str) -> None:
    errors = [
        InvalidRequest("no", param="top_p"),
        Rejected("full", unavailable=True, retry_after_s=2.5),
    ]

    def refuse(_: Generate, __: Caller) -> None:
        raise errors.pop(0)

    async def refuse_later(request: Generate, caller: Caller) -> None:
        refuse(request, caller)

    async def scenario() -> None:
        handler = refuse if kind == "plain" else refuse_later
        async with serving({Generate: handler}) as server, RpcClient(server.endpoint) as client:
            failures = []
            for _ in range(2):
                with pytest.raises(RemoteFailure) as caught:
                    await client.call(generate(), Ok, timeout_s=5)
                failures.append(caught.value.failure)
            assert failures == [
                Failure(code="invalid_request", message="no", path="top_p"),
                Failure(code="rejected", message="full", retryable=True, retry_after_s=2.5, unavailable=True),
            ]

    run(scenario())


@pytest.mark.parametrize("reply", [object(), Failure(code="c", message="m", retry_after_s=float("inf"))], ids=type)
def test_a_reply_that_cannot_travel_is_told(run: Run[None], reply: object) -> None:
    async def later(_: Generate, __: Caller) -> object:
        return reply

    async def scenario() -> None:
        handlers: dict[type, Any] = {ModelsQuery: lambda _, __: reply, Generate: later, Ping: ping}
        async with serving(handlers) as server, RpcClient(server.endpoint) as client:
            for body in (ModelsQuery(), generate()):
                with pytest.raises(RemoteFailure) as caught:
                    await client.call(body, Ok, timeout_s=5)
                assert caught.value.code == "internal_error"
            assert await client.call(Ping(), Pong, timeout_s=5) == PONG

    run(scenario())


def test_a_one_way_message_that_fails_disturbs_nobody(run: Run[None]) -> None:
    async def refuse(_: Generate, __: Caller) -> None:
        raise InvalidRequest("nobody waits for this")

    async def scenario() -> None:
        async with serving({Generate: refuse, Ping: ping}) as server, RpcClient(server.endpoint) as client:
            await client.send(generate(), timeout_s=5)
            await client.call(Ping(), Pong, timeout_s=5)
            assert client.late_replies == 0

    run(scenario())


def test_the_deadline_is_the_callers_and_a_handlers_own_timeout_is_not_it(run: Run[None]) -> None:
    stalled = Stalled()

    async def times_out(_: ModelsQuery, __: Caller) -> None:
        raise TimeoutError("something inside")

    async def scenario() -> None:
        async with (
            serving({Generate: stalled.handle, ModelsQuery: times_out}) as server,
            RawPeer(server.endpoint) as peer,
        ):
            await peer.send_message(generate("a"), Envelope(id=MessageId("1"), deadline_s=0.02))
            envelope, failure = await peer.receive()
            assert (envelope.re, failure.code, failure.retryable) == ("1", "call_timeout", True)
            assert stalled.cancelled == ["a"]
            await peer.send_message(ModelsQuery(), Envelope(id=MessageId("2"), deadline_s=5))
            _, failure = await peer.receive()
            assert failure.code == "internal_error"

    run(scenario())


def test_too_many_calls_at_a_time_are_refused(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MAX_RUNNING_CALLS", 2)
    stalled = Stalled()

    async def scenario() -> None:
        async with serving({Generate: stalled.handle, Ping: ping}) as server, RpcClient(server.endpoint) as client:
            await client.send(generate("one-way"), timeout_s=5)
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(client.call(generate("call"), Ok, timeout_s=10))
                await until(lambda: len(stalled.started) == 2)
                with pytest.raises(RemoteFailure) as caught:
                    await client.call(generate("third"), Ok, timeout_s=5)
                assert (caught.value.code, caught.value.retryable) == ("overloaded", True)
                assert await client.call(Ping(), Pong, timeout_s=5) == PONG, "plain handlers need no room"
                running.cancel()

    run(scenario())


# --- strangers --------------------------------------------------------------------------------------------------------


HEADER = b'{"id": "7", "body": {}}'
BAD_MESSAGES = {
    "another version": ([b"mooncake/999", b"control.ping", HEADER], "version_mismatch", "7"),
    "unknown kind": ([VERSION_FRAME, b"control.nonsense", HEADER], "unknown_kind", "7"),
    "kind without a handler": ([VERSION_FRAME, b"client.models_query", HEADER], "unknown_kind", "7"),
    "one frame": ([b"GET / HTTP/1.1"], "malformed_message", ""),
    "header that is no JSON": ([VERSION_FRAME, b"control.ping", b"{"], "malformed_message", ""),
    "body that is none": ([VERSION_FRAME, b"control.ping", b'{"id": "7", "body": 3}'], "malformed_message", "7"),
    "too many frames": ([VERSION_FRAME, b"control.ping", HEADER] + [b""] * 20, "malformed_message", "7"),
}


@pytest.mark.parametrize(("frames", "code", "re"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_message_that_breaks_the_contract_is_answered(
    run: Run[None], frames: list[bytes], code: str, re: str
) -> None:
    async def scenario() -> None:
        async with serving({Ping: ping}) as server, RawPeer(server.endpoint) as peer:
            await peer.send(*frames)
            envelope, failure = await peer.receive()
            assert (envelope.re, failure.code) == (re, code)
            await peer.send_message(Ping(), Envelope(id=MessageId("8")))
            assert await peer.receive() == (Envelope(re=MessageId("8")), PONG)
            assert server.refused_messages == 1

    run(scenario())


def test_a_peer_that_sends_nothing_but_nonsense_does_not_fill_the_log(run: Run[None]) -> None:
    async def scenario() -> None:
        async with serving({Ping: ping}) as server, RawPeer(server.endpoint) as peer:
            with structlog.testing.capture_logs() as lines:
                for number in range(50):
                    await peer.send(VERSION_FRAME, b"control.no_such", b'{"id": "%d", "body": {}}' % number)
                    await peer.receive()
            assert server.refused_messages == 50
            assert 1 <= len([line for line in lines if line["event"] == "message_refused"]) <= 10

    run(scenario())


def test_a_refused_reply_is_not_answered(run: Run[None]) -> None:
    """Or two servers that refuse each other's refusals would never stop."""

    async def scenario() -> None:
        async with serving({Ping: ping}) as server, RawPeer(server.endpoint) as peer:
            await peer.send_message(Failure(code="c", message="m"), Envelope(re=MessageId("1")))
            await peer.send_message(Ping(), Envelope(id=MessageId("2")))
            assert await peer.receive() == (Envelope(re=MessageId("2")), PONG)
            assert server.refused_messages == 1

    run(scenario())


def test_an_id_that_is_in_use_is_refused_and_its_first_call_can_still_be_cancelled(run: Run[None]) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        async with serving({Generate: stalled.handle}) as server, RawPeer(server.endpoint) as peer:
            for name in ("first", "second"):
                await peer.send_message(generate(name), Envelope(id=MessageId("1")))
            _, failure = await peer.receive()
            assert (failure.code, failure.path) == ("malformed_message", "header.id")
            assert stalled.started == ["first"]
            await peer.send_message(CancelCall(target=MessageId("1")), Envelope())
            await until(lambda: stalled.cancelled == ["first"])
            await asyncio.sleep(0)  # the id is free when the ended task's callbacks have run: in the loop's next turn
            await peer.send_message(generate("third"), Envelope(id=MessageId("1")))
            await until(lambda: stalled.started == ["first", "third"])

    run(scenario())


def test_nobody_cancels_anothers_call(run: Run[None]) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        async with (
            serving({Generate: stalled.handle, Ping: ping}) as server,
            RawPeer(server.endpoint) as owner,
            RawPeer(server.endpoint) as stranger,
        ):
            await owner.send_message(generate("mine"), Envelope(id=MessageId("1")))
            await until(lambda: stalled.started)
            await stranger.send_message(CancelCall(target=MessageId("1")), Envelope())
            await stranger.send_message(Ping(), Envelope(id=MessageId("2")))
            await stranger.receive()
            assert stalled.cancelled == []

    run(scenario())


# --- who stops waiting ------------------------------------------------------------------------------------------------


def test_a_caller_that_is_cancelled_stops_the_handler(run: Run[None]) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        async with serving({Generate: stalled.handle}) as server, RpcClient(server.endpoint) as client:
            async with asyncio.TaskGroup() as tasks:
                calling = tasks.create_task(client.call(generate("a"), Ok, timeout_s=10))
                await until(lambda: stalled.started)
                calling.cancel()
            await until(lambda: stalled.cancelled == ["a"])

    run(scenario())


def test_a_caller_whose_time_is_over_stops_the_handler(run: Run[None]) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        async with serving({Generate: stalled.handle, Ping: ping}) as server, RpcClient(server.endpoint) as client:
            await client.call(Ping(), Pong, timeout_s=5)
            while not stalled.started:  # on a machine that stands still a call may be over before it begins there
                with pytest.raises(CallTimeout):
                    await client.call(generate("a"), Ok, timeout_s=0.2)
            await until(lambda: stalled.cancelled == stalled.started)

    run(scenario())


def test_a_call_that_is_cancelled_before_its_turn_never_begins(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    stalled, router = Stalled(), ScriptedRouter()
    monkeypatch.setattr(endpoint, "router", router)

    async def scenario() -> None:
        async with serving({Generate: stalled.handle}):
            for name in ("left", "waits"):
                router.deliver(generate(name), Envelope(id=MessageId(name)))
            router.deliver(CancelCall(target=MessageId("left")), Envelope())
            await until(lambda: stalled.started, "the other call")
        assert stalled.started == ["waits"]
        assert router.sent == []

    run(scenario())


class Counting:
    """A stream handler that counts for as long as it may, however slowly its messages leave."""

    def __init__(self, last: int | None = None) -> None:
        self.last = last
        self.sent = 0
        self.cancelled = False

    async def handle(self, _: Generate, caller: Caller) -> GenerationEnd:
        try:
            while self.last is None or self.sent < self.last:
                await reply_when_there_is_room(caller, GenerationDelta(chunk=str(self.sent).encode()))
                self.sent += 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return GenerationEnd(response=b"end")


def test_a_stream_is_read_in_order_to_its_end(run: Run[None]) -> None:
    counting = Counting(last=100)

    async def scenario() -> None:
        async with serving({Generate: counting.handle, Ping: ping}) as server, RpcClient(server.endpoint) as client:
            async with client.stream(generate(), timeout_s=10) as replies:
                deltas = [(await replies.next(timeout_s=5)).chunk for _ in range(100)]
                assert (await replies.next(timeout_s=5)).response == b"end"
                replies.ended = True
            assert deltas == [str(number).encode() for number in range(100)]
            await client.call(Ping(), Pong, timeout_s=5)
            assert (counting.cancelled, client.late_replies) == (False, 0)

    run(scenario())


def test_leaving_a_stream_stops_its_source(run: Run[None]) -> None:
    counting = Counting()

    async def scenario() -> None:
        async with serving({Generate: counting.handle}) as server, RpcClient(server.endpoint) as client:
            async with client.stream(generate(), timeout_s=10) as replies:
                await replies.next(timeout_s=5)
            await until(lambda: counting.cancelled)

    run(scenario())


def test_a_slow_reader_costs_no_memory_and_stops_its_source(run: Run[None]) -> None:
    counting = Counting()

    async def scenario() -> None:
        async with (
            serving({Generate: counting.handle}) as server,
            RpcClient(server.endpoint) as client,
            client.stream(generate(), timeout_s=10, max_items=8) as replies,
        ):
            await until(lambda: counting.cancelled, "the source to stop while nobody reads")
            with pytest.raises(SlowReader, match="8 replies lay unread"):
                await replies.next(timeout_s=5)

    run(scenario())


def test_silence_in_a_stream_is_a_timeout_and_the_stream_goes_on(run: Run[None]) -> None:
    async def scenario() -> None:
        callers: list[Caller] = []
        async with (
            serving({Generate: lambda _, caller: callers.append(caller)}) as server,
            RpcClient(server.endpoint) as client,
            client.stream(generate(), timeout_s=10) as replies,
        ):
            with pytest.raises(CallTimeout):
                await replies.next(timeout_s=0.02)
            await until(lambda: callers)
            callers[0].reply(Ok())
            assert await replies.next(timeout_s=5) == Ok()

    run(scenario())


# --- peers that go ----------------------------------------------------------------------------------------------------


def test_a_lost_connection_fails_everything_open_at_once(run: Run[None]) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        lost = asyncio.Event()
        async with serving({Generate: stalled.handle}) as server:
            client = RpcClient(server.endpoint, on_lost=lost.set)
            async with (
                client,
                client.stream(generate("stream"), timeout_s=600) as replies,
                asyncio.TaskGroup() as tasks,
            ):
                call = tasks.create_task(_fails(client.call(generate("call"), Ok, timeout_s=600)))
                await until(lambda: len(stalled.started) == 2)
                await server.close()
                assert "the connection was lost" in await soon(call)
                with pytest.raises(PeerUnreachable):
                    await replies.next(timeout_s=600)
                await soon(lost.wait())
                assert not client.is_connected

    run(scenario())


async def _fails(call: Any) -> str:
    with pytest.raises(PeerUnreachable) as caught:
        await call
    return str(caught.value)


def _noting(seen: list[Cancel]) -> Handler:
    def note(cancel: Cancel, _: Caller) -> None:
        seen.append(cancel)

    return note


def test_the_next_process_on_the_address_is_reached_and_gets_no_old_messages(run: Run[None], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/peer"

    async def scenario() -> None:
        async with RpcClient(address) as client:
            with pytest.raises(PeerUnreachable):
                client.post(Cancel(target="nobody there"))
            with pytest.raises(PeerUnreachable):
                await client.call(generate(), Ok, timeout_s=0.05)
            for _ in range(2):
                seen: list[Cancel] = []
                async with serving({Cancel: _noting(seen), Ping: ping}, address):
                    await client.call(Ping(), Pong, timeout_s=5)
                    client.post(Cancel(target="now"))
                    await client.call(Ping(), Pong, timeout_s=5)
                    assert seen == [Cancel(target="now")]
                await until(lambda: not client.is_connected)

    run(scenario())


def test_a_reply_to_a_peer_that_went_is_an_error(run: Run[None]) -> None:
    async def scenario() -> None:
        callers: list[Caller] = []
        async with serving({Generate: lambda _, caller: callers.append(caller)}) as server:
            async with RawPeer(server.endpoint) as peer:
                await peer.send_message(generate(), Envelope(id=MessageId("1")))
                await until(lambda: callers)

            def is_gone() -> bool:
                try:
                    callers[0].reply(Ok())
                except PeerUnreachable:
                    return True
                return False

            await until(is_gone)

    run(scenario())


def test_closing_a_client_fails_its_calls_sent_or_not(run: Run[None], tmp_path: Path) -> None:
    stalled = Stalled()

    async def scenario() -> None:
        async with serving({Generate: stalled.handle}) as server, asyncio.TaskGroup() as tasks:
            sent, unsent = RpcClient(server.endpoint), RpcClient(f"ipc://{tmp_path}/nobody")
            calls = [tasks.create_task(_fails(client.call(generate(), Ok, timeout_s=600))) for client in (sent, unsent)]
            await until(lambda: stalled.started)
            sent.close()
            unsent.close()
            unsent.close()
            assert "closed" in await soon(calls[0])
            assert "closed" in await soon(calls[1])

    run(scenario())


def test_closing_a_server_ends_its_handlers_and_refuses_what_comes_meanwhile(run: Run[None]) -> None:
    may_end = asyncio.Event()
    started: list[str] = []
    ending: list[str] = []

    async def tidies_up(request: Generate, _: Caller) -> None:
        started.append(request.request.decode())
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ending.append(request.request.decode())
            await may_end.wait()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            server = RpcServer("tcp://127.0.0.1:0", {Generate: tidies_up, Ping: ping}, tasks)
            async with RpcClient(server.endpoint) as client:
                await client.send(generate("one-way"), timeout_s=5)
                call = tasks.create_task(_fails(client.call(generate("call"), Ok, timeout_s=600)))
                await until(lambda: len(started) == 2)
                closing = tasks.create_task(server.close())
                await until(lambda: len(ending) == 2)
                for body in (generate("late"), Ping()):
                    with pytest.raises(RemoteFailure) as caught:
                        await client.call(body, Ok, timeout_s=5)
                    assert (caught.value.code, caught.value.retryable) == ("draining", True)
                may_end.set()
                await soon(closing)
                await soon(call)
        assert started == ["one-way", "call"]

    run(scenario())


# --- full queues ------------------------------------------------------------------------------------------------------


def test_a_peer_that_does_not_read_bounds_what_is_sent_to_it(run: Run[None]) -> None:
    body = Cancel(target="x" * 4000)

    async def scenario() -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as stalled:
            stalled.linger, stalled.rcvhwm = 0, 100
            stalled.bind("tcp://127.0.0.1:0")
            async with RpcClient(stalled.getsockopt_string(zmq.LAST_ENDPOINT)) as client:
                await client.send(body, timeout_s=5)
                sent = 0
                with pytest.raises(PeerUnreachable, match="queue is full"):  # noqa: PT012
                    while sent < 100_000:
                        client.post(body)
                        sent += 1
                        if sent % 100 == 0:
                            await asyncio.sleep(0.001)  # the I/O thread fills the kernel's buffers first
                with pytest.raises(PeerUnreachable):  # noqa: PT012  it takes more until the kernel's buffers are full too
                    while sent < 100_000:
                        await client.send(body, timeout_s=0.02)
                        sent += 1
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(client.send(body, timeout_s=5))
                    while not sending.done():
                        while stalled.poll(0):
                            stalled.recv_multipart()
                        await asyncio.sleep(0.001)

    run(scenario())


def test_a_client_that_does_not_read_bounds_what_a_server_keeps_for_it(run: Run[None]) -> None:
    async def scenario() -> None:
        callers: list[Caller] = []
        async with serving({Generate: lambda _, caller: callers.append(caller), Ping: ping}) as server:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stalled:
                stalled.linger, stalled.rcvhwm = 0, 100
                stalled.connect(server.endpoint)
                stalled.send_multipart(codec.encode(generate(), Envelope(id=MessageId("1"))))
                await until(lambda: callers)
                delta = GenerationDelta(chunk=bytes(4000))
                with pytest.raises(PeerUnreachable, match="queue is full"):  # noqa: PT012
                    for sent in range(100_000):
                        callers[0].reply(delta)
                        if sent % 100 == 0:
                            await asyncio.sleep(0.001)
                async with RpcClient(server.endpoint) as other:
                    assert await other.call(Ping(), Pong, timeout_s=5) == PONG, "others are served"

    run(scenario())
