"""A worker that takes both roles, one at a time, as the conductor says: one process, one engine, one address.

A turn of a role is the whole life of its service: it registers, serves, and when the other role is ordered finishes
what it has and leaves. The next turn begins at once, as another incarnation; weights stay loaded.
"""

import asyncio
import dataclasses

import structlog

from mooncake_mesh.config import DecodeConfig, PrefillConfig
from mooncake_mesh.decode.service import DecodeService
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.prefill.service import PrefillService
from mooncake_mesh.worker.home import WorkerHome
from mooncake_proto.control import Role

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BothRoles:
    """``first`` is what the worker starts as. What both tables of the configuration have is equal in both."""

    first: Role
    prefill: PrefillConfig
    decode: DecodeConfig

    @classmethod
    def of(cls, own: PrefillConfig | DecodeConfig, other: PrefillConfig | DecodeConfig) -> "BothRoles":
        """*other* gives only what *own* has no setting for. Raises ValueError for two of one role."""
        names = {field.name for field in dataclasses.fields(own)} & {field.name for field in dataclasses.fields(other)}
        other = dataclasses.replace(other, **{name: getattr(own, name) for name in names})
        match own, other:
            case PrefillConfig(), DecodeConfig():
                return cls(first=Role.PREFILL, prefill=own, decode=other)
            case DecodeConfig(), PrefillConfig():
                return cls(first=Role.DECODE, prefill=other, decode=own)
            case _:
                raise ValueError("the two roles of a worker differ")


async def run(configs: BothRoles, lifecycle: Lifecycle) -> None:
    """Serve in one role after the other until *lifecycle* says stop."""
    async with asyncio.TaskGroup() as tasks:
        home = WorkerHome(configs.first, lifecycle, tasks)
        ending = tasks.create_task(_end_with(lifecycle, home))
        while not lifecycle.stopping.is_set():
            async with asyncio.TaskGroup() as turn:
                await _service(configs, home, turn).run(home.begin())
            log.info("turn_ended", next=home.role.value)
        ending.cancel()
        await home.close()


async def _end_with(lifecycle: Lifecycle, home: WorkerHome) -> None:
    await lifecycle.stopping.wait()
    home.stop("the process stops")


def _service(configs: BothRoles, home: WorkerHome, turn: asyncio.TaskGroup) -> PrefillService | DecodeService:
    match home.role:
        case Role.PREFILL:
            return PrefillService(configs.prefill, turn, home)
        case Role.DECODE:
            return DecodeService(configs.decode, turn, home)
        case role:
            raise ValueError(f"no worker's role: {role}")
