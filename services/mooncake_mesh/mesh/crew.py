"""Threads for work that releases the GIL: copies, checksums, the engine.

A pool of concurrent.futures would do, at the price of two futures, two locks and two more wake-ups for each piece of
work: more than copying 512 KiB takes, and there is a piece of work for every decode step.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import structlog

from mooncake_mesh.mesh.service_manager import Progress

log = structlog.get_logger(__name__)

_T = TypeVar("_T")
_STOP: Final = None


class Crew:
    """*n_threads* threads that work for one event loop; one does what it is given in order. Create on the loop."""

    def __init__(self, n_threads: int, *, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._given = self._done = 0
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for _ in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        """Do *work* on a thread; the future gets what it returned or raised.

        Work cannot be stopped: after cancelling the future it is done all the same, and its outcome is dropped.
        """
        outcome: asyncio.Future[_T] = self._loop.create_future()
        self._given += 1
        self._jobs.put((work, outcome))
        return outcome

    def progress(self) -> Progress:
        """How many pieces of work have come to an end, as far as the loop has heard, and how many have not."""
        return Progress(done=self._done, pending=self._given - self._done)

    def close(self) -> None:
        """Finish what was given to :meth:`run`; no thread is left when this returns. Nothing may be given any more."""
        for _ in self._threads:
            self._jobs.put(_STOP)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not _STOP:
            work, outcome = job
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  whoever awaits the outcome gets it
                tell(self._loop, partial(self._over, _fail, outcome, error))
            else:
                tell(self._loop, partial(self._over, _succeed, outcome, result))

    def _over(
        self, settle: Callable[["asyncio.Future[Any]", Any], None], outcome: "asyncio.Future[Any]", what: Any
    ) -> None:
        self._done += 1
        settle(outcome, what)


def tell(loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
    """Run *action* on *loop*, from any thread. Once the loop is closed nobody is left to hear of it."""
    try:
        loop.call_soon_threadsafe(action)
    except RuntimeError as error:
        log.debug("loop_closed", error=str(error))


def _succeed(outcome: "asyncio.Future[_T]", result: _T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: "asyncio.Future[Any]", error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)
