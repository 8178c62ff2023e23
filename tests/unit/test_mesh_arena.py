"""The arena's memory and who holds it; the holders that die are processes of their own."""

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mooncake_mesh.config import CommitKind, PagesKind
from mooncake_mesh.errors import MeshError, PeerUnreachable
from mooncake_mesh.mesh import arena as arenas
from mooncake_mesh.mesh.arena import ArenaServer, Holder, borrow_to_read, borrow_to_write
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_proto.ids import Incarnation, InstanceId, new_incarnation
from tests.unit.mesh_doubles import Run, on_both_loops, soon, until

SIZE_BYTES = 1 << 20
OWNER = new_incarnation()
ME = Holder(instance_id=InstanceId("decode0"), incarnation=new_incarnation())

HOLD = """
import asyncio, sys
from mooncake_mesh.mesh.arena import Holder, borrow_to_write
async def main():
    arena = await borrow_to_write(sys.argv[1], Holder(instance_id="other", incarnation="0123456789abcdef"))
    arena.arena.view[:5] = b"hello"
    print("held", flush=True)
    await arena.lost.wait()
asyncio.run(main())
"""
OTHER = Holder(instance_id=InstanceId("other"), incarnation=Incarnation("0123456789abcdef"))


def inode_of(path: Path) -> int | None:
    """Of the socket at *path*, once only its owner may use it; None when there is none."""
    if not path.is_socket() or path.stat().st_mode & 0o777 != 0o600:
        return None
    return path.stat().st_ino


@asynccontextmanager
async def served(path: Path, gone: list[Holder], commit: CommitKind = CommitKind.USE) -> AsyncIterator[Arena]:
    """An arena whose server is ready."""
    arena = Arena.create(SIZE_BYTES, PagesKind.SMALL, commit)
    server = ArenaServer(path, arena, OWNER, on_gone=gone.append)
    old = inode_of(path)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(server.run())
        await until(lambda: inode_of(path) not in (None, old))
        try:
            yield arena
        finally:
            task.cancel()
    arena.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "arena.sock"


@on_both_loops
def test_one_memory_for_all_who_hold_it(run: Run[None], path: Path) -> None:
    async def scenario() -> None:
        gone: list[Holder] = []
        async with served(path, gone) as arena:
            writer = await borrow_to_write(str(path), ME)
            reader = await borrow_to_read(str(path), ME)
            assert (writer.owner, writer.arena.size_bytes) == (OWNER, SIZE_BYTES)
            writer.arena.view[100:103] = b"abc"
            assert bytes(arena.view[100:103]) == bytes(reader.arena.view[100:103]) == b"abc"
            assert not any(arena.view[200:]), "memory starts as zeros"
            assert reader.arena.view.readonly
            with pytest.raises(TypeError, match="read-only"):
                reader.arena.view[0:1] = b"x"
            assert not os.get_inheritable(writer.arena.fd), "a program that a worker starts must not keep the arena"
            assert not [name for name in os.listdir("/dev/shm") if "mooncake" in name]
            assert gone == []
            writer.close()
            reader.close()
            await until(lambda: gone == [ME, ME])
        assert inode_of(path) is None

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("commit", CommitKind)
def test_who_borrows_makes_memory_ready_where_the_owner_does(run: Run[None], path: Path, commit: CommitKind) -> None:
    async def scenario() -> None:
        async with served(path, [], commit) as arena:
            for borrow in (borrow_to_write, borrow_to_read):
                borrowed = await borrow(str(path), ME)
                assert borrowed.arena.commit is commit
                borrowed.close()
            if commit is CommitKind.USE:
                assert os.fstat(arena.fd).st_blocks == 0, "nobody has used it"

    run(scenario())


@on_both_loops
def test_memory_in_use_cannot_be_unmapped(run: Run[None], path: Path) -> None:
    async def scenario() -> None:
        async with served(path, []):
            held = await borrow_to_write(str(path), ME)
            block = held.arena.view[:10]
            with pytest.raises(BufferError):
                held.close()
            block.release()
            held.close()

    run(scenario())
    gc.collect()


