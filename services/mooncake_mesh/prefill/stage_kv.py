"""How the K and V that a stage computes come to where its instance's blocks lie: the arena of the head's node."""

from typing import Final, Protocol

import structlog

from mooncake_mesh.errors import MooncakeError, PeerUnreachable
from mooncake_mesh.kv.layout import KvLayout
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.prefill.announcing import Announce, to_messenger
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_mesh.prefill.stage_core import StageWork
from mooncake_proto.control import Ok
from mooncake_proto.pipeline import StageChunk
from mooncake_proto.transfer import CloseWrite, OpenWrite

log = structlog.get_logger(__name__)

_CALL_TIMEOUT_S: Final = 5.0


class StageKv(Protocol):
    """The way of one pipeline. Each chunk is opened before it is computed, and closed when that has ended."""

    async def open(self, work: StageWork) -> None:
        """Raises MooncakeError where the chunk's blocks may not be written any more."""

    def announce(self, work: StageWork) -> Announce | None:
        """What hears of the layers that are written; where it fails it stops the *work*."""

    async def close(self, work: StageWork) -> MooncakeError | None:
        """Returns when all that was announced is there, or why it is not. The stage writes the chunk no more."""


class NodeKv:
    """A stage on the node of its head writes into the arena itself, and tells the node's messenger.

    The job, its blocks and its transfer are the head's; the messenger gives nobody a block that is being written.
    """

    def __init__(self, messenger: RpcClient, me: Holder, layout: KvLayout) -> None:
        self._messenger = messenger
        self._me = me
        self._layout = layout

    async def open(self, work: StageWork) -> None:
        blocks = self._blocks(work.chunk)
        opening = OpenWrite(
            job_id=work.chunk.job_id,
            instance_id=self._me.instance_id,
            incarnation=self._me.incarnation,
            first_block=blocks.first_block,
            n_blocks=blocks.n_blocks,
        )
        await self._messenger.call(opening, Ok, timeout_s=_CALL_TIMEOUT_S)

    def announce(self, work: StageWork) -> Announce | None:
        def failed(error: MooncakeError) -> None:
            work.stop = work.stop or error

        return to_messenger(self._messenger, work.chunk.transfer_id, self._blocks(work.chunk), failed)

    async def close(self, work: StageWork) -> MooncakeError | None:
        """A messenger that is gone has no blocks to keep either."""
        first_block = self._blocks(work.chunk).first_block
        closing = CloseWrite(job_id=work.chunk.job_id, incarnation=self._me.incarnation, first_block=first_block)
        try:
            await self._messenger.call(closing, Ok, timeout_s=_CALL_TIMEOUT_S)
        except MooncakeError as error:
            log.warning("close_write_failed", job_id=work.chunk.job_id, code=error.code)
            return PeerUnreachable("the node's messenger is gone")
        return None

    def _blocks(self, chunk: StageChunk) -> ChunkBlocks:
        return ChunkBlocks.of(chunk.start, chunk.n_tokens, self._layout)
