"""Virtual time: a heap of (time, sequence number, action).

The sequence number belongs to the run, so actions of one moment happen in the order in which they were scheduled, in
every process and on every machine.
"""

import gc
import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Action = Callable[[], None]


@contextmanager
def _without_cycles() -> Iterator[None]:
    """No search for cyclic garbage meanwhile: a run makes none, and looking through its objects takes a tenth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class VirtualClock:
    """``now_s`` moves only while :meth:`run` takes actions off the heap."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._seq = 0

    def at(self, time_s: float, action: Action) -> None:
        """Do *action* at *time_s*; now, after what is due already, when that is past."""
        self._seq += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._seq, action))

    def stop(self) -> None:
        """Drop all that is scheduled: :meth:`run` ends with the present action."""
        self._heap.clear()

    def run(self) -> None:
        """Until nothing is scheduled any more."""
        heap, pop = self._heap, heapq.heappop
        with _without_cycles():
            while heap:
                self.now_s, _, action = pop(heap)
                self.events += 1
                action()


class Link:
    """What leaves a node goes out first come, first served."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self.sent_bytes = 0

    def send(self, now_s: float, n_bytes: int) -> float:
        """Queue *n_bytes*; when the last of them has arrived."""
        self._free_s = max(self._free_s, now_s) + n_bytes / self._bytes_per_s
        self.sent_bytes += n_bytes
        return self._free_s