@on_both_loops
def test_slices_that_only_garbage_holds_are_no_use_of_it(run: Run[None], path: Path) -> None:
    async def scenario() -> None:
        async with served(path, []):
            borrowed = await borrow_to_write(str(path), ME)
            gc.disable()
            try:
                cycle: list[object] = [borrowed.arena.view[:8]]
                cycle.append(cycle)
                del cycle
                borrowed.close()
            finally:
                gc.enable()

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_a_holder_is_seen_and_its_stall_is_not(run: Run[None], path: Path, number: signal.Signals) -> None:
    async def scenario() -> None:
        gone: list[Holder] = []
        async with served(path, gone) as arena:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", HOLD, str(path), stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            assert await soon(process.stdout.readline()) == b"held\n"
            assert bytes(arena.view[:5]) == b"hello"
            process.send_signal(signal.SIGSTOP)
            other = await borrow_to_read(str(path), ME)
            other.close()
            await until(lambda: gone == [ME])
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            await until(lambda: gone == [ME, OTHER])
            assert bytes(arena.view[:5]) == b"hello"
            await process.communicate()

    run(scenario())


@on_both_loops
def test_a_holder_that_says_something_is_alive(run: Run[None], path: Path) -> None:
    """Only the kernel's word counts: who is wrongly taken for dead still has the memory mapped, writable."""

    async def scenario() -> None:
        gone: list[Holder] = []
        async with served(path, gone):
            held = await borrow_to_write(str(path), ME)
            held._connection.send(b"stray bytes" * 20)
            other = await borrow_to_read(str(path), OTHER)
            other.close()
            await until(lambda: gone)
            assert gone == [OTHER]
            held.close()
            await until(lambda: gone == [OTHER, ME])

    run(scenario())


@on_both_loops
def test_the_owners_end_is_seen_and_is_not_the_holders(run: Run[None], path: Path) -> None:
    async def scenario() -> None:
        gone: list[Holder] = []
        async with served(path, gone) as arena:
            held = await borrow_to_write(str(path), ME)
            arena.view[:3] = b"abc"
        await soon(held.lost.wait())
        assert bytes(held.arena.view[:3]) == b"abc", "the memory lives as long as somebody has it"
        held.close()
        assert gone == [], "nobody died: the owner stopped"

    run(scenario())


@on_both_loops
def test_the_next_owner_takes_the_path_over(run: Run[None], path: Path) -> None:
    """A messenger that is slow to stop must not remove its successor's socket."""

    path.parent.mkdir()
    path.write_bytes(b"left by a process that was killed")

    async def scenario() -> None:
        async with served(path, []) as first:
            first.view[:3] = b"old"
            held = await borrow_to_read(str(path), ME)
            second_gone: list[Holder] = []
            second = served(path, second_gone)
            arena = await second.__aenter__()
            arena.view[:3] = b"new"
        await soon(held.lost.wait())
        held.close()
        fresh = await borrow_to_read(str(path), ME)
        assert bytes(fresh.arena.view[:3]) == b"new"
        fresh.close()
        await until(lambda: second_gone == [ME])
        await second.__aexit__(None, None, None)
        assert inode_of(path) is None

    run(scenario())


@on_both_loops
def test_another_user_is_refused(run: Run[None], path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with served(path, []):
            assert path.parent.stat().st_mode & 0o077 == 0, "and does not even reach the socket"
            monkeypatch.setattr(arenas, "_peer_uid", lambda _: os.getuid() + 1)
            with pytest.raises(PeerUnreachable):
                await borrow_to_write(str(path), ME)

    run(scenario())


@on_both_loops
@pytest.mark.parametrize("hello", [b"short", b""])
def test_a_stranger_gets_nothing_and_dies_unnoticed(run: Run[None], path: Path, hello: bytes) -> None:
    async def scenario() -> None:
        gone: list[Holder] = []
        async with served(path, gone):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(hello)
            writer.write_eof()
            assert await soon(reader.read()) == b""
            writer.close()
            await writer.wait_closed()
            held = await borrow_to_read(str(path), ME)
            held.close()
            await until(lambda: gone == [ME])

    run(scenario())


@on_both_loops
def test_who_is_not_there_is_unreachable(run: Run[None], path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(PeerUnreachable, match=r"arena\.sock"):
            await borrow_to_write(str(path), ME)

    run(scenario())


@on_both_loops
def test_giving_up_leaves_no_socket(run: Run[None], path: Path) -> None:
    path.parent.mkdir()

    async def scenario() -> None:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(path))
            silent.listen()
            async with asyncio.TaskGroup() as tasks:
                borrowing = tasks.create_task(borrow_to_write(str(path), ME))
                for _ in range(5):
                    await asyncio.sleep(0)
                borrowing.cancel()
        gc.collect()  # an unclosed socket would warn here

    run(scenario())


def test_a_path_that_is_too_long_for_the_kernel_is_refused(tmp_path: Path) -> None:
    arena = Arena.create(4096)
    with pytest.raises(MeshError, match="exceeds 107 bytes"):
        ArenaServer(tmp_path / ("x" * 108), arena, OWNER, on_gone=lambda _: None)
    arena.close()
