"""Aligned memory between arena and file.

Blocks are copied through it in both directions. Direct I/O needs aligned memory, which an arena block need not be; what
comes from the file is verified before it touches the arena; and the kernel moves private memory on 2 MiB pages at about
twice the rate of shared memory on 4 KiB pages, which pays for the copy.
"""

import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np
import structlog

from mooncake_mesh.messenger.store.block_file import block_checksum, slot_bytes_of
from mooncake_proto.ids import BlockId

log = structlog.get_logger(__name__)

_TARGET_BYTES: Final = 8 << 20
_MAX_SLOTS: Final = 512


class Staging:
    """``slots``: views of one slot each. Whoever uses a Staging uses it alone."""

    def __init__(self, block_bytes: int) -> None:
        slot_bytes, n_slots = slot_bytes_of(block_bytes), self.slots_for(block_bytes)
        self._block_bytes = block_bytes
        memory = mmap.mmap(-1, n_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.debug("no_huge_pages", error=str(error))
        view = memoryview(memory)
        self.slots = [view[i * slot_bytes : (i + 1) * slot_bytes] for i in range(n_slots)]

    @staticmethod
    def slots_for(block_bytes: int) -> int:
        """How many slots a Staging has for such blocks."""
        return min(_MAX_SLOTS, max(1, _TARGET_BYTES // slot_bytes_of(block_bytes)))

    def copy_out(self, arena: memoryview, blocks: Sequence[BlockId]) -> list[int]:
        """Copy *blocks* of *arena* into the first slots; the checksum of each copy. Releases the GIL."""
        for block, slot in zip(blocks, self.slots, strict=False):
            self._copy(slot[: self._block_bytes], self._block(arena, block))
        return [block_checksum(slot[: self._block_bytes]) for slot in self.slots[: len(blocks)]]

    def copy_in(self, arena: memoryview, block: BlockId, position: int) -> None:
        """Copy the slot at *position* into *block* of *arena*. Releases the GIL."""
        self._copy(self._block(arena, block), self.slots[position][: self._block_bytes])

    def _block(self, arena: memoryview, block: BlockId) -> memoryview:
        return arena[block * self._block_bytes : (block + 1) * self._block_bytes]

    def _copy(self, target: memoryview, source: memoryview) -> None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
