"""Threads for copies and checksums, which release the GIL.

A pool of concurrent.futures would do, at the price of two futures, two locks and two more wake-ups for each piece of
work: more than copying 512 KiB takes.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from mooncake_mesh.messenger.transports.streams import tell

_T = TypeVar("_T")
_STOP: Final = None


class Crew:
    """*n_threads* threads that work for one event loop. Create on the loop."""

    def __init__(self, n_threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name="kv-work", daemon=True) for _ in range(n_threads)]
        for thread in self._threads:
            thread.start()

    def run(self, work: Callable[[], _T]) -> "asyncio.Future[_T]":
        """Do *work* on a thread; the future gets what it returned or raised.

        Work cannot be stopped: after cancelling the future it is done all the same, and its outcome is dropped.
        """
        outcome: asyncio.Future[_T] = self._loop.create_future()
        self._jobs.put((work, outcome))
        return outcome

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
            except Exception as error:  # noqa: BLE001  whoever awaits the outcome gets it
                tell(self._loop, partial(_fail, outcome, error))
            else:
                tell(self._loop, partial(_succeed, outcome, result))


def _succeed(outcome: "asyncio.Future[_T]", result: _T) -> None:
    if not outcome.done():
        outcome.set_result(result)


def _fail(outcome: "asyncio.Future[Any]", error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
