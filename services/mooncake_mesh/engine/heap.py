"""The heap of a process that computes: it keeps what is freed, and is made of 2 MiB pages.

malloc has the kernel map each large block anew, and take it back when it is freed. Contexts and activations are of that
size: every page of each is zeroed by the kernel when it is first touched, which is a third of the time of loading a
prefix of 2,048 tokens. Kept, the same memory serves the next one.

A decode step reads all weights once, and finds few of their 4 KiB pages in the processor's table of translations.
"""

import ctypes
import mmap
import os
from typing import Any, Final

import structlog

log = structlog.get_logger(__name__)

_TRIM_THRESHOLD: Final = -1
_MMAP_MAX: Final = -4
_ARENA_MAX: Final = -8
_NEVER: Final = -1


def prepare_heap() -> None:
    """Have glibc's malloc give no memory back to the kernel from now on, ask the kernel for 2 MiB pages, and have one heap
    for all threads (theirs are too small for this). Of the whole process, which should have no other threads yet. Where
    the C library has no such settings, or the kernel no such pages, nothing changes.
    """
    libc: Any = ctypes.CDLL(None)
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER))
    if not hasattr(libc, "mallopt") or not all(libc.mallopt(name, value) for name, value in settings):
        log.debug("heap_not_kept")
        return
    _ask_for_huge_pages(libc, _half_of_memory())


def _ask_for_huge_pages(libc: Any, n_bytes: int) -> None:
    """For the next *n_bytes* of the heap. They are only addresses before they are touched: taken and freed at once, they
    are where malloc goes on."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(n_bytes)
    if block is None:
        log.debug("heap_not_reserved", n_bytes=n_bytes)
        return
    begin = -(-block // mmap.PAGESIZE) * mmap.PAGESIZE
    if libc.madvise(begin, n_bytes - mmap.PAGESIZE, mmap.MADV_HUGEPAGE) != 0:
        log.debug("heap_of_small_pages")
    libc.free(block)


def _half_of_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
