"""What the pool and an eviction policy promise each other.

A policy holds only the candidates: sealed blocks that nobody references. The pool inserts a block when its last
reference goes and removes it when it is referenced again or freed, so a policy never has to ask whether a victim is
in use.

The blocks of a chain are inserted deepest first: of blocks that a policy ranks alike, the leaf goes before the root,
and what remains of the chain can still be matched.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mooncake_proto.ids import BlockId, BlockKey

_NO_KEY: Final = BlockKey(b"")


@dataclass(slots=True)
class BlockHistory:
    """What the pool knows of the sealed block under ``key``. The pool writes it, a policy only reads it.

    ``uses`` counts the holders since the block was sealed, the one that wrote it included. ``depth`` is the 0-based
    place of the block in its chain, as far as a holder has shown it (one that holds a chain from its middle on shows
    less).
    """

    key: BlockKey = _NO_KEY
    uses: int = 0
    depth: int = 0


class EvictionPolicy(Protocol):
    """Order of eviction over the candidates. Every method but :meth:`order` is O(1) or O(log n)."""

    def use(self, chain: Sequence[BlockKey]) -> None:
        """A holder gives up *chain*: the keys of its sealed blocks, root first.

        The insertions follow at once: those of its blocks that nobody else references. No block is inserted otherwise.
        """

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        """*block* was just used for the last time so far, and may be evicted from now on."""

    def remove(self, block: BlockId) -> None:
        """*block* is referenced again, or was freed. It must be a candidate."""

    def evict(self) -> BlockId:
        """Take the next victim out and return it. There must be a candidate."""

    def order(self) -> Iterator[BlockId]:
        """All candidates, next victim first, found as they are asked for. Nothing may change meanwhile."""

    def __len__(self) -> int: ...
