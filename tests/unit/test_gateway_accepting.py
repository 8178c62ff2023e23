"""The HTTP server's door: how connections come in, and how it is known that a client has left."""

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
import uvicorn

from mooncake_mesh.errors import MeshError
from mooncake_mesh.gateway import accepting
from mooncake_mesh.gateway.accepting import SEND_BUFFER_BYTES, Acceptor, HttpServer, has_left, listen
from tests.unit.gateway_doubles import Gateway, says
from tests.unit.mesh_doubles import Run, on_both_loops, until

pytestmark = on_both_loops

BODY = b'{"model": "fake", "prompt": "hi", "max_tokens": 1}'
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)


class Noted(asyncio.Protocol):
    """A connection that is only looked at."""

    made: list["Noted"]

    def __init__(self) -> None:
        self.transport: Any = None
        self.peer: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.peer = transport, transport.get_extra_info("peername")
        self.made.append(self)


@pytest.fixture(autouse=True)
def made() -> list[Noted]:
    Noted.made = []
    return Noted.made


@asynccontextmanager
async def accepting_on(listener: socket.socket) -> AsyncIterator[tuple[str, int]]:
    """An Acceptor of Noted connections; where it listens."""
    async with asyncio.TaskGroup() as tasks:
        acceptor = Acceptor([listener], Noted, tasks)
        try:
            yield listener.getsockname()
        finally:
            acceptor.close()
            await acceptor.wait_closed()
            for connection in Noted.made:
                connection.transport.abort()


async def one_listener() -> socket.socket:
    (listener,) = await listen("127.0.0.1", 0)
    return listener


def client(address: tuple[str, int]) -> "closing[socket.socket]":
    return closing(socket.create_connection(address))


# --- taking in --------------------------------------------------------------------------------------------------------


def test_all_that_wait_are_taken_in_at_once(run: Run[None], made: list[Noted]) -> None:
    async def scenario() -> None:
        listener = await one_listener()
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(100)]
        async with accepting_on(listener):
            turns = 0
            while len(made) < len(waiting):
                await asyncio.sleep(0)
                turns += 1
            assert turns < 20
        for connection in waiting:
            connection.close()

    run(scenario())


def test_others_have_their_turn_while_many_come(
    run: Run[None], made: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PER_TURN", 3)

    async def scenario() -> None:
        listener = await one_listener()
        waiting = [socket.create_connection(listener.getsockname()) for _ in range(8)]
        seen = []
        async with accepting_on(listener):
            while len(made) < len(waiting):
                await asyncio.sleep(0)
                seen.append(len(made))
        assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) <= 3
        for connection in waiting:
            connection.close()

    run(scenario())


class FullOnce(socket.socket):
    """A listener whose process has no descriptor left, the first time."""

    is_full = True

    def accept(self) -> tuple[socket.socket, Any]:
        if FullOnce.is_full:
            FullOnce.is_full = False
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_descriptor_left_clients_wait_until_there_is_one(
    run: Run[None], made: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.01)

    async def scenario() -> None:
        FullOnce.is_full = True
        plain = await one_listener()
        listener = FullOnce(plain.family, plain.type, plain.proto, plain.detach())
        listener.setblocking(False)
        async with accepting_on(listener) as address:
            with client(address):
                await until(lambda: made, "the connection")
        assert not FullOnce.is_full

    run(scenario())


