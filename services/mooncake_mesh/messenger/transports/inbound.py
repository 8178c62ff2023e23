"""One sender's link at the receiver: heads and small payloads on the event loop, a thread for each lane.

A lane fills a cut of a frame with bytes: it receives them (tcp) or copies them out of the sender's memory (shm).

A frame's places are asked for when its head comes, usually while an earlier frame is still on the lanes; its writes are
reported over after its last byte. Every frame that *begin* admitted is reported to *end* exactly once, however its link
ends.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

import structlog

from mooncake_mesh.errors import ChecksumMismatch, MooncakeError, TransferError
from mooncake_mesh.mesh.crew import tell
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import Incoming, Landings, LinkLost, SliceRefused
from mooncake_mesh.messenger.transports.frames import Carriage, FrameError, Head, Hello, Verdict
from mooncake_mesh.messenger.transports.inbound_frame import InboundFrame, lay_out
from mooncake_mesh.messenger.transports.streams import shut

log = structlog.get_logger(__name__)

_MAX_FRAMES: Final = 256
_INBOX_BYTES: Final = 256 << 10


class Lane(Protocol):
    """Fills cuts of frames, on a thread of its own."""

    def fill(self, frame: InboundFrame, start: int, stop: int) -> None:
        """Put payload bytes *start* to *stop* in their places.

        What is wrong with this frame alone goes into ``frame.error``. Raises OSError or FrameError when the lane is
        of no use any more.
        """

    def shut(self) -> None:
        """Make a blocked :meth:`fill` raise, and every later one."""

    def close(self) -> None: ...


class InboundLink:
    """One sender's control connection and lanes. All runs on the loop but ``_lane`` and what it calls."""

    def __init__(
        self,
        hello: Hello,
        memory: memoryview,
        landings: Landings,
        loop: asyncio.AbstractEventLoop,
        bulk: Carriage,
        after: "asyncio.Future[None] | None",
    ) -> None:
        """*bulk* is how large payloads come; *after* is the end of the sender's former link, if it had one."""
        self.hello = hello
        self._bulk = bulk
        self._after = after
        if after is not None:
            after.add_done_callback(lambda _: self._check_ended())
        self.ended: asyncio.Future[None] = loop.create_future()
        self._memory = memory
        self._landings = landings
        self._loop = loop
        self._control: socket.socket | None = None
        self._lanes: dict[int, tuple[Lane, SimpleQueue[tuple[InboundFrame, int, int] | None]]] = {}
        self._inbox = bytearray(_INBOX_BYTES)
        self._filled = 0
        self._head: Head | None = None
        self._frames: set[InboundFrame] = set()
        self._is_dead = False

    @property
    def n_connections(self) -> int:
        return len(self._lanes) + (self._control is not None)

    def when_former_ended(self, action: Callable[[], None]) -> None:
        """Do *action* on the loop once the writes of the sender's former link are over."""
        if self._after is None:
            action()
        else:
            self._after.add_done_callback(lambda _: action())

    def start(self, control: socket.socket) -> None:
        if self._is_dead:
            raise FrameError("the link has ended")
        control.setblocking(False)
        self._control = control
        self._loop.add_reader(control, self._read_control)

    def add_lane(self, index: int, lane: Lane) -> None:
        """Raises FrameError for a lane that is there already, or that the link does not have."""
        if self._is_dead or index in self._lanes or index >= self.hello.n_lanes:
            raise FrameError("a lane that is not expected")
        cuts: SimpleQueue[tuple[InboundFrame, int, int] | None] = SimpleQueue()
        self._lanes[index] = lane, cuts
        threading.Thread(target=self._run_lane, args=(index, lane, cuts), name="kv-receive", daemon=True).start()

    def die(self, why: str) -> None:
        """End the link. ``ended`` is set when all frames are reported and all lanes are closed."""
        if self._is_dead:
            return
        self._is_dead = True
        log.info("link_ended", reason=why, frames=len(self._frames))
        if self._control is not None:
            self._loop.remove_reader(self._control)
            shut(self._control)
        for lane, cuts in self._lanes.values():
            lane.shut()
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
            got = self._control.recv_into(memoryview(self._inbox)[self._filled :])
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
            log.warning("bad_frame", error=str(error))
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
        if head.carriage not in (Carriage.INLINE, self._bulk):
            raise FrameError("a carriage that this link does not have")
        entries, rest = rest[: head.n_slices * frames.ENTRY.size], rest[head.n_slices * frames.ENTRY.size :]
        incoming = frames.unpack_entries(entries, head)
        offsets = frames.unpack_offsets(rest) if head.carriage is Carriage.MAPPED else [0] * head.n_slices
        destinations, refusal = self._begin(head, incoming)
        frame = InboundFrame(head, lay_out(self._memory, incoming, offsets, destinations), destinations)
        frame.error = refusal
        frame.is_refused = refusal is not None
        if head.carriage is Carriage.INLINE:
            self._place_inline(frame, rest)
        elif len(self._lanes) < self.hello.n_lanes or len(self._frames) >= _MAX_FRAMES:
            frame.error = frame.error or LinkLost("the sender kept to no rule")
            self._end(frame)
            raise FrameError("frames before all lanes were there, or far beyond the window")
        else:
            self._use_lanes(frame)

    def _use_lanes(self, frame: InboundFrame) -> None:
        payload_bytes = frame.head.payload_bytes
        self._frames.add(frame)
        if frame.head.carriage is Carriage.MAPPED and payload_bytes <= frames.INLINE_BYTES:
            frame.cuts_left = 1  # copied sooner than a thread has woken up
            self._fill(self._lanes[0][0], frame, 0, payload_bytes)
            return
        frame.cuts = frames.cut(payload_bytes, frame.head.frame, self.hello.n_lanes)
        frame.cuts_left = len(frame.cuts)
        for lane, start, stop in frame.cuts:
            self._lanes[lane][1].put((frame, start, stop))

    def _begin(self, head: Head, incoming: Sequence[Incoming]) -> tuple[list[Destination], TransferError | None]:
        try:
            return self._landings.begin(head.token, incoming), None
        except MooncakeError as error:
            log.info("frame_refused", error=str(error)[:200])
            return [], SliceRefused(str(error))

    def _end(self, frame: InboundFrame) -> None:
        self._frames.discard(frame)
        if not frame.is_refused:
            self._landings.end(frame.head.token, frame.destinations, frame.error)

    def _acknowledge(self, frame: InboundFrame) -> None:
        """From any thread. A sender that reads no acknowledgements has lost its right to more.

        A frame whose lane broke has no verdict: the end of the link, which follows, tells the sender to send it again.
        """
        if isinstance(frame.error, LinkLost):
            return
        verdict = Verdict.WRITTEN
        if frame.error is not None:
            verdict = Verdict.DAMAGED if isinstance(frame.error, ChecksumMismatch) else Verdict.REFUSED
        control = self._control
        if control is None:
            return
        try:
            control.send(frames.ACK.pack(frame.head.frame, verdict))
        except OSError as error:
            why = f"acknowledgement undeliverable: {error}"
            tell(self._loop, lambda: self.die(why))

    def _place_inline(self, frame: InboundFrame, payload: memoryview) -> None:
        for piece in frame.pieces:
            if piece.target is not None:
                piece.target[:] = payload[piece.offset : piece.offset + piece.incoming.size_bytes]
        frame.verify(frame.pieces)
        self._end(frame)
        self._acknowledge(frame)

    # --- lanes (their own threads) ------------------------------------------------------------------------------------

    def _run_lane(self, index: int, lane: Lane, cuts: "SimpleQueue[tuple[InboundFrame, int, int] | None]") -> None:
        """Fill one cut after the other, to the last: each is accounted for, also by a lane that is broken."""
        while (cut := cuts.get()) is not None:
            self._fill(lane, *cut)
        lane.close()
        tell(self._loop, partial(self._lane_gone, index))

    def _lane_gone(self, index: int) -> None:
        del self._lanes[index]
        self._check_ended()

    def _fill(self, lane: Lane, frame: InboundFrame, start: int, stop: int) -> None:
        """One cut, with the checksums of what it completes: now, while the bytes are in the cache."""
        broken: TransferError | None = None
        try:
            lane.fill(frame, start, stop)
            frame.verify(frame.pieces_within(start, stop))
        except (OSError, FrameError) as error:
            why = str(error) or "stalled"
            broken = LinkLost(why)
            lane.shut()
            tell(self._loop, partial(self.die, why))
        with frame.lock:
            frame.error = frame.error or broken
            frame.cuts_left -= 1
            is_last = frame.cuts_left == 0
        if is_last:
            self._report(frame)

    def _report(self, frame: InboundFrame) -> None:
        """All bytes are there, or will not come: tell first the memory's owner, then the sender."""
        if frame.error is None:
            frame.verify(frame.divided_pieces())
        tell(self._loop, partial(self._end, frame))
        self._acknowledge(frame)
