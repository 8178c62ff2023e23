"""Replies to one call as they come: the reading end of what mesh/rpc.py delivers."""

import asyncio
from typing import Any

from mooncake_mesh.errors import CallTimeout, MeshError, RemoteFailure
from mooncake_proto.control import Failure
from mooncake_proto.ids import MessageId


def raise_if_error(item: object) -> None:
    """Raise what *item* says where it is a peer's Failure or an error of ours in place of a reply."""
    if isinstance(item, Failure):
        raise RemoteFailure(item)
    if isinstance(item, MeshError):
        raise item


class ReplyStream:
    """Replies to one streaming call, in order. The caller marks the end, which only it can recognise."""

    def __init__(self, queue: asyncio.Queue[Any], message_id: MessageId) -> None:
        self._queue = queue
        self.message_id = message_id
        self.ended = False

    async def next(self, *, timeout_s: float) -> Any:
        """The next reply.

        Raises RemoteFailure, PeerUnreachable, SlowReader (the stream is over then) or CallTimeout.
        """
        try:
            async with asyncio.timeout(timeout_s):
                item = await self._queue.get()
        except TimeoutError:
            raise CallTimeout(f"no reply in {timeout_s:g} s") from None
        self.ended = isinstance(item, Failure | MeshError)
        raise_if_error(item)
        return item
