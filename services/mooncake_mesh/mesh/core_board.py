"""Which instances of a machine compute just now, so that each may use the cores that the others leave.

Threads of one instance wait for each other hundreds of times a step. Where one of them has no core, each wait lasts
until the scheduler's next turn, and two busy instances with as many threads as cores are ten times as slow as with one
thread each. One instance alone, on the other hand, would leave cores idle. So they keep a board: a small file that all
of them map, with a slot for each, in which it writes until when it takes itself to be busy, and with how many threads.
Who is busy divides the cores by how many are, before every forward and between its layers.

Who begins a forward waits until nobody has more threads than that: the others come to the end of their layers in a few
milliseconds. Without it layers that one had begun alone, with all cores, could last as long as the whole forward of the
other: its threads slept at each of their barriers, and one of them had to win its core back after each.

A slot belongs to who holds the lock on its bytes, which the kernel takes back when a process dies. What a dead process
wrote expires.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from mooncake_mesh.errors import MeshError

SLOTS: Final = 512
_SLOT_BYTES: Final = 16
_BOARD_BYTES: Final = SLOTS * _SLOT_BYTES
_BUSY_NS: Final = 5_000_000_000
"""A mark made during a forward: longer than a layer takes. It is what others lose when somebody dies."""
_LINGER_NS: Final = 20_000_000
"""A mark made after a forward: longer than what lies between two steps."""

_GIVE_WAY_NS: Final = 20_000_000
"""Nobody who computes is waited for longer: the layers of one call take less, and who was stopped never ends them."""

_LOOK_S: Final = 0.0001


class CoreBoard:
    """This process's slot on the board at *path*, made if need be. Raises MeshError.

    It may have *most_threads* threads, 0 for as many as cores. *n_cores* are those that the asking thread may run on
    then, unless given. To be used on one thread at a time, which *sleep* keeps waiting.
    """

    def __init__(
        self,
        path: Path,
        most_threads: int,
        *,
        n_cores: int | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._n_cores = n_cores
        self._most_threads = most_threads
        self._now_ns = now_ns
        self._sleep = sleep
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, _BOARD_BYTES)
            self._map = mmap.mmap(self._fd, _BOARD_BYTES)
        except OSError as error:
            raise MeshError(f"no board of cores at {path}: {error}") from error
        self._slot = self._claim(path)
        self._marks, self._threads = np.frombuffer(self._map, np.int64).reshape(-1, 2).T  # seen in every layer

    def begin(self) -> int:
        """This process computes from now on, with so many threads. To be called again now and then; the first time it
        waits for those who have more than their share by now."""
        self._marks[self._slot] = self._now_ns() + _BUSY_NS
        if not self._threads[self._slot]:
            self._wait_for_others()
        threads = self._threads[self._slot] = self.threads
        return threads

    def end(self) -> None:
        """It has done what it had to, and will go on soon or not at all."""
        self._threads[self._slot] = 0
        self._marks[self._slot] = self._now_ns() + _LINGER_NS

    def rest(self) -> None:
        """It has done what it had to, and leaves the cores to others until it begins again."""
        self._threads[self._slot] = self._marks[self._slot] = 0

    @property
    def threads(self) -> int:
        """How many threads this process may compute with now."""
        n_cores = self._cores()
        return min(self._most_threads or n_cores, self._share(n_cores))

    @property
    def is_contended(self) -> bool:
        """Whether another process computes now."""
        return self._others() > 0

    def _cores(self) -> int:
        return self._n_cores or len(os.sched_getaffinity(0))

    def _share(self, n_cores: int) -> int:
        return max(1, n_cores // (1 + self._others()))

    def _others(self) -> int:
        now_ns = self._now_ns()
        return int(np.count_nonzero(self._marks > now_ns)) - int(self._marks[self._slot] > now_ns)

    def _wait_for_others(self) -> None:
        share, until_ns = self._share(self._cores()), self._now_ns() + _GIVE_WAY_NS
        while (now_ns := self._now_ns()) < until_ns and np.any((self._threads > share) & (self._marks > now_ns)):
            self._sleep(_LOOK_S)

    def close(self) -> None:
        self.rest()
        del self._marks, self._threads  # the map cannot be closed under them
        self._map.close()
        os.close(self._fd)

    def _claim(self, path: Path) -> int:
        for slot in range(SLOTS):
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT_BYTES, slot * _SLOT_BYTES)
            except OSError:
                continue  # somebody else's
            return slot
        raise MeshError(f"all {SLOTS} places on the board of cores at {path} are taken")
