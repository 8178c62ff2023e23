"""One connection for each endpoint, bounded."""

import pytest

from mooncake_mesh.errors import MeshError, PeerUnreachable
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import Caller
from mooncake_proto.client import Cancel
from mooncake_proto.control import Ok, Ping, Pong, Role
from mooncake_proto.ids import Incarnation, InstanceId
from tests.unit.mesh_doubles import Run, on_both_loops, serving, until

pytestmark = on_both_loops

PONG = Pong(role=Role.DECODE, instance_id=InstanceId("d"), incarnation=Incarnation("i"))


def test_who_was_reached_can_be_written_to(run: Run[None]) -> None:
    async def scenario() -> None:
        seen: list[str] = []

        def note(cancel: Cancel, _: Caller) -> None:
            seen.append(cancel.target)

        lost: list[str] = []
        book = Phonebook(on_lost=lost.append)
        async with serving({Ping: lambda _, __: PONG, Cancel: note}) as server:
            client = await book.reach(server.endpoint, timeout_s=5)
            client.post(Cancel(target="first"))
            await until(lambda: client.is_connected)
            assert await book.reach(server.endpoint, timeout_s=5) is client
            assert book.get(server.endpoint) is client
            client.post(Cancel(target="second"))
            await until(lambda: seen == ["first", "second"])
        await until(lambda: lost == [server.endpoint])
        book.close()

    run(scenario())


def test_who_is_not_there_is_not_reached(run: Run[None], tmp_path: object) -> None:
    async def scenario() -> None:
        book = Phonebook()
        with pytest.raises(PeerUnreachable):
            await book.reach(f"ipc://{tmp_path}/nobody", timeout_s=0.02)
        with pytest.raises(MeshError, match="cannot connect"):
            book.get("nonsense")
        book.close()

    run(scenario())


def test_the_longest_unused_goes_when_there_are_too_many(run: Run[None], tmp_path: object) -> None:
    async def scenario() -> None:
        book = Phonebook(max_peers=2)
        a, b = (book.get(f"ipc://{tmp_path}/{name}") for name in "ab")
        assert book.get(f"ipc://{tmp_path}/a") is a
        book.get(f"ipc://{tmp_path}/c")
        with pytest.raises(PeerUnreachable, match="closed"):
            b.post(Ok())
        with pytest.raises(PeerUnreachable, match="no live connection"):
            a.post(Ok())
        assert book.get(f"ipc://{tmp_path}/a") is a
        book.close()
        with pytest.raises(PeerUnreachable, match="closed"):
            a.post(Ok())

    run(scenario())
