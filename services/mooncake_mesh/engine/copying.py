"""Copies beside the engine: one thread makes them, in the order it is asked to."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from mooncake_mesh.config_layerwise import Overlap
from mooncake_mesh.engine.streams import HostStreams, Mark, Streams


class Copy:
    """One copy, perhaps under way on another thread."""

    def __init__(self, copy: Callable[[], None], future: Future[None] | None) -> None:
        """*future* is that of the thread which makes it; None for one that is made."""
        self._copy = copy
        self._future = future

    @property
    def is_done(self) -> bool:
        return self._future is None or self._future.done()

    def outcome(self) -> Future[None]:
        """Ends when it is over, made or given up, with why it failed. Whoever waits for it cannot cancel it."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if self._future is None:
            done.set_result(None)
        else:
            self._future.add_done_callback(lambda future: _tell(future, done))
        return done

    def finish(self) -> None:
        """Wait for it. One that nobody has begun is made here: the other thread may not get a core for long."""
        if self._future is None:
            return
        if self._future.cancel():
            self._copy()
        else:
            self._future.result()

    def abandon(self) -> None:
        """It is over when this returns, made or not. Why it failed is known already, or comes again."""
        if self._future is not None and not self._future.cancel():
            self._future.exception()


def _tell(future: Future[None], done: Future[None]) -> None:
    error = None if future.cancelled() else future.exception()
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


class CopyThread:
    """Makes copies of *least_bytes* and more in order on a thread of its own, others at once on the caller's; without
    *overlap* all of them.

    To hand over a copy takes longer than to make a small one: it wakes a thread, which needs the interpreter and a core
    that the computation may be using. On a device a copy begins when what was asked of it before is done.
    """

    def __init__(self, overlap: Overlap, least_bytes: int = 0, streams: Streams | None = None) -> None:
        self._least_bytes = least_bytes
        self._streams = streams or HostStreams()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-copy") if overlap is Overlap.ON else None
        if self._thread is not None:
            _keep_alone(self._thread)

    @property
    def is_beside(self) -> bool:
        return self._thread is not None

    def run(self, copy: Callable[[], None], n_bytes: int) -> Copy:
        """*copy* copies *n_bytes*."""
        if self._thread is None or n_bytes < self._least_bytes:
            copy()
            return Copy(copy, None)
        return Copy(copy, self._thread.submit(self._make, copy, self._streams.mark()))

    def _make(self, copy: Callable[[], None], mark: Mark) -> None:
        """Inference mode is a thread's own, and tensors that were made in it may be changed in it only."""
        with torch.inference_mode(), self._streams.beside(mark):
            copy()


def _keep_alone(thread: ThreadPoolExecutor) -> None:
    """Have torch use one core on *thread*, and as many as before on the caller's.

    By itself torch has a team of helpers for each thread that computes. OpenMP lets helpers sleep as soon as there are
    more of them than cores, and waking them takes longer than most operations: with a second team, two cores compute a
    prompt no sooner than one.
    """
    n_threads = torch.get_num_threads()
    thread.submit(_use_one_core).result()
    torch.set_num_threads(n_threads)  # torch keeps the last number for threads that have not computed yet


def _use_one_core() -> None:
    torch.get_num_threads()  # or else the first operation sets what was set for others
    torch.set_num_threads(1)
