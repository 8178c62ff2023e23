"""This project's transports as a library, two processes: ``python -m bench.transfer_links PAGES``.

Ops: ``tcp``, ``tls`` (the same, encrypted) and ``shm`` (one copy); each with ``-sealed`` (a checksum for every slice,
taken in the measured time); and ``handoff`` (no copy; a call ends when the reader has looked at the generations and
released the batch).
"""

import asyncio
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import uvloop

from bench.transfer_child import (
    POOL_BYTES,
    SIZES,
    Question,
    be_other_end,
    give,
    offsets,
    read_question,
    ready,
    start_other_end,
    timed_async,
)
from mooncake_mesh.config import PagesKind
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.messenger.transports.certificates import new_identity
from mooncake_mesh.messenger.transports.handoff import Generations, Handed, HandOffOwner, HandOffReader
from mooncake_mesh.messenger.transports.link_auth import new_secret
from mooncake_mesh.messenger.transports.paths import LinkPath
from mooncake_mesh.messenger.transports.shm_link import ShmListener, shm_connections
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_mesh.messenger.transports.windows import Windows, slot_slice

_LANES: Final = 2
_THIS: Final = "bench.transfer_links"
_SLOT_SIZES: Final = (4096, *SIZES)


def main() -> None:
    pages = PagesKind(sys.argv[1])
    if sys.argv[2:3] == ["other-end"]:
        uvloop.run(_receive(Path(sys.argv[3]), pages))
        return
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder:
        uvloop.run(_send(Path(folder), pages))


def touched_arena(pages: PagesKind) -> Arena:
    arena = Arena.create(POOL_BYTES, pages)
    np.frombuffer(arena.view, np.uint8)[:] = 7
    return arena


# --- receiving --------------------------------------------------------------------------------------------------------


async def _receive(folder: Path, pages: PagesKind) -> None:
    memory = touched_arena(pages).view
    windows = Windows(POOL_BYTES)
    secret = new_secret()
    tcp = TcpListener("127.0.0.1", 0, memory, windows, secret=secret)
    identity = new_identity()
    encrypted = TcpListener("127.0.0.1", 0, memory, windows, secret=secret, identity=identity)
    shm = ShmListener(folder / "kv", memory, windows)
    tokens = {
        str(size): windows.open(first_byte=0, slot_bytes=size, n_slots=POOL_BYTES // size).hex() for size in _SLOT_SIZES
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "handoff"))
        listener.listen()
        async with asyncio.TaskGroup() as tasks:
            readers = tasks.create_task(asyncio.to_thread(_take_hand_offs, listener, asyncio.get_running_loop()))
            where = {"port": str(tcp.port), "tls_port": str(encrypted.port), "secret": secret.hex()}
            where["fingerprint"] = identity.fingerprint.hex()
            await asyncio.to_thread(be_other_end, {**where, **tokens})
            listener.shutdown(socket.SHUT_RDWR)
            await readers
    await tcp.close()
    await encrypted.close()
    await shm.close()


def _take_hand_offs(listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
    """One owner for each size of block."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the end
            return
        reader = HandOffReader(connection, _look_and_release, lambda: None)
        loop.call_soon_threadsafe(reader.start)


def _look_and_release(handed: Handed) -> None:
    handed.check()
    handed.release()


# --- sending ----------------------------------------------------------------------------------------------------------


async def _send(folder: Path, pages: PagesKind) -> None:
    arena = touched_arena(pages)
    other, where = start_other_end(_THIS, pages.value, "other-end", str(folder))
    secret, fingerprint = bytes.fromhex(where["secret"]), bytes.fromhex(where["fingerprint"])
    connections = {
        "tcp": tcp_connections("127.0.0.1", int(where["port"]), secret, _LANES),
        "tls": tcp_connections("127.0.0.1", int(where["tls_port"]), secret, _LANES, fingerprint=fingerprint),
        "shm": shm_connections(folder / "kv", arena.fd),
    }
    owners = {size: _hand_off_owner(folder, arena, size) for size in _SLOT_SIZES}
    ready()
    while (question := await asyncio.to_thread(read_question)) is not None:
        work: Callable[[int], Awaitable[None]]
        if question.op == "handoff":
            work = partial(_hand_off, owners[question.size_bytes], question)
        else:
            name, _, sealed = question.op.partition("-")
            token = bytes.fromhex(where[str(question.size_bytes)])
            work = _sending(question, LinkPath(connections[name], token, arena.view), arena.view, seal=bool(sealed))
        give(await timed_async(question, work))
    for each in connections.values():
        each.close()
    other.communicate()


def _hand_off_owner(folder: Path, arena: Arena, block_bytes: int) -> HandOffOwner:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(folder / "handoff"))
    generations = Generations.create(POOL_BYTES // block_bytes)
    return HandOffOwner(connection, arena.fd, POOL_BYTES, block_bytes, generations)


async def _hand_off(owner: HandOffOwner, question: Question, call: int) -> None:
    await owner.hand([offset // question.size_bytes for offset in offsets(question, call)])


def _sending(question: Question, path: LinkPath, memory: memoryview, *, seal: bool) -> Callable[[int], Awaitable[None]]:
    async def work(call: int) -> None:
        size = question.size_bytes
        await path.send([slot_slice(memory, o // size, o, size, seal=seal) for o in offsets(question, call)])

    return work


if __name__ == "__main__":
    main()
