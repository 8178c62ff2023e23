"""Sockets with keys: who is let in, who is not, what either side hears of it, and that a later change counts."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import uvloop

from mooncake_mesh.errors import KeyRefused, MeshError
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.connecting import subscriber
from mooncake_mesh.mesh.curve import Audience, MeshKeys, using
from mooncake_mesh.mesh.endpoint import Publisher
from mooncake_mesh.mesh.gatekeeper import Gatekeeper
from mooncake_mesh.mesh.rpc import RpcClient, RpcServer
from mooncake_proto.control import Ok, Ping
from tests.unit.mesh_doubles import ANY_PORT, RawPeer, soon, until

NO_TIME_S = 0.3
"""For what must not happen: an answer over loopback takes a millisecond."""


def run(scenario: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario)


@pytest.fixture
def keys(tmp_path: Path) -> MeshKeys:
    return key_folder.create(tmp_path / "mesh", "first")


@asynccontextmanager
async def guarded(keys: MeshKeys, audience: Audience = Audience.MEMBERS) -> AsyncIterator[RpcServer]:
    """A server that answers Ping, in a process that has *keys*."""
    with using(keys):
        gatekeeper = Gatekeeper(keys)
        async with asyncio.TaskGroup() as tasks:
            server = RpcServer(ANY_PORT, {Ping: lambda _, __: Ok()}, tasks, audience=audience)
            try:
                yield server
            finally:
                await server.close()
                gatekeeper.close()


async def ping(endpoint: str, keys: MeshKeys | None, *, timeout_s: float = 5.0) -> None:
    async with RpcClient(endpoint, keys=keys) as client:
        await client.call(Ping(), Ok, timeout_s=timeout_s)


def test_a_member_is_let_in(keys: MeshKeys) -> None:
    async def scenario() -> None:
        async with guarded(keys) as server:
            await ping(server.endpoint, keys)

    run(scenario())


def test_a_key_that_is_not_on_the_list_fails_the_call_at_once_and_is_logged(keys: MeshKeys, tmp_path: Path) -> None:
    stranger = key_folder.create(tmp_path / "other", "stranger").own

    async def scenario() -> None:
        with structlog.testing.capture_logs() as logs:
            async with guarded(keys) as server:
                with pytest.raises(KeyRefused, match="not on its allow-list"):
                    await ping(server.endpoint, replace(keys, own=stranger), timeout_s=30)
        (line,) = [line for line in logs if line["event"] == "key_refused"]
        assert line["key"] == stranger.public.decode()
        assert line["address"] == "127.0.0.1"

    run(scenario())


def test_the_wrong_server_key_fails_the_call_and_says_so(keys: MeshKeys, tmp_path: Path) -> None:
    other = key_folder.create(tmp_path / "other", "stranger")

    async def scenario() -> None:
        with structlog.testing.capture_logs() as logs:
            async with guarded(keys) as server:
                with pytest.raises(KeyRefused, match=r"server\.key"):
                    await ping(server.endpoint, replace(keys, server_public=other.server_public), timeout_s=30)
                await until(lambda: any(line["event"] == "handshake_refused" for line in logs))

    run(scenario())


def test_a_client_without_keys_hears_that_keys_are_missing(keys: MeshKeys) -> None:
    async def scenario() -> None:
        async with guarded(keys) as server:
            with using(None), pytest.raises(KeyRefused, match="uses keys"):
                await ping(server.endpoint, None, timeout_s=30)
            async with RawPeer(server.endpoint) as peer:
                await peer.send(b"anything")
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(NO_TIME_S):
                        await peer.receive()

    run(scenario())


def test_a_client_with_keys_hears_that_the_server_has_none(keys: MeshKeys) -> None:
    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            server = RpcServer(ANY_PORT, {Ping: lambda _, __: Ok()}, tasks)
            with pytest.raises(KeyRefused, match="uses keys"):
                await ping(server.endpoint, keys, timeout_s=30)
            await server.close()

    run(scenario())


def test_a_client_s_key_opens_the_door_for_clients_only(keys: MeshKeys, tmp_path: Path) -> None:
    client = key_folder.issue(keys.folder, "someone", Audience.CLIENTS, tmp_path / "someone")

    async def scenario() -> None:
        async with guarded(keys, Audience.CLIENTS) as door:
            await ping(door.endpoint, client)
            await ping(door.endpoint, keys)
        async with guarded(keys, Audience.MEMBERS) as inside:
            with pytest.raises(KeyRefused):
                await ping(inside.endpoint, client, timeout_s=30)

    run(scenario())


def test_the_allow_list_counts_as_it_is_now(keys: MeshKeys, tmp_path: Path) -> None:
    """A client that was refused comes in once it is allowed, with the very socket that was refused."""
    member = key_folder.issue(keys.folder, "second", Audience.MEMBERS, tmp_path / "second")
    key_folder.revoke(keys.folder, "second")

    async def scenario() -> None:
        async with guarded(keys) as server, RpcClient(server.endpoint, keys=member) as client:
            with pytest.raises(KeyRefused):
                await client.call(Ping(), Ok, timeout_s=30)
            key_folder.allow(keys.folder, "second", member.own.public.decode(), Audience.MEMBERS)
            while True:
                try:
                    await client.call(Ping(), Ok, timeout_s=5)
                except KeyRefused:
                    await asyncio.sleep(0.01)
                else:
                    break

    run(asyncio.wait_for(scenario(), 20))


def test_publications_reach_members_only(keys: MeshKeys) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []
        overheard: list[bytes] = []
        with using(keys):
            gatekeeper = Gatekeeper(keys)
            publisher = Publisher(ANY_PORT)
            member = subscriber(publisher.endpoint, lambda frames: heard.append(frames[0]))
        with using(None):
            stranger = subscriber(publisher.endpoint, lambda frames: overheard.append(frames[0]))
        async with asyncio.timeout(10):
            while not heard:
                publisher.publish([b"state"])
                await asyncio.sleep(0.01)
        assert not overheard
        for one in (member, stranger, publisher, gatekeeper):
            one.close()

    run(scenario())


def test_without_a_gatekeeper_nobody_comes_in(keys: MeshKeys) -> None:
    async def scenario() -> None:
        with using(keys):
            async with asyncio.TaskGroup() as tasks:
                server = RpcServer(ANY_PORT, {Ping: lambda _, __: Ok()}, tasks)
                with pytest.raises(KeyRefused):
                    await ping(server.endpoint, keys, timeout_s=30)
                await server.close()

    run(scenario())


def test_ipc_needs_no_keys(keys: MeshKeys, tmp_path: Path) -> None:
    async def scenario() -> None:
        with using(keys):
            async with asyncio.TaskGroup() as tasks:
                server = RpcServer(f"ipc://{tmp_path}/socket", {Ping: lambda _, __: Ok()}, tasks)
                with using(None):
                    await soon(ping(server.endpoint, None))
                await server.close()

    run(scenario())


def test_a_client_s_keys_bind_nothing(keys: MeshKeys) -> None:
    async def scenario() -> None:
        with using(replace(keys, server=None)), pytest.raises(MeshError, match="no server keys"):
            Publisher(ANY_PORT)

    run(scenario())
