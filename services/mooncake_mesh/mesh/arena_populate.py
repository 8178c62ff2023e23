"""Making an arena's memory ready ahead of its use, on a thread.

Memory that nobody has touched is not there: the first use of each page stops for the kernel to find it, zero it and
enter it in the page table, and every other process that maps it stops again for a page table of its own. That is most
of the time of a copy into new memory, and falls on the first prompts. So it is done at start instead.
"""

import ctypes
import enum
import errno
import os
import threading
from typing import Final

import numpy as np
import structlog

log = structlog.get_logger(__name__)

PIECE_BYTES: Final = 1 << 20
"""Asked for at a time: 256 ordinary pages, two thirds of a millisecond. For so long other threads cannot map memory."""
THREAD_NAME: Final = "arena-populate"
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Advice(enum.IntEnum):
    """What the kernel (Linux 5.14 and later) is asked to do with pages. Neither changes what is in them.

    ``MAP`` suffices in a writable mapping too: its pages may be written without a fault then, and where the owner has
    committed them it takes half the time.
    """

    MAP = 22  # MADV_POPULATE_READ
    COMMIT = 23  # MADV_POPULATE_WRITE


class Populating:
    """A thread that makes *view* ready. It keeps the memory mapped until :meth:`stop`, or until it is done.

    It has the priority of the others: at a lower one it would be put off in the midst of a piece when the cores are
    busy, and whoever maps memory would wait for it (50 ms, at nice 10 on two full cores). Nor does it keep a process.
    """

    def __init__(self, view: memoryview, advice: Advice) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=populate, args=(view, advice, self._stopping), name=THREAD_NAME, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Return when the thread has ended, which takes it one piece at most. What is ready stays so."""
        self._stopping.set()
        self._thread.join()


def populate(view: memoryview, advice: Advice, stopping: threading.Event) -> int:
    """Make *view* ready from its start on, until *stopping*. Returns how many bytes of it are.

    What the kernel cannot do it does at first use, as if nobody had asked; that is no error but logged.
    """
    memory = np.frombuffer(view, np.uint8)
    address = memory.ctypes.data
    for start in range(0, len(memory), PIECE_BYTES):
        if stopping.is_set():
            return start
        try:
            madvise(address + start, min(PIECE_BYTES, len(memory) - start), advice)
        except OSError as error:
            _report(error, start, len(memory))
            return start
    log.debug("arena_populated", advice=advice.name.lower(), size_bytes=len(memory))
    return len(memory)


def madvise(address: int, size_bytes: int, advice: Advice) -> None:
    """madvise(2), which lets other threads run meanwhile; ``mmap.madvise`` stops them all."""
    if _libc.madvise(address, size_bytes, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _report(error: OSError, ready_bytes: int, size_bytes: int) -> None:
    if error.errno == errno.EINVAL:
        log.debug("populate_unknown_to_the_kernel", error=str(error))
        return
    log.warning(
        "arena_only_partly_committed",
        committed_bytes=ready_bytes,
        size_bytes=size_bytes,
        error=str(error),
        outlook="the rest is committed on use, if the system has it by then",
    )
