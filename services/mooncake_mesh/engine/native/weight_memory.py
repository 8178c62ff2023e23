"""Memory for weights, in large pages where the kernel has them.

A forward reads every weight once. With pages of 4 KiB it waits for the table of the pages as well, above all when other
work has taken the caches.
"""

from collections.abc import Sequence
from math import prod
from typing import Final

import torch

from mooncake_mesh.engine.large_pages import in_large_pages

_SLAB_BYTES: Final = 64 << 20
_LINE_BYTES: Final = 64


class WeightMemory:
    """Gives out parts of slabs. A slab is freed when nothing in it is used any more."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with anything in it, at the start of a cache line."""
        n_bytes = prod(shape) * dtype.itemsize
        if self._used_bytes + n_bytes > len(self._slab):
            self._slab, self._used_bytes = in_large_pages(max(n_bytes, _SLAB_BYTES)), 0
        part = self._slab[self._used_bytes : self._used_bytes + n_bytes]
        self._used_bytes += -(-n_bytes // _LINE_BYTES) * _LINE_BYTES
        return part.view(dtype).view(*shape)
