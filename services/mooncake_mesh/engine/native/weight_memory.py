"""Memory for weights, in large pages where the kernel has them.

A forward reads every weight once. With pages of 4 KiB it waits for the table of the pages as well, above all when other
work has taken the caches.
"""

import mmap
from collections.abc import Sequence
from math import prod
from typing import Final

import structlog
import torch

_SLAB_BYTES: Final = 64 << 20
_LARGE_PAGE_BYTES: Final = 2 << 20
_LINE_BYTES: Final = 64

log = structlog.get_logger(__name__)


class WeightMemory:
    """Gives out parts of slabs. A slab is freed when nothing in it is used any more."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it, at the start of a cache line."""
        n_bytes = prod(shape) * dtype.itemsize
        if self._used_bytes + n_bytes > len(self._slab):
            self._slab, self._used_bytes = _slab(max(n_bytes, _SLAB_BYTES)), 0
        part = self._slab[self._used_bytes : self._used_bytes + n_bytes]
        self._used_bytes += -(-n_bytes // _LINE_BYTES) * _LINE_BYTES
        return part.view(dtype).view(*shape)


def _slab(n_bytes: int) -> torch.Tensor:
    """Memory is taken as it is first written; none is for what is left over."""
    memory = mmap.mmap(-1, n_bytes + _LARGE_PAGE_BYTES)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # another system, or a kernel without large pages
        log.debug("weights_in_small_pages", reason=str(error))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % _LARGE_PAGE_BYTES
    return whole[first : first + n_bytes]
