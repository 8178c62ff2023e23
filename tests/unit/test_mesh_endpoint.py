"""Channels: no message is lost, whatever the event loop; closing hurts nobody else."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import zmq

from mooncake_mesh.errors import MeshError, PeerUnreachable
from mooncake_mesh.mesh.connecting import Dealer, Link, subscriber
from mooncake_mesh.mesh.endpoint import Channel, Publisher, router
from tests.unit.mesh_doubles import ANY_PORT, Run, on_both_loops, soon, until

pytestmark = on_both_loops

N_MESSAGES = 10_000


def test_ten_thousand_messages_each_way_at_once_arrive_in_order(run: Run[None]) -> None:
    """The descriptor is edge-triggered: each send may swallow the edge of a message that arrives meanwhile."""

    async def scenario() -> None:
        at_server: list[bytes] = []
        at_client: list[bytes] = []
        peer: list[bytes] = []

        def serve(frames: list[bytes]) -> None:
            peer[:] = frames[:1]
            at_server.append(frames[1])

        server = router(ANY_PORT, serve)
        client = Dealer(server.endpoint, lambda frames: at_client.append(frames[0]), lambda _: None)

        async def send_all(channel: Channel, *to: bytes) -> None:
            for number in range(1, N_MESSAGES):
                await channel.send([*to, b"%d" % number], timeout_s=10)
                if number % 97 == 0:
                    await asyncio.sleep(0)  # bursts of this, pauses of that: both readers work meanwhile

        await client.send([b"0"], timeout_s=10)
        await until(lambda: peer)
        server.send_now([*peer, b"0"])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send_all(client))
            tasks.create_task(send_all(server, *peer))
        await until(lambda: len(at_server) == len(at_client) == N_MESSAGES)
        assert at_server == at_client == [b"%d" % number for number in range(N_MESSAGES)]
        client.close()
        server.close()

    run(scenario())


def test_one_message_at_a_time_is_never_forgotten(run: Run[None]) -> None:
    """Ping-pong: a lost edge would leave both sides waiting for ever."""

    async def scenario() -> None:
        done = asyncio.Event()

        def serve(frames: list[bytes]) -> None:
            server.send_now(frames)

        def bounce(frames: list[bytes]) -> None:
            count = int(frames[0])
            if count == 3000:
                done.set()
            else:
                client.send_now([b"%d" % (count + 1)])

        server = router(ANY_PORT, serve)
        client = Dealer(server.endpoint, bounce, lambda _: None)
        await client.send([b"0"], timeout_s=10)
        await soon(done.wait())
        client.close()
        server.close()

    run(scenario())


def test_a_reader_that_raises_goes_on_reading(run: Run[None]) -> None:
    async def scenario() -> None:
        seen: list[bytes] = []
        problems: list[Any] = []

        def read(frames: list[bytes]) -> None:
            seen.append(frames[1])
            if frames[1] == b"bad":
                raise ValueError("a bug")

        server = router(ANY_PORT, read)
        client = Dealer(server.endpoint, lambda _: None, lambda _: None)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: problems.append(context["exception"]))
        await client.send([b"bad"], timeout_s=10)
        client.send_now([b"good"])
        await until(lambda: seen == [b"bad", b"good"])
        assert [str(problem) for problem in problems] == ["a bug"]
        client.close()
        server.close()

    run(scenario())


def test_links_go_up_and_down(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        links: list[Link] = []
        client = Dealer(f"ipc://{tmp_path}/a", lambda _: None, links.append)
        for _ in range(2):
            links.clear()
            server = router(f"ipc://{tmp_path}/a", lambda _: None)
            await until(lambda: links == [Link.UP])
            server.close()
            await until(lambda: links == [Link.UP, Link.DOWN])
        client.close()
        client.close()
        with pytest.raises(PeerUnreachable, match="closed"):
            client.send_now([b"x"])

    run(scenario())


def test_what_a_connection_that_went_would_still_take_is_refused(run: Run[None]) -> None:
    """ZeroMQ tells of its end before it takes the queue away; how long before is up to its thread."""

    async def scenario() -> None:
        heard: list[bytes] = []
        links: list[Link] = []
        server = router(ANY_PORT, lambda frames: heard.append(frames[1]))
        client = Dealer(server.endpoint, lambda _: None, links.append)
        await client.send([b"before"], timeout_s=10)
        client._on_event(zmq.EVENT_DISCONNECTED, 0)
        with pytest.raises(PeerUnreachable, match="no live connection"):
            client.send_now([b"lost"])
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.send([b"after"], timeout_s=10))
            await asyncio.sleep(0)
            assert not waiting.done()
            client._on_event(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
        await until(lambda: heard == [b"before", b"after"])
        assert links == [Link.UP, Link.DOWN, Link.UP]
        client.close()
        server.close()

    run(scenario())


def test_a_closed_dealer_whose_peer_goes_does_not_stall_the_process(run: Run[None]) -> None:
    """While it lingers with unsent messages its connection can still break; nobody listens to that any more."""

    async def scenario() -> None:
        with zmq.Context() as context:
            stalled = context.socket(zmq.ROUTER)
            stalled.linger, stalled.rcvhwm = 0, 1
            stalled.bind(ANY_PORT)
            client = Dealer(stalled.getsockopt_string(zmq.LAST_ENDPOINT), lambda _: None, lambda _: None)
            await client.send([b"x"], timeout_s=10)
            with pytest.raises(PeerUnreachable):  # noqa: PT012
                for _ in range(100_000):
                    client.send_now([bytes(65536)])
            client.close()
            stalled.close()

        heard: list[bytes] = []
        server = router(ANY_PORT, lambda frames: heard.append(frames[1]))
        other = Dealer(server.endpoint, lambda _: None, lambda _: None)
        await other.send([b"still here"], timeout_s=5)
        await until(lambda: heard == [b"still here"])
        other.close()
        server.close()

    run(scenario())


def test_addresses_that_cannot_be_are_refused(run: Run[None]) -> None:
    async def scenario() -> None:
        server = router(ANY_PORT, lambda _: None)
        with pytest.raises(MeshError, match="cannot bind"):
            router(server.endpoint, lambda _: None)
        with pytest.raises(MeshError, match="cannot connect to 'nonsense'"):
            Dealer("nonsense", lambda _: None, lambda _: None)
        server.close()

    run(scenario())


def test_the_file_of_an_ipc_socket_goes_with_its_owner_only(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "socket"
        first = router(f"ipc://{path}", lambda _: None)
        second = router(f"ipc://{path}", lambda _: None)  # ZeroMQ replaces the file
        first.close()
        assert path.exists(), "the second one's file"

        second.close()
        assert not path.exists()

    run(scenario())


def test_states_are_published_and_a_slow_subscriber_stops_nobody(run: Run[None]) -> None:
    async def scenario() -> None:
        heard: list[bytes] = []
        publisher = Publisher(ANY_PORT)
        listener = subscriber(publisher.endpoint, lambda frames: heard.append(frames[0]))
        with zmq.Context() as context, context.socket(zmq.SUB) as deaf:
            deaf.linger, deaf.rcvhwm = 0, 1
            deaf.subscribe(b"")
            deaf.connect(publisher.endpoint)

            def hears() -> bool:
                publisher.publish([b"state"])
                return bool(heard)

            await until(hears)
            for _ in range(6000):
                publisher.publish([bytes(1000)])
            publisher.publish([b"last"])
            await until(lambda: bytes(1000) in heard)
        listener.close()
        publisher.close()

    run(scenario())
