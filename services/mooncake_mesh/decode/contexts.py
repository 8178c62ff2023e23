"""What the engine has of a sequence on the device: made before its first step, and kept for others after its last."""

import asyncio

import structlog

from mooncake_mesh.decode.preemption import swap_keys
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import Engine
from mooncake_mesh.errors import InternalError, MooncakeError
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.worker.station import Station
from mooncake_proto.ids import JobId
from mooncake_proto.transfer import Acquired

log = structlog.get_logger(__name__)


class SequenceContexts:
    """Asks the *engine* on its thread, between the steps."""

    def __init__(self, station: Station, engine: Engine) -> None:
        self._station = station
        self._engine = engine

    async def load(self, sequence: DecodeSequence, acquired: Acquired) -> MooncakeError | None:
        """Have the KV of its prompt, which has landed, ready for its first step, beside the steps of others.

        Returns why it is not to be decoded, if it was stopped meanwhile or this failed.
        """
        job, blocks = sequence.job, acquired.blocks
        keys = list(split_keys(job.keys))
        _tell_landed(job.job_id, acquired)
        try:
            loading = await self._station.on_engine_thread(
                self._engine.preload, job.job_id, blocks, sequence.prompt_tokens, keys
            )
            await asyncio.wrap_future(loading)
        except Exception as error:  # the failure of one job is reported, and the others go on
            if sequence.stop is None:
                log.error("engine_failed", job_id=job.job_id, exc_info=error)
                return InternalError(f"loading KV failed: {type(error).__name__}")
        return sequence.stop

    async def retire(self, sequence: DecodeSequence) -> None:
        """It is over."""
        keys = swap_keys(sequence, self._engine.spec.layout.block_tokens)
        await self._station.on_engine_thread(self._engine.retire, sequence.job.job_id, keys)


def _tell_landed(job_id: JobId, acquired: Acquired) -> None:
    if acquired.landed is None:
        return
    log.info(
        "kv_landed",
        job_id=job_id,
        received_bytes=acquired.landed.received_bytes,
        first_slice_s=round(acquired.landed.first_slice_s, 4),
        last_slice_s=round(acquired.landed.last_slice_s, 4),
        cached_blocks=acquired.cached_blocks,
    )
