"""The one thread an engine lives on.

Between two decode steps lie two hand-overs, to this thread and back, so they are as short as Python allows: one queue,
one wake-up of the loop, no future of a pool in between.
"""

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from mooncake_mesh.mesh.service_manager import Progress

_T = TypeVar("_T")
_Work = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]"]


class EngineThread:
    """Runs what it is given, one after the other. Create inside the running loop that will await the results."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._started = 0
        self._done = 0  # written by the engine's thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def start(self, work: Callable[..., _T], *args: Any) -> "asyncio.Future[_T]":
        """Queue *work*. A future and no task of a group: its error is its awaiter's, not the process' end.

        Cancelling the future only ends the wait: the work runs to its end.
        """
        future: asyncio.Future[_T] = self._loop.create_future()
        self._started += 1
        self._work.put((work, args, future))
        return future

    def progress(self) -> Progress:
        """How many pieces of work have come to an end, and how many have not."""
        done = self._done
        return Progress(done=done, pending=self._started - done)

    def close(self) -> None:
        """Let queued work end, then end the thread; waits for both."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, args, future = item
            try:
                result = work(*args)
            except BaseException as error:  # noqa: BLE001  it belongs to whoever awaits the future
                self._done += 1
                self._loop.call_soon_threadsafe(_fail, future, error)
            else:
                self._done += 1
                self._loop.call_soon_threadsafe(_deliver, future, result)


def _deliver(future: "asyncio.Future[Any]", result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[Any]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
