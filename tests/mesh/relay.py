"""A relay between two messengers' TCP transports that can damage, hold and cut what flows through it.

It stands where a messenger advertises its data port (``--advertise-data``), reads the frames of the control connections
(see messenger/transports/frames.py) and forwards everything. Small payloads, all that a fake engine has, travel there.
How many slices come in one frame is for the sender's path to decide, so places are counted in slices.
"""

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType

from mooncake_mesh.messenger.transports.frames import ENTRY, HEAD, HELLO, Carriage, Kind
from mooncake_mesh.messenger.transports.link_auth import HELLO_BYTES

_IO_TIMEOUT_S = 60.0


class _Cut(Exception):
    """The relay ends this connection on purpose."""


class Relay:
    """``target`` says where the messenger really listens, once it is known. ``slices`` have been passed on; while
    ``passing`` is clear none is."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.target: Callable[[], int] = lambda: 0
        self.slices = 0
        self.damaged = 0
        self.cuts = 0
        self.passing = threading.Event()
        self.passing.set()
        self._damage_at: int | None = None
        self._cut_at: int | None = None
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Relay":
        self._spawn(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.passing.set()
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def damage(self, *, after: int = 0) -> None:
        """Flip one bit in the frame with the next slice, or with one *after* that many."""
        self._damage_at = self.slices + after

    def cut(self, *, after: int = 0) -> None:
        """End the connection in the middle of that frame's payload."""
        self._cut_at = self.slices + after

    # --- inside -------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="relay")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sender, _ = self._listener.accept()
            except OSError:
                return
            receiver = socket.create_connection(("127.0.0.1", self.target()), timeout=_IO_TIMEOUT_S)
            for one in (sender, receiver):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.settimeout(_IO_TIMEOUT_S)
            with self._lock:
                self._sockets += [sender, receiver]
            self._spawn(self._guarded, self._forward_frames, sender, receiver)
            self._spawn(self._guarded, self._forward_bytes, receiver, sender)

    def _guarded(
        self, forward: Callable[[socket.socket, socket.socket], None], one: socket.socket, other: socket.socket
    ) -> None:
        with contextlib.suppress(OSError, _Cut):
            forward(one, other)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _forward_bytes(self, source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            sink.sendall(data)

    def _forward_frames(self, source: socket.socket, sink: socket.socket) -> None:
        hello = _exactly(source, HELLO_BYTES)
        sink.sendall(hello)
        if HELLO.unpack(hello[: HELLO.size])[1] != Kind.CONTROL:
            self._forward_bytes(source, sink)
            return
        while True:
            head = _exactly(source, HEAD.size)
            _, _, n_slices, carriage, payload_bytes = HEAD.unpack(head)
            entries = _exactly(source, n_slices * ENTRY.size)
            payload = _exactly(source, payload_bytes if carriage == Carriage.INLINE else 0)
            self.passing.wait()
            if payload and self._is_due(self._cut_at, n_slices):
                self._cut_at, self.cuts = None, self.cuts + 1
                sink.sendall(head + entries + payload[: len(payload) // 2])
                raise _Cut
            sink.sendall(head + entries + self._perhaps_damaged(payload, n_slices))
            self.slices += n_slices

    def _is_due(self, at: int | None, n_slices: int) -> bool:
        """Whether slice *at* is among those that come next."""
        return at is not None and at < self.slices + n_slices

    def _perhaps_damaged(self, payload: bytes, n_slices: int) -> bytes:
        if not payload or not self._is_due(self._damage_at, n_slices):
            return payload
        self._damage_at, self.damaged = None, self.damaged + 1
        return payload[:-1] + bytes([payload[-1] ^ 1])


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise _Cut
        data += part
    return data
