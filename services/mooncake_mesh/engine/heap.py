"""The heap of a process that computes keeps what is freed.

malloc has the kernel map each large block anew, and take it back when it is freed. Contexts and activations are of that
size: every page of each is zeroed by the kernel when it is first touched, which is a third of the time of loading a
prefix of 2,048 tokens. Kept, the same memory serves the next one.
"""

import ctypes
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8
_NEVER: Final = -1


def keep_freed_memory() -> None:
    """Have glibc's malloc give no memory back to the kernel from now on, and have one heap for all threads (theirs are
    too small for this): of the whole process, which should have no other threads yet. Where the C library has no such
    settings nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    if mallopt is None or not all(mallopt(name, value) for name, value in settings):
        log.debug("heap_not_kept")
