"""Simulations in worker processes: one run each at a time, in the order in which they were asked for.

What a worker gets is the name of a file with requests, and a setup; what it brings is a file of the run cache. Workers
are started afresh, so that nothing of the asking process (its threads above all) is in them.
"""

import heapq
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from pathlib import Path
from threading import Condition
from types import FrameType

from bench.paper_cache import RunCache, read_requests, requests_digest, write_requests
from bench.simulator import MeshSetup, simulate
from bench.simulator_coupled import CoupledSetup, simulate_coupled
from bench.simulator_results import GiveUp, RunResult
from bench.traces import TraceRequest

System = MeshSetup | CoupledSetup


def run(requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None = None) -> RunResult:
    """One run, made here and now."""
    if isinstance(system, MeshSetup):
        return simulate(requests, system, give_up=give_up)
    return simulate_coupled(requests, system, give_up=give_up)


class Jobs:
    """*n* worker processes. Called from many threads; requests lie below *folder* meanwhile.

    Runs that can be given up go first: they belong to searches, in which one run waits for the one before.
    ``on_made`` hears of each that was made. :meth:`end` it: what waits is dropped and what runs is ended.
    """

    def __init__(self, n: int, folder: Path) -> None:
        self._n = n
        self._folder = folder
        self._pool = ProcessPoolExecutor(
            n, mp_context=multiprocessing.get_context("spawn"), initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        self._turns = Condition()
        self._line: list[tuple[bool, int]] = []
        self._running = 0
        self._asked: dict[Path, Future[None]] = {}
        self.done = 0
        self.on_made: Callable[[], None] = lambda: None

    def run(self, requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None, result: Path) -> None:
        """Have a run made and kept at *result*; who asks for one that is being made waits for that."""
        with self._turns:
            is_first = result not in self._asked
            if is_first:
                self._asked[result] = Future()
            future = self._asked[result]
        if is_first:
            self._make(future, requests, system, give_up, result)
        future.result()

    @property
    def waiting(self) -> int:
        return len(self._asked) - self.done

    def end(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        _end_workers()

    def _make(
        self,
        future: "Future[None]",
        requests: Sequence[TraceRequest],
        system: System,
        give_up: GiveUp | None,
        result: Path,
    ) -> None:
        """Wait for a worker, and for what it makes; *future* hears of it, whatever comes of it."""
        with self._turns:
            ticket = (give_up is None, len(self._asked))
            heapq.heappush(self._line, ticket)
            self._turns.wait_for(lambda: self._running < self._n and self._line[0] == ticket)
            heapq.heappop(self._line)
            self._running += 1
            self._turns.notify_all()
        try:
            work = self._folder / f"{requests_digest(requests)}.npz"
            write_requests(work, requests)
            error = self._pool.submit(_made, work, system, give_up, result).exception()
        except (OSError, RuntimeError, CancelledError) as failed:  # no room for requests; no workers any more
            error = failed
        with self._turns:
            self._running -= 1
            self.done += 1
            self._turns.notify_all()
        self.on_made()
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)


def end_with_workers(_: int, __: FrameType | None) -> None:
    """For SIGINT: the threads that wait for workers see them gone, so that all end."""
    _end_workers()
    raise KeyboardInterrupt


def _end_workers() -> None:
    for worker in multiprocessing.active_children():
        worker.terminate()


def _made(work: Path, system: System, give_up: GiveUp | None, result: Path) -> None:
    """In a worker: make a run and keep it."""
    RunCache(folder=result.parent).write(result, run(read_requests(work), system, give_up))
