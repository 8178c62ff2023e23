"""Memory of its own, in large pages where the kernel has them.

For what is large and stays, or must not stay: of the heap, what is freed is the process' until its end (heap.py).
"""

import mmap
from typing import Final

import structlog
import torch

_PAGE_BYTES: Final = 2 << 20

log = structlog.get_logger(__name__)


def in_large_pages(n_bytes: int) -> torch.Tensor:
    """(n_bytes) of uint8, zero, at the start of a page. It is taken from the kernel as it is first written, and goes
    back when nothing views it any more."""
    memory = mmap.mmap(-1, n_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # another system, or a kernel without large pages
        log.debug("memory_in_small_pages", reason=str(error))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _PAGE_BYTES
    return whole[first : first + n_bytes]
