"""Which sealed block goes first when the pool needs room.

A policy holds only the candidates: sealed blocks that nobody references. The pool inserts a block when its last
reference goes and removes it when it is referenced again, so a policy never has to ask whether a victim is in use.
"""

from collections import OrderedDict
from typing import Protocol

from mooncake_proto.ids import BlockId


class EvictionPolicy(Protocol):
    """Order of eviction over the candidates. Every method but :meth:`order` is O(1) or O(log n)."""

    def insert(self, block: BlockId) -> None:
        """*block* was just used for the last time so far, and may be evicted from now on."""

    def remove(self, block: BlockId) -> None:
        """*block* is referenced again. It must be a candidate."""

    def evict(self) -> BlockId:
        """Take the next victim out and return it. There must be a candidate."""

    def order(self) -> list[BlockId]:
        """All candidates, next victim first. Changes nothing; for tests and reports."""

    def __len__(self) -> int: ...


class LruEviction:
    """Least recently used first; of blocks given up together, the one inserted first."""

    def __init__(self) -> None:
        # An OrderedDict, since taking the first key of a plain dict again and again is quadratic.
        self._candidates: OrderedDict[BlockId, None] = OrderedDict()

    def insert(self, block: BlockId) -> None:
        self._candidates[block] = None

    def remove(self, block: BlockId) -> None:
        del self._candidates[block]

    def evict(self) -> BlockId:
        return self._candidates.popitem(last=False)[0]

    def order(self) -> list[BlockId]:
        return list(self._candidates)

    def __len__(self) -> int:
        return len(self._candidates)
