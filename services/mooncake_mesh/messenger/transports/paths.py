"""The path of one transfer over a link to its receiver, whatever the link is made of.

A bounded window of frames is under way at a time. A link that breaks is opened again, with back-off, and what had not
arrived is sent again. Memory is free again when a submission is over, however it ended.
"""

import asyncio
import socket
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Final

import structlog

from mooncake_mesh.errors import SliceLost, TransferError
from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.api import LinkLost, SealedSlice
from mooncake_mesh.messenger.transports.outbound import OutboundFrame, OutboundLink

log = structlog.get_logger(__name__)

Sockets = tuple[socket.socket, list[socket.socket]]
"""Control connection and lanes of a link."""

FRAME_BYTES: Final = 8 << 20
"""Slices are gathered into frames of about this size: an acknowledgement each, and a place in the window."""
_ATTEMPTS: Final = 4
_BACK_OFF_S: Final = 0.05
_REST_S: Final = 1.0


class LinkSubmission:
    """Frames of one batch."""

    def __init__(self, link: OutboundLink) -> None:
        self._link = link
        self._frames: list[OutboundFrame] = []
        self._left = 0
        self._callbacks: list[Callable[[], None]] = []

    def __await__(self) -> Generator[Any, None, None]:
        return self._wait().__await__()

    @property
    def is_over(self) -> bool:
        return self._left == 0

    def add(self, token: bytes, batch: Sequence[SealedSlice], views: list[memoryview], payload_bytes: int) -> None:
        """Put one more frame on its way."""
        self._left += 1
        self._frames.append(self._link.submit(token, batch, views, payload_bytes, self._one_over))

    def cancel(self) -> None:
        for frame in self._frames:
            self._link.give_up(frame, SliceLost("the sender gave up"))

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        if self._left:
            self._callbacks.append(callback)
        else:
            callback()

    def _one_over(self) -> None:
        self._left -= 1
        if self._left == 0:
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()

    async def _wait(self) -> None:
        cancelled: asyncio.CancelledError | None = None
        while self._left:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._callbacks.append(partial(_wake, waiter))
            try:
                await waiter
            except asyncio.CancelledError as error:  # the memory is still read: the caller may not have it back yet
                cancelled = error
                self.cancel()
        if cancelled is not None:
            raise cancelled
        failures = [frame.failure for frame in self._frames if frame.failure is not None]
        if failures:  # what cannot be mended by sending again comes first
            raise min(failures, key=lambda failure: isinstance(failure, LinkLost))


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class Connections:
    """The link to one receiver, opened when needed and opened again when lost. Used by any number of transfers.

    *open_sockets* gets the link's epoch, blocks, and returns the control connection and the lanes; it raises OSError.
    """

    def __init__(self, name: str, where: str, open_sockets: Callable[[int], Sockets]) -> None:
        self.name = name
        self.where = where
        self._open_sockets = open_sockets
        self._epoch = 0
        self._link: OutboundLink | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False
        self._rest_until_s = 0.0
        self._why = ""

    async def link(self) -> OutboundLink:
        """The live link, opened if need be. Raises TransferError when the receiver cannot be reached.

        After some attempts the address rests for a while, during which every call fails at once.
        """
        if self._link is not None and not self._link.is_dead:
            return self._link
        async with self._opening:
            if self._link is not None and not self._link.is_dead:  # opened meanwhile
                return self._link
            if asyncio.get_running_loop().time() < self._rest_until_s:
                raise TransferError(self._why)
            delay_s = _BACK_OFF_S
            for attempt in range(_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(delay_s)
                    delay_s *= 2
                if self._is_closed:
                    raise TransferError(f"{self.name}: closed")
                self._epoch += 1
                try:
                    self._link = OutboundLink(self.name, *await self._connect())
                except OSError as error:
                    self._why = f"{self.name}: cannot connect to {self.where}: {error}"
                else:
                    return self._link
            self._rest_until_s = asyncio.get_running_loop().time() + _REST_S
            raise TransferError(self._why)

    def close(self) -> None:
        """End the link; what is under way fails. Its threads end on their own."""
        self._is_closed = True
        if self._link is not None:
            self._link.die("closed")

    async def _connect(self) -> Sockets:
        """Raises OSError. A call that is cancelled leaves no connection behind."""
        work = asyncio.get_running_loop().run_in_executor(None, self._open_sockets, self._epoch)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_close_unused)
            raise


def _close_unused(work: "asyncio.Future[Sockets]") -> None:
    if not work.cancelled() and work.exception() is None:
        control, lanes = work.result()
        for connection in (control, *lanes):
            connection.close()


class LinkPath:
    """Sends slices of one transfer out of *memory*, which the receiver of *token* lands."""

    def __init__(self, connections: Connections, token: bytes, memory: memoryview) -> None:
        self.name = connections.name
        self._connections = connections
        self._token = token
        self._memory = memory

    async def submit(self, batch: Sequence[SealedSlice]) -> LinkSubmission:
        """As :class:`SubmitPath`. A batch larger than the window waits for its own first frames."""
        link = await self._connections.link()
        submission = LinkSubmission(link)
        try:
            for part in _frames_of(batch):
                views = [self._memory[s.piece.offset : s.piece.offset + s.piece.size_bytes] for s in part]
                payload_bytes = sum(map(len, views))
                await link.room(payload_bytes)
                submission.add(self._token, part, views, payload_bytes)
        except BaseException:
            submission.cancel()
            await _quietly(submission)
            raise
        return submission

    async def send(self, batch: Sequence[SealedSlice]) -> None:
        """As :class:`SendPath`. Sent again, on a new link, when the link breaks: the receiver takes each slice once."""
        for attempt in range(_ATTEMPTS):
            try:
                await (await self.submit(batch))
            except LinkLost as error:
                if attempt + 1 == _ATTEMPTS:
                    raise
                log.info("link_lost", transport=self.name, peer=self._connections.where, error=str(error))
            else:
                return


async def _quietly(submission: LinkSubmission) -> None:
    try:
        await submission
    except TransferError as error:  # it was given up
        log.debug("submission_given_up", error=str(error))


def _frames_of(batch: Sequence[SealedSlice]) -> list[list[SealedSlice]]:
    """*batch* in its order, cut into frames. Raises TransferError for a slice that no frame can hold."""
    parts: list[list[SealedSlice]] = []
    size = FRAME_BYTES
    for item in batch:
        if not 0 < item.piece.size_bytes <= frames.MAX_FRAME_BYTES:
            raise TransferError(f"a slice has 1 to {frames.MAX_FRAME_BYTES} bytes, not {item.piece.size_bytes}")
        if size + item.piece.size_bytes > FRAME_BYTES or len(parts[-1]) == frames.MAX_SLICES:
            parts.append([])
            size = 0
        parts[-1].append(item)
        size += item.piece.size_bytes
    return parts
