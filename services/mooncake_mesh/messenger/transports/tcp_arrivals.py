"""One sender's link at the receiver: heads and small payloads on the event loop, a thread for each lane.

A frame's places are asked for when its head comes, usually while an earlier frame is still on the lanes; its writes are
reported over after its last byte. Every frame that *begin* admitted is reported to *end* exactly once, however its link
ends.
"""

import asyncio
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

import structlog

from mooncake_mesh.errors import ChecksumMismatch, MooncakeError, SliceLost, TransferError
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import Incoming, Landings, LinkLost, SliceRefused, checksum
from mooncake_mesh.messenger.transports.frames import Carriage, FrameError, Head, Hello, Verdict
from mooncake_mesh.messenger.transports.streams import pieces_of, receive_exactly, receive_group, shut, tell

log = structlog.get_logger(__name__)

_MAX_FRAMES: Final = 256
_INBOX_BYTES: Final = 256 << 10
_SCRATCH_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One slice of a frame: its first byte in the payload, and its place, if it is wanted."""

    offset: int
    incoming: Incoming
    target: memoryview | None

    def is_damaged(self) -> bool:
        wanted = self.incoming.checksum
        return wanted is not None and self.target is not None and checksum(self.target) != wanted

    def lies_within(self, start: int, stop: int) -> bool:
        return start <= self.offset and self.offset + self.incoming.size_bytes <= stop


class _Frame:
    """One frame on its way in. The lanes' threads share ``cuts_left`` and ``error`` under ``lock``."""

    def __init__(self, head: Head, pieces: Sequence[_Piece], destinations: Sequence[Destination]) -> None:
        self.head = head
        self.pieces = pieces
        self.destinations = destinations
        self.is_refused = False
        self.lock = threading.Lock()
        self.cuts: list[tuple[int, int, int]] = []
        self.cuts_left = 0
        self.error: TransferError | None = None

    def verify(self, pieces: Iterable[_Piece]) -> None:
        for piece in pieces:
            if piece.is_damaged():
                self.error = self.error or ChecksumMismatch(f"{piece.incoming.span} arrived damaged")

    def pieces_within(self, start: int, stop: int) -> list[_Piece]:
        return [piece for piece in self.pieces if piece.lies_within(start, stop)]

    def divided_pieces(self) -> list[_Piece]:
        """Those that came over more than one lane."""
        edges = [stop for _, _, stop in self.cuts[:-1]]
        return [
            piece
            for piece in self.pieces
            if any(piece.offset < edge < piece.offset + piece.incoming.size_bytes for edge in edges)
        ]


def _lay_out(memory: memoryview, incoming: Sequence[Incoming], destinations: Sequence[Destination]) -> list[_Piece]:
    places = {place.span: place for place in destinations}
    pieces = []
    offset = 0
    for item in incoming:
        place = places.pop(item.span, None)  # a span named twice in one frame is taken once
        target = None if place is None else memory[place.offset : place.offset + place.size_bytes]
        pieces.append(_Piece(offset=offset, incoming=item, target=target))
        offset += item.size_bytes
    return pieces


class _Cut:
    """Bytes ``start`` to ``stop`` of a frame's payload; what one lane receives of it."""

    def __init__(self, frame: _Frame, start: int, stop: int) -> None:
        self.frame = frame
        self.start = start
        self.stop = stop


