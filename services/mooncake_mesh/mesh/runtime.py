"""The life of a process: event loop, signals, readiness, orderly stop."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import uvloop
import zmq

from mooncake_mesh.mesh import endpoint
from mooncake_mesh.mesh.curve import MeshKeys, using
from mooncake_mesh.mesh.gatekeeper import Gatekeeper
from mooncake_mesh.mesh.service_manager import Progress, ServiceManager, service_manager

log = structlog.get_logger(__name__)

_NO_WORK: Final = Progress(done=0, pending=0)
"""Of a service whose work is all done by the event loop: that loop's turning is its progress."""


class Lifecycle:
    """Handed to a service's ``run``. ``stopping`` is set by SIGTERM or SIGINT; the service then drains and returns."""

    def __init__(self, manager: ServiceManager | None = None) -> None:
        self.stopping = asyncio.Event()
        self.is_ready = False
        self._manager = manager or ServiceManager(None)

    def ready(self, progress: Callable[[], Progress] = lambda: _NO_WORK, **facts: object) -> None:
        """Say once that the service takes work; *progress* is asked from then on whether it gets anywhere with it."""
        self.is_ready = True
        log.info("ready", **facts)
        self._manager.ready()
        self._manager.watch(progress)

    def stop(self, why: str) -> None:
        if not self.stopping.is_set():
            log.info("stopping", why=why)
            self._manager.stopping()
            self.stopping.set()


def main(run: Callable[[Lifecycle], Awaitable[None]], keys: MeshKeys | None = None) -> int:
    """Run one service until it returns; the process' exit code. Its tcp sockets are secured with *keys*, if any.

    Errors pass through to the caller. The ZeroMQ context is terminated, so sockets that were left open would show here.
    """
    with using(keys), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_supervised(run, keys))
    return 0


async def _supervised(run: Callable[[Lifecycle], Awaitable[None]], keys: MeshKeys | None) -> None:
    manager = service_manager()
    lifecycle = Lifecycle(manager)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.stop, signal.Signals(number).name)
    gatekeeper = None if keys is None else Gatekeeper(keys)
    try:
        await run(lifecycle)
    except BaseException:
        endpoint.close_all()
        raise
    finally:
        manager.close()
        if gatekeeper is not None:
            gatekeeper.close()
        zmq.Context.instance().destroy(linger=250)
        log.info("stopped")
