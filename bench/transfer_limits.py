"""What the machine itself can do, from Python: memory copies, bare sockets, another process's memory.

Both pools are memory files, as arenas are, of the pages that are named: ``python -m bench.transfer_limits PAGES``
"""

import ctypes
import socket
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import numpy as np

from bench.transfer_child import (
    POOL_BYTES,
    Answer,
    Question,
    answer_all,
    be_other_end,
    offsets,
    start_other_end,
    timed,
)
from mooncake_mesh.config import PagesKind
from mooncake_mesh.mesh.arena_memory import Arena

_BUFFER_BYTES: Final = 256 << 10
_STRIPE_BYTES: Final = 512 << 10
_THIS: Final = "bench.transfer_limits"


def pool(pages: PagesKind) -> memoryview:
    """Touched memory of POOL_BYTES in a memory file. Raises MeshError where there are no such *pages*."""
    memory = Arena.create(POOL_BYTES, pages).view
    np.frombuffer(memory, np.uint8)[:] = 7
    return memory


class Helper:
    """A second thread that does one thing at a time for the first."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._todo.get()()
            self._done.put(None)

    def both(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """*second* on the helper's thread while *first* runs on this one."""
        self._todo.put(second)
        first()
        self._done.get()


def main() -> None:
    pages = PagesKind(sys.argv[1])
    if sys.argv[2:] == ["other-end"]:
        _be_receiver(pages)
        return
    sockets = _Sockets(pages)
    memcpy = _Memcpy(pages)
    limits = {
        "memcpy-1": memcpy.measure,
        "memcpy-2": memcpy.measure,
        "sockets": sockets.measure,
        "readv": _ReadV(pages, sockets.other.pid, int(sockets.where["address"])).measure,
    }
    answer_all(lambda question: limits[question.op](question))
    sockets.other.communicate()


class _Memcpy:
    """``memcpy-1`` and ``memcpy-2``: np.copyto on one and on two threads."""

    def __init__(self, pages: PagesKind) -> None:
        self._source = np.frombuffer(pool(pages), np.uint8)
        self._target = np.frombuffer(pool(pages), np.uint8)
        self._helper = Helper()

    def measure(self, question: Question) -> Answer:
        size = question.size_bytes

        def copy(parts: list[tuple[int, int]]) -> None:
            for start, length in parts:
                np.copyto(self._target[start : start + length], self._source[start : start + length])

        def one_thread(call: int) -> None:
            copy([(offset, size) for offset in offsets(question, call)])

        def two_threads(call: int) -> None:
            half = size // 2
            places = offsets(question, call)
            self._helper.both(
                lambda: copy([(offset, half) for offset in places]),
                lambda: copy([(offset + half, size - half) for offset in places]),
            )

        return timed(question, one_thread if question.op == "memcpy-1" else two_threads)


class _Sockets:
    """``sockets``: two connections, each block striped over both, a byte back for each call."""

    def __init__(self, pages: PagesKind) -> None:
        self._pool = pool(pages)
        self._helper = Helper()
        self.other, self.where = start_other_end(_THIS, pages.value, "other-end")
        address = ("127.0.0.1", int(self.where["port"]))
        self._connections = [socket.create_connection(address) for _ in range(2)]
        for connection in self._connections:
            _tune(connection)

    def measure(self, question: Question) -> Answer:
        size = question.size_bytes
        half = size // 2 if size >= _STRIPE_BYTES else size
        orders = [half, size - half]
        for connection, part in zip(self._connections, orders, strict=True):
            connection.sendall(part.to_bytes(8, "little") + question.batch.to_bytes(8, "little"))

        def send(index: int, places: list[int]) -> None:
            connection, skip = self._connections[index], orders[0] if index else 0
            connection.sendall(b"+")
            for place in places:
                connection.sendall(self._pool[place + skip : place + skip + orders[index]])
            connection.recv(1)

        def work(call: int) -> None:
            places = offsets(question, call)
            if orders[1]:
                self._helper.both(lambda: send(0, places), lambda: send(1, places))
            else:
                send(0, places)

        answer = timed(question, work)
        for connection in self._connections:
            connection.sendall(b".")
        return answer


def _be_receiver(pages: PagesKind) -> None:
    memory = pool(pages)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept_both, args=(listener, memory), daemon=True).start()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        be_other_end({"port": str(listener.getsockname()[1]), "address": str(address)})


def _accept_both(listener: socket.socket, memory: memoryview) -> None:
    for index in range(2):
        connection, _ = listener.accept()
        _tune(connection)
        threading.Thread(target=_receive, args=(connection, index, memory), daemon=True).start()


def _receive(connection: socket.socket, index: int, memory: memoryview) -> None:
    while order := connection.recv(16, socket.MSG_WAITALL):
        part, batch = int.from_bytes(order[:8], "little"), int.from_bytes(order[8:], "little")
        place = index * len(memory) // 2
        while connection.recv(1) == b"+":
            for _ in range(batch):
                if place + part > len(memory):
                    place = 0
                view = memory[place : place + part]
                while len(view):
                    view = view[connection.recv_into(view) :]
                place += part
            connection.sendall(b"!")


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _ReadV:
    """``readv``: process_vm_readv out of the other end's pool, one system call for each call."""

    def __init__(self, pages: PagesKind, pid: int, remote: int) -> None:
        self._pid = pid
        self._remote = remote
        self._pool = pool(pages)
        self._local = ctypes.addressof(ctypes.c_char.from_buffer(self._pool))
        self._call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._call.restype = ctypes.c_ssize_t

    def measure(self, question: Question) -> Answer:
        vectors = _IoVec * question.batch

        def work(call: int) -> None:
            places = offsets(question, call)
            local = vectors(*[_IoVec(self._local + place, question.size_bytes) for place in places])
            remote = vectors(*[_IoVec(self._remote + place, question.size_bytes) for place in places])
            got = self._call(self._pid, local, len(places), remote, len(places), 0)
            if got != question.batch * question.size_bytes:
                raise OSError(ctypes.get_errno(), "process_vm_readv")

        return timed(question, work)


if __name__ == "__main__":
    main()
