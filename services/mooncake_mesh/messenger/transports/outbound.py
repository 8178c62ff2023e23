"""The link of a sender: one control connection on the event loop, and a thread for each lane.

Threads, because blocking ``sendmsg`` releases the GIL and copies nothing in Python. A frame is over when it is
acknowledged, or when it has failed and nobody reads its memory any more: what is left of a frame that was given up is
filled with zeros and marked worthless, and a lane that is stuck in such a frame is cut. Where the receiver has mapped
the memory there are no lanes; it reads until it acknowledges, or until the link has ended, which makes it drop what it
read.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final

from mooncake_mesh.errors import ChecksumMismatch, TransferError
from mooncake_mesh.mesh.crew import tell
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import LinkLost, SealedSlice, SliceRefused
from mooncake_mesh.messenger.transports.frames import Carriage, Verdict
from mooncake_mesh.messenger.transports.streams import pieces_of, send_group, shut

WINDOW_BYTES: Final = 32 << 20
WINDOW_FRAMES: Final = 64
_CANCEL_GRACE_S: Final = 0.5
_ACKS_BYTES: Final = 16 << 10
"""Read in one go; no less than a TLS record (see tls.py)."""
_ZEROS: Final = memoryview(bytes(1 << 20))


class OutboundFrame:
    """One frame under way; *on_over* is called once, on the loop.

    Its lanes' threads and the loop share ``readers`` and ``error`` under ``lock``.
    """

    __slots__ = ("error", "failure", "is_over", "lock", "number", "on_over", "payload_bytes", "readers", "views")

    def __init__(self, number: int, views: list[memoryview], payload_bytes: int, on_over: Callable[[], None]) -> None:
        self.number = number
        self.views = views
        self.payload_bytes = payload_bytes
        self.on_over = on_over
        self.is_over = False
        self.failure: TransferError | None = None
        self.lock = threading.Lock()
        self.readers = 0
        self.error: TransferError | None = None

    def settle(self, error: TransferError | None) -> None:
        """On the loop: nothing reads the memory any more."""
        if self.is_over:
            return
        self.is_over = True
        self.failure = error
        self.views = []
        self.on_over()


class OutboundLink:
    """One control connection and its lanes. All methods run on the loop; ``_lane`` is what the threads run."""

    def __init__(self, name: str, control: socket.socket, lanes: Sequence[socket.socket]) -> None:
        self._name = name
        self._loop = asyncio.get_running_loop()
        control.setblocking(False)
        self._control = control
        self._lanes = lanes
        self._jobs: list[SimpleQueue[tuple[OutboundFrame, int, int] | None]] = [SimpleQueue() for _ in lanes]
        self._under_way: dict[int, OutboundFrame] = {}
        self._bytes_under_way = 0
        self._room: asyncio.Future[None] | None = None
        self._next_frame = 0
        self._outbox = bytearray()
        self._acks = b""
        self.is_dead = False
        self._loop.add_reader(control, self._read_acks)
        for index, lane in enumerate(lanes):
            threading.Thread(target=self._lane, args=(lane, self._jobs[index]), name="kv-send", daemon=True).start()

    # --- submitting ---------------------------------------------------------------------------------------------------

    async def room(self, size_bytes: int) -> None:
        """Wait until a frame of *size_bytes* fits the window (one alone always does). Raises LinkLost."""
        while self._under_way and not self.is_dead and self._is_full(size_bytes):
            if self._room is None:
                self._room = self._loop.create_future()
            await asyncio.wait([self._room])
        if self.is_dead:
            raise LinkLost(f"{self._name}: the link was lost")

    def _is_full(self, size_bytes: int) -> bool:
        return self._bytes_under_way + size_bytes > WINDOW_BYTES or len(self._under_way) >= WINDOW_FRAMES

    def submit(
        self,
        token: bytes,
        batch: Sequence[SealedSlice],
        views: list[memoryview],
        payload_bytes: int,
        on_over: Callable[[], None],
    ) -> OutboundFrame:
        """Put one frame on its way: *views* of *batch*, together *payload_bytes*."""
        frame = OutboundFrame(self._next_frame, views, payload_bytes, on_over)
        self._next_frame = (self._next_frame + 1) & 0xFFFFFFFF
        self._under_way[frame.number] = frame
        self._bytes_under_way += frame.payload_bytes
        carriage = self._carriage(frame.payload_bytes)
        head = memoryview(frames.pack_head(frame.number, token, carriage, batch, payload_bytes))
        frame.readers = 1 if carriage is Carriage.MAPPED else 0
        self._write([head, *views] if carriage is Carriage.INLINE else [head])
        if carriage is Carriage.LANES:
            self._use_lanes(frame)
        return frame

    def _carriage(self, payload_bytes: int) -> Carriage:
        if not self._lanes:
            return Carriage.MAPPED
        return Carriage.INLINE if payload_bytes <= frames.INLINE_BYTES else Carriage.LANES

    def _use_lanes(self, frame: OutboundFrame) -> None:
        cuts = frames.cut(frame.payload_bytes, frame.number, len(self._lanes))
        frame.readers = len(cuts)
        for lane, start, stop in cuts:
            self._jobs[lane].put((frame, start, stop))

    def give_up(self, frame: OutboundFrame, error: TransferError) -> None:
        """Stop reading the memory of *frame*; it is over when its readers have let go of it."""
        if frame.is_over:
            return
        with frame.lock:
            frame.error = frame.error or error
            is_idle = frame.readers == 0 or (self.is_dead and not self._lanes)
        if is_idle:
            frame.settle(frame.error)
        else:
            self._loop.call_later(_CANCEL_GRACE_S, self._cut_if_stuck, frame)

    def _cut_if_stuck(self, frame: OutboundFrame) -> None:
        if not frame.is_over:
            self.die("somebody was stuck in a frame that had been given up")

    # --- the control connection ---------------------------------------------------------------------------------------

    def _write(self, views: list[memoryview]) -> None:
        """Send now what the socket takes; the rest is copied (it is small) and follows."""
        sent = 0
        if not self._outbox:
            try:
                sent = self._control.sendmsg(views)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._loop.call_soon(self.die, str(error))
                return
        if sent < sum(map(len, views)):
            if not self._outbox:
                self._loop.add_writer(self._control, self._flush)
            self._outbox += b"".join(views)[sent:]

    def _flush(self) -> None:
        try:
            sent = self._control.send(self._outbox)
        except BlockingIOError:
            return
        except OSError as error:
            self.die(str(error))
            return
        del self._outbox[:sent]
        if not self._outbox:
            self._loop.remove_writer(self._control)

    def _read_acks(self) -> None:
        try:
            data = self._control.recv(_ACKS_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.die(str(error))
            return
        if not data:
            self.die("the receiver closed the connection")
            return
        data = self._acks + data
        whole = len(data) - len(data) % frames.ACK.size
        self._acks = data[whole:]
        for number, verdict in frames.ACK.iter_unpack(data[:whole]):
            frame = self._under_way.get(number)
            if frame is None:
                self.die("an acknowledgement for no frame")
                return
            self._acknowledged(frame, verdict)

    def _acknowledged(self, frame: OutboundFrame, verdict: int) -> None:
        error: TransferError | None = None
        if verdict == Verdict.DAMAGED:
            error = ChecksumMismatch(f"{self._name}: the slices arrived damaged")
        elif verdict != Verdict.WRITTEN:
            error = SliceRefused(f"{self._name}: the receiver refused the slices")
        del self._under_way[frame.number]
        self._bytes_under_way -= frame.payload_bytes
        frame.settle(frame.error or error)
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None

    def die(self, why: str) -> None:
        """End the link. Every frame under way is over as soon as no lane reads its memory."""
        if self.is_dead:
            return
        self.is_dead = True
        self._loop.remove_reader(self._control)
        if self._outbox:
            self._loop.remove_writer(self._control)
        for connection in (self._control, *self._lanes):
            shut(connection)
        for jobs in self._jobs:
            jobs.put(None)
        self._control.close()
        for frame in self._under_way.values():
            self.give_up(frame, LinkLost(f"{self._name}: {why}"))
        self._under_way.clear()
        self._wake_waiting()

    # --- lanes --------------------------------------------------------------------------------------------------------

    def _lane(self, connection: socket.socket, jobs: "SimpleQueue[tuple[OutboundFrame, int, int] | None]") -> None:
        """Send one cut after the other. A broken lane goes on taking its jobs, so that each is accounted for."""
        broken = ""
        while (job := jobs.get()) is not None:
            frame, start, stop = job
            if not broken:
                try:
                    _send_cut(connection, frame, start, stop)
                except OSError as error:
                    broken = str(error) or "stalled"
                    tell(self._loop, partial(self.die, broken))
            self._let_go(frame)
        connection.close()

    def _let_go(self, frame: OutboundFrame) -> None:
        with frame.lock:
            frame.readers -= 1
            error = frame.error if frame.readers == 0 else None
        if error is not None:
            tell(self._loop, lambda: frame.settle(error))


def _send_cut(connection: socket.socket, frame: OutboundFrame, start: int, stop: int) -> None:
    """Bytes *start* to *stop* of the frame's payload, then the trailer. Raises OSError."""
    groups = pieces_of(_between(frame.views, start, stop))
    groups[-1].append(memoryview(frames.TRAILER.pack(frame.number, 1)))
    sent = 0
    for group in groups:
        if frame.error is not None:
            _fill_up(connection, frame, stop - start - sent)
            return
        sent += sum(map(len, group))
        send_group(connection, group)


def _fill_up(connection: socket.socket, frame: OutboundFrame, n_bytes: int) -> None:
    """Nobody wants the rest: keep in step with what was announced."""
    while n_bytes:
        filler = _ZEROS[:n_bytes]
        send_group(connection, [filler])
        n_bytes -= len(filler)
    connection.sendall(frames.TRAILER.pack(frame.number, 0))


def _between(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes *start* to *stop* of the concatenation of *views*, without copying."""
    found = []
    offset = 0
    for view in views:
        first, last = max(start - offset, 0), min(stop - offset, len(view))
        if first < last:
            found.append(view[first:last])
        offset += len(view)
    return found
