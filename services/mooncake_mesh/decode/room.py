"""Blocks for sequences that grow, and who makes room where there are none."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.decode.swapping import Swapping
from mooncake_mesh.errors import MooncakeError, NoFreeBlocks
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.ids import JobId
from mooncake_proto.transfer import Grow, Grown

log = structlog.get_logger(__name__)

_CALL_TIMEOUT_S: Final = 5.0


class Room:
    """:meth:`ask` is called between steps. *changed* rings when a sequence has grown or is back.

    *stop* ends a sequence that makes room and cannot be swapped, *give_up* one that does not come back.
    """

    def __init__(
        self,
        messenger: RpcClient,
        tasks: asyncio.TaskGroup,
        core: DecodeCore,
        swapping: Swapping,
        changed: Bell,
        *,
        stop: Callable[[DecodeSequence, MooncakeError], None],
        give_up: Callable[[DecodeSequence, MooncakeError], Awaitable[None]],
    ) -> None:
        self._messenger = messenger
        self._tasks = tasks
        self._core = core
        self._swapping = swapping
        self._changed = changed
        self._stop = stop
        self._give_up = give_up

    def ask(self) -> None:
        """Ask for blocks for all that will need some soon."""
        wanted = self._core.wants_growth()
        if wanted:
            self._tasks.create_task(self._grow(wanted))

    async def _grow(self, wanted: dict[JobId, int]) -> None:
        sequences = [(self._core.get(job_id), n_blocks) for job_id, n_blocks in wanted.items()]
        asking = [(sequence, sequence.arena_job, n_blocks) for sequence, n_blocks in sequences if sequence is not None]
        try:
            request = Grow(wanted={str(arena_job): n_blocks for _, arena_job, n_blocks in asking})
            got = (await self._messenger.call(request, Grown, timeout_s=_CALL_TIMEOUT_S)).blocks
        except MooncakeError as error:
            log.warning("growth_failed", jobs=len(wanted), code=error.code)
            got = {}
        for sequence, arena_job, _ in asking:
            if self._core.get(sequence.job.job_id) is not sequence or sequence.arena_job != arena_job:
                continue  # it ended or left meanwhile, and its blocks with it
            victim = self._core.grown(sequence, got.get(arena_job, ()))
            if victim is not None:
                self._preempt(victim, sequence.job.job_id)
        if got:  # else only somebody's end changes anything, and that rings itself
            self._changed.ring()

    def _preempt(self, victim: DecodeSequence, for_job: JobId) -> None:
        is_swapped = self._swapping.begin(victim)
        self._core.preemptions += 1
        log.info("job_preempted", job_id=victim.job.job_id, for_job=for_job, swapped=is_swapped)
        if is_swapped:
            self._tasks.create_task(self._await_back(victim))
        else:
            self._stop(victim, NoFreeBlocks("preempted: the KVCache pool of the node is full"))

    async def _await_back(self, sequence: DecodeSequence) -> None:
        try:
            await self._swapping.out_and_back(sequence)
        except MooncakeError as error:
            await self._give_up(sequence, sequence.stop or error)
        else:
            self._changed.ring()