def test_closing_while_there_is_no_descriptor_is_the_end(
    run: Run[None], made: list[Noted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PAUSE_S", 600.0)

    async def scenario() -> None:
        FullOnce.is_full = True
        plain = await one_listener()
        listener = FullOnce(plain.family, plain.type, plain.proto, plain.detach())
        listener.setblocking(False)
        async with accepting_on(listener) as address:
            with client(address):
                await until(lambda: not FullOnce.is_full, "the refusal")
        assert made == []

    run(scenario())


def test_a_connection_that_broke_before_it_was_taken_in_harms_nobody(run: Run[None], made: list[Noted]) -> None:
    async def scenario() -> None:
        listener = await one_listener()
        with client(listener.getsockname()) as broken:
            reset_on_close(broken)
        async with accepting_on(listener) as address:
            with client(address) as good:
                mine = good.getsockname()
                await until(lambda: any(connection.peer == mine for connection in made), "the other connection")

    run(scenario())


def reset_on_close(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_port_that_is_taken_is_named(run: Run[None]) -> None:
    async def scenario() -> None:
        with closing(await one_listener()) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(MeshError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
                await listen("127.0.0.1", port)

    run(scenario())


def test_a_name_of_several_addresses_has_one_port(run: Run[None]) -> None:
    async def scenario() -> None:
        listeners = await listen("localhost", 0)
        try:
            assert len({listener.getsockname()[1] for listener in listeners}) == 1
            assert {listener.getsockname()[0] for listener in listeners} <= {"127.0.0.1", "::1"}
        finally:
            for listener in listeners:
                listener.close()

    run(scenario())


def test_the_kernel_keeps_little_of_what_a_client_does_not_read(run: Run[None], made: list[Noted]) -> None:
    async def scenario() -> None:
        async with accepting_on(await one_listener()) as address:
            with socket.socket() as idle:
                idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                idle.connect(address)
                await until(lambda: made, "the connection")
                transport = made[0].transport
                written = 0
                while transport.get_write_buffer_size() == 0 and written < 64 * SEND_BUFFER_BYTES:
                    transport.write(bytes(16 << 10))
                    written += 16 << 10
                    await asyncio.sleep(0)
                assert written <= 4 * SEND_BUFFER_BYTES

    run(scenario())


# --- who has left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["closes", "resets"])
def test_who_has_left_is_known_before_what_they_sent_is_read(run: Run[None], made: list[Noted], how: str) -> None:
    async def scenario() -> None:
        async with accepting_on(await one_listener()) as address:
            with client(address) as leaver:
                await until(lambda: made, "the connection")
                (connection,) = made
                connection.transport.pause_reading()
                leaver.sendall(b"something")
                assert not has_left(connection.transport)
                if how == "resets":
                    reset_on_close(leaver)
            await until(lambda: has_left(connection.transport), "the news")

    run(scenario())


def test_a_connection_that_is_closed_here_has_nobody_either(run: Run[None], made: list[Noted]) -> None:
    async def scenario() -> None:
        async with accepting_on(await one_listener()) as address:
            with client(address):
                await until(lambda: made, "the connection")
                made[0].transport.close()
                assert has_left(made[0].transport)

    run(scenario())


# --- the server -------------------------------------------------------------------------------------------------------


async def serve(gateway: Gateway, act: Callable[[tuple[str, int]], Awaitable[None]]) -> None:
    """Have *act* talk to the gateway's HTTP server."""
    listeners = await listen("127.0.0.1", 0)
    async with asyncio.TaskGroup() as tasks:
        config = uvicorn.Config(gateway.app, log_config=None, access_log=False, lifespan="off", http="httptools")
        server = HttpServer(config, listeners, tasks)
        serving = tasks.create_task(server.serve())
        await act(("127.0.0.1", server.port))
        server.should_exit = True
        await serving


async def answer_of(address: tuple[str, int], request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    status = await reader.readline()
    writer.close()
    return status


@pytest.mark.parametrize("how", ["close", "reset"])
def test_requests_of_clients_that_left_reach_nobody(run: Run[None], how: str) -> None:
    gateway = Gateway(says("ok"))

    async def act(address: tuple[str, int]) -> None:
        for _ in range(20):
            with client(address) as leaver:
                leaver.sendall(REQUEST)
                if how == "reset":
                    reset_on_close(leaver)
        assert (await answer_of(address, REQUEST)).startswith(b"HTTP/1.1 200")

    run(serve(gateway, act))
    assert len(gateway.mesh.requests) == 1  # that of the client who stayed
    assert gateway.outcome("completion", "ok") == 1
    assert gateway.outcome("completion", "cancelled") == 0


def test_who_says_no_more_and_listens_is_answered_where_that_takes_no_time(run: Run[None]) -> None:
    async def act(address: tuple[str, int]) -> None:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
        writer.write_eof()
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()

    run(serve(Gateway(says("")), act))


def test_the_server_lets_go_of_its_port(run: Run[None]) -> None:
    addresses = []

    async def act(address: tuple[str, int]) -> None:
        addresses.append(address)

    async def scenario() -> None:
        await serve(Gateway(says("")), act)
        for listener in await listen(*addresses[0]):
            listener.close()

    run(scenario())
