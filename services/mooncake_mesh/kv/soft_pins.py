"""Blocks that somebody asked to keep for a while: they are evicted after all others, and only where nothing else helps.

(A hard pin is a reference with a lease: :meth:`~mooncake_mesh.kv.block_pool.BlockPool.hold`.)
"""

from collections.abc import Iterable, Set

from mooncake_mesh.kv.leases import LeaseTable
from mooncake_proto.ids import BlockId


class SoftPins:
    """Which blocks are pinned, by whom and until when. A block is pinned as long as anybody pins it."""

    def __init__(self) -> None:
        self._blocks: dict[str, dict[BlockId, None]] = {}
        self._pinners: dict[BlockId, set[str]] = {}
        self._leases = LeaseTable()

    @property
    def pinned(self) -> Set[BlockId]:
        """All blocks that are pinned: a view, which changes with them."""
        return self._pinners.keys()

    def pin(self, pinner: str, blocks: Iterable[BlockId], until_s: float) -> None:
        """Add *blocks* to those of *pinner*, all of which are pinned until *until_s* from now on."""
        mine = self._blocks.setdefault(pinner, {})
        for block in blocks:
            mine[block] = None
            self._pinners.setdefault(block, set()).add(pinner)
        self._leases.grant(pinner, until_s)

    def unpin(self, pinner: str) -> list[BlockId]:
        """Forget *pinner*, which may be unknown; the blocks that nobody pins any more."""
        self._leases.end(pinner)
        freed = []
        for block in self._blocks.pop(pinner, ()):
            pinners = self._pinners[block]
            pinners.discard(pinner)
            if not pinners:
                del self._pinners[block]
                freed.append(block)
        return freed

    def expire(self, now_s: float) -> list[BlockId]:
        """As :meth:`unpin`, for all whose time is over (``now_s >= until_s``)."""
        return [block for pinner in self._leases.expired(now_s) for block in self.unpin(pinner)]

    def forget(self, block: BlockId) -> None:
        """*block* holds something else now."""
        for pinner in self._pinners.pop(block, ()):
            del self._blocks[pinner][block]
