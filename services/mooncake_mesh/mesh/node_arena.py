"""A worker's hold on its node's arena: attach, keep, and attach again when the messenger restarted.

The arena of a restarted messenger is another one, with none of the old blocks: whatever the worker had there is lost,
and its jobs with it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.mesh.arena import BorrowedArena, Holder, borrow_to_write
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.ids import Incarnation
from mooncake_proto.transfer import ArenaInfo, Attach

log = structlog.get_logger(__name__)

_RETRY_S: Final = 0.2
_CALL_TIMEOUT_S: Final = 3.0


class NodeArena:
    """*bind* gets the arena's memory, *unbind* must drop every view of it; *on_lost* comes between the two."""

    def __init__(
        self,
        messenger: RpcClient,
        me: Holder,
        block_bytes: int,
        *,
        layout: str = "",
        bind: Callable[[memoryview], Awaitable[None]],
        unbind: Callable[[], Awaitable[None]],
        on_lost: Callable[[], None],
    ) -> None:
        self._messenger = messenger
        self._attach = Attach(
            instance_id=me.instance_id, incarnation=me.incarnation, block_bytes=block_bytes, layout=layout
        )
        self._me = me
        self._bind = bind
        self._unbind = unbind
        self._on_lost = on_lost
        self.attached = asyncio.Event()
        self.owner: Incarnation | None = None  # the messenger whose arena this is, while attached

    async def run(self) -> None:
        """Stay attached until cancelled. A refusal is logged and tried again: the messenger may be restarted to fit."""
        while True:
            try:
                info = await self._messenger.call(self._attach, ArenaInfo, timeout_s=_CALL_TIMEOUT_S)
                arena = await borrow_to_write(info.socket_path, self._me)
            except MooncakeError as error:
                log.warning("messenger_unavailable", code=error.code, error=str(error)[:300])
                await asyncio.sleep(_RETRY_S)
                continue
            await self._stay(arena, info)

    async def _stay(self, arena: BorrowedArena, info: ArenaInfo) -> None:
        try:
            await self._bind(arena.arena.view[: info.n_blocks * info.block_bytes])
            self.owner = info.incarnation
            self.attached.set()
            log.info("arena_attached", node=info.node_id, n_blocks=info.n_blocks)
            await arena.lost.wait()
            log.warning("arena_lost", node=info.node_id)
        finally:
            self.owner = None
            self.attached.clear()
            self._on_lost()
            await self._unbind()
            arena.close()