class InboundLink:
    """One sender's control connection and lanes. All runs on the loop but ``_lane`` and what it calls."""

    def __init__(
        self,
        hello: Hello,
        memory: memoryview,
        landings: Landings,
        loop: asyncio.AbstractEventLoop,
        after: "asyncio.Future[None] | None",
    ) -> None:
        self.hello = hello
        self._after = after
        if after is not None:
            after.add_done_callback(lambda _: self._check_ended())
        self.ended: asyncio.Future[None] = loop.create_future()
        self._memory = memory
        self._landings = landings
        self._loop = loop
        self._control: socket.socket | None = None
        self._lanes: dict[int, tuple[socket.socket, SimpleQueue[_Cut | None]]] = {}
        self._inbox = bytearray(_INBOX_BYTES)
        self._filled = 0
        self._head: Head | None = None
        self._frames: set[_Frame] = set()
        self._is_dead = False

    @property
    def n_connections(self) -> int:
        return len(self._lanes) + (self._control is not None)

    def start(self, control: socket.socket) -> None:
        if self._is_dead:
            raise FrameError("the link has ended")
        self._control = control
        self._loop.add_reader(control, self._read_control)

    def add_lane(self, lane: int, connection: socket.socket) -> None:
        """Raises FrameError for a lane that is there already, or that the link does not have."""
        if self._is_dead or lane in self._lanes or lane >= self.hello.n_lanes:
            raise FrameError("a lane that is not expected")
        cuts: SimpleQueue[_Cut | None] = SimpleQueue()
        self._lanes[lane] = connection, cuts
        threading.Thread(target=self._lane, args=(lane, connection, cuts), name="tcp-receive", daemon=True).start()

    def die(self, why: str) -> None:
        """End the link. ``ended`` is set when all frames are reported and all lanes are closed."""
        if self._is_dead:
            return
        self._is_dead = True
        log.info("tcp_link_ended", reason=why, frames=len(self._frames))
        if self._control is not None:
            self._loop.remove_reader(self._control)
            shut(self._control)
        for connection, cuts in self._lanes.values():
            shut(connection)
            cuts.put(None)
        self._check_ended()

    def _check_ended(self) -> None:
        is_former_gone = self._after is None or self._after.done()
        if self._is_dead and is_former_gone and not self._lanes and not self.ended.done():
            if self._control is not None:
                self._control.close()  # not before: a lane's thread may have been about to acknowledge
                self._control = None
            self.ended.set_result(None)

    # --- heads and small payloads -------------------------------------------------------------------------------------

    def _read_control(self) -> None:
        assert self._control is not None
        try:
            got = self._control.recv_into(memoryview(self._inbox)[self._filled :], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self.die(str(error))
            return
        if got == 0:
            self.die("the sender closed the connection")
            return
        self._filled += got
        try:
            self._take_frames()
        except FrameError as error:
            log.warning("tcp_bad_frame", error=str(error))
            self.die(str(error))

    def _take_frames(self) -> None:
        """Take all whole frames out of the inbox. Raises FrameError."""
        start = 0
        with memoryview(self._inbox) as inbox:
            while not self._is_dead:
                left = self._filled - start
                if self._head is None:
                    if left < frames.HEAD.size:
                        break
                    self._head = frames.unpack_head(inbox[start : start + frames.HEAD.size])
                    start += frames.HEAD.size
                elif left < self._head.following_bytes:
                    break
                else:
                    head, self._head = self._head, None
                    self._take(head, inbox[start : start + head.following_bytes])
                    start += head.following_bytes
            self._inbox[: self._filled - start] = bytes(inbox[start : self._filled])
        self._filled -= start

    def _take(self, head: Head, rest: memoryview) -> None:
        """A whole head with its entries, and its payload if that is inline."""
        entries_bytes = head.n_slices * frames.ENTRY.size
        incoming = frames.unpack_entries(rest[:entries_bytes], head)
        destinations, refusal = self._begin(head, incoming)
        frame = _Frame(head, _lay_out(self._memory, incoming, destinations), destinations)
        frame.error = refusal
        frame.is_refused = refusal is not None
        if head.carriage is Carriage.INLINE:
            if refusal is None:
                self._place_inline(frame, rest[entries_bytes:])
            self._end(frame)
            self._acknowledge(frame)
            return
        frame.cuts = frames.cut(head.payload_bytes, head.frame, self.hello.n_lanes)
        if len(self._lanes) < self.hello.n_lanes or len(self._frames) >= _MAX_FRAMES:
            frame.error = frame.error or LinkLost("tcp: the sender kept to no rule")
            self._end(frame)
            raise FrameError("frames before all lanes were there, or far beyond the window")
        frame.cuts_left = len(frame.cuts)
        self._frames.add(frame)
        for lane, start, stop in frame.cuts:
            self._lanes[lane][1].put(_Cut(frame, start, stop))

    def _begin(self, head: Head, incoming: Sequence[Incoming]) -> tuple[list[Destination], TransferError | None]:
        try:
            return self._landings.begin(head.token, incoming), None
        except MooncakeError as error:
            log.info("tcp_frame_refused", error=str(error)[:200])
            return [], SliceRefused(str(error))

    def _end(self, frame: _Frame) -> None:
        self._frames.discard(frame)
        if not frame.is_refused:
            self._landings.end(frame.head.token, frame.destinations, frame.error)

    def _acknowledge(self, frame: _Frame) -> None:
        """From any thread. A sender that reads no acknowledgements has lost its right to more."""
        verdict = Verdict.WRITTEN
        if frame.error is not None:
            verdict = Verdict.DAMAGED if isinstance(frame.error, ChecksumMismatch) else Verdict.REFUSED
        control = self._control
        if control is None:
            return
        try:
            control.send(frames.ACK.pack(frame.head.frame, verdict), socket.MSG_DONTWAIT)
        except OSError as error:
            why = f"acknowledgement undeliverable: {error}"
            tell(self._loop, lambda: self.die(why))

    def _place_inline(self, frame: _Frame, payload: memoryview) -> None:
        for piece in frame.pieces:
            if piece.target is not None:
                piece.target[:] = payload[piece.offset : piece.offset + piece.incoming.size_bytes]
        frame.verify(frame.pieces)

    # --- lanes (their own threads) ------------------------------------------------------------------------------------

    def _lane(self, lane: int, connection: socket.socket, cuts: "SimpleQueue[_Cut | None]") -> None:
        """Receive one cut after the other. A broken lane goes on taking cuts, so that each is accounted for."""
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        broken = ""
        while (item := cuts.get()) is not None:
            if not broken:
                try:
                    self._receive(connection, item, scratch)
                except (OSError, FrameError) as error:
                    broken = str(error) or "stalled"
                    tell(self._loop, partial(self.die, broken))
            self._account(item.frame, LinkLost(f"tcp: {broken}") if broken else None)
        connection.close()
        tell(self._loop, lambda: self._lane_gone(lane))

    def _lane_gone(self, lane: int) -> None:
        del self._lanes[lane]
        self._check_ended()

    def _receive(self, connection: socket.socket, item: _Cut, scratch: memoryview) -> None:
        """Payload into its places, trailer, checksums. Raises OSError, or FrameError for a lane out of step."""
        frame = item.frame
        for group in pieces_of(self._views(item, scratch)):
            receive_group(connection, group)
        number, is_whole = frames.TRAILER.unpack(receive_exactly(connection, frames.TRAILER.size))
        if number != frame.head.frame:
            raise FrameError("a lane is out of step with its heads")
        if is_whole:
            frame.verify(frame.pieces_within(item.start, item.stop))  # now, while they are in the cache
        else:
            frame.error = frame.error or SliceLost("the sender gave the slices up")

    def _views(self, item: _Cut, scratch: memoryview) -> list[memoryview]:
        """Where the bytes of a cut go; scratch memory for those that nobody wants."""
        views = []
        for piece in item.frame.pieces:
            first = max(item.start - piece.offset, 0)
            last = min(item.stop - piece.offset, piece.incoming.size_bytes)
            if first >= last:
                continue
            if piece.target is not None:
                views.append(piece.target[first:last])
                continue
            whole, rest = divmod(last - first, len(scratch))
            views += [scratch] * whole + [scratch[:rest]] * (rest > 0)
        return views

    def _account(self, frame: _Frame, error: TransferError | None) -> None:
        """One cut is over. The last one reports the frame: first to its owner, then to the sender."""
        with frame.lock:
            frame.error = frame.error or error
            frame.cuts_left -= 1
            is_last = frame.cuts_left == 0
        if not is_last:
            return
        if frame.error is None:
            frame.verify(frame.divided_pieces())
        tell(self._loop, lambda: self._end(frame))
        self._acknowledge(frame)
