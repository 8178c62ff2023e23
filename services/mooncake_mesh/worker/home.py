"""What outlives the roles of a worker that can switch: its engine, on its thread, and its socket.

The socket stays bound: whoever still speaks to the role that was gets that role's refusal, and asks the conductor for
another place.
"""

import asyncio

import structlog

from mooncake_mesh.engine.api import Engine
from mooncake_mesh.mesh.core_board import CoreBoard
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.rpc import Handler, RpcServer
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import Role, SwitchRole

log = structlog.get_logger(__name__)


class WorkerHome:
    """Of one *process*; *tasks* lives as long. ``role`` is the one it has, or is to have next while a turn ends."""

    def __init__(self, role: Role, process: Lifecycle, tasks: asyncio.TaskGroup) -> None:
        self.role = role
        self.process = process
        self.thread = Crew(1, name="engine")
        self.engine: Engine | None = None
        self.cores: CoreBoard | None = None
        self._tasks = tasks
        self._server: RpcServer | None = None
        self._turn = Lifecycle()

    def begin(self) -> Lifecycle:
        """A turn of ``role``, as its service's life: it stops when the other role is ordered, or by :meth:`stop`."""
        self._turn = Lifecycle()
        return self._turn

    def stop(self, why: str) -> None:
        """End the present turn."""
        self._turn.stop(why)

    def serve(self, bind: str, handlers: dict[type, Handler]) -> RpcServer:
        """The socket, which answers with *handlers* from now on; kinds that none is for keep those they had."""
        if self._server is None:
            self._server = RpcServer(bind, handlers, self._tasks)
        else:
            self._server.take(handlers)
        return self._server

    def switch(self, order: SwitchRole) -> None:
        """Let the present turn end for the other role."""
        role = Role(order.role.value)
        if role is self.role:
            return
        log.info(
            "role_switch_begun",
            to=role.value,
            prefill_demand=order.prefill_demand,
            decode_demand=order.decode_demand,
            prefill=order.prefill,
            decode=order.decode,
        )
        self.role = role
        self.stop(f"to {role.value}")

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        self.thread.close()
