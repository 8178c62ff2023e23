"""Which sealed block goes first when the pool needs room: the policies, by name."""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from mooncake_mesh.kv.eviction_contract import BlockHistory, EvictionPolicy
from mooncake_mesh.kv.eviction_reuse import ReuseEviction
from mooncake_proto.ids import BlockId, BlockKey


class EvictionKind(enum.Enum):
    """The policies, as they are named in the configuration."""

    LRU = "lru"
    LFU = "lfu"
    LENGTH_AWARE = "length_aware"
    REUSE = "reuse"


class LruEviction:
    """Least recently used first; of blocks given up together, the one inserted first."""

    def __init__(self) -> None:
        # An OrderedDict, since taking the first key of a plain dict again and again is quadratic.
        self._candidates: OrderedDict[BlockId, None] = OrderedDict()

    def use(self, chain: Sequence[BlockKey]) -> None:
        """Recency is in the order of insertion."""

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        self._candidates[block] = None

    def remove(self, block: BlockId) -> None:
        del self._candidates[block]

    def evict(self) -> BlockId:
        return self._candidates.popitem(last=False)[0]

    def order(self) -> Iterator[BlockId]:
        return iter(self._candidates)

    def __len__(self) -> int:
        return len(self._candidates)


Rank = tuple[int, ...]


class RankedEviction:
    """The candidate of least rank first; of equal ranks, the least recently used.

    A list per rank in use, and a heap of ranks: O(log r) for r ranks.
    """

    def __init__(self, rank: Callable[[BlockHistory], Rank]) -> None:
        """*rank* is asked once for each insertion."""
        self._rank = rank
        self._lists: dict[Rank, OrderedDict[BlockId, None]] = {}
        self._heap: list[Rank] = []  # every rank that has a list, and some that had one
        self._rank_of: dict[BlockId, Rank] = {}

    def use(self, chain: Sequence[BlockKey]) -> None:
        """Ranks come with the insertions."""

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        rank = self._rank(history)
        candidates = self._lists.get(rank)
        if candidates is None:
            candidates = self._lists[rank] = OrderedDict()
            self._push(rank)
        candidates[block] = None
        self._rank_of[block] = rank

    def remove(self, block: BlockId) -> None:
        rank = self._rank_of.pop(block)
        candidates = self._lists[rank]
        del candidates[block]
        if not candidates:
            del self._lists[rank]

    def evict(self) -> BlockId:
        while self._heap[0] not in self._lists:
            heappop(self._heap)
        block = next(iter(self._lists[self._heap[0]]))
        self.remove(block)
        return block

    def order(self) -> Iterator[BlockId]:
        return (block for rank in sorted(self._lists) for block in self._lists[rank])

    def __len__(self) -> int:
        return len(self._rank_of)

    def _push(self, rank: Rank) -> None:
        # A root that is used again and again leaves a rank behind each time.
        if len(self._heap) > 2 * len(self._lists) + 16:
            self._heap = list(self._lists)
            heapify(self._heap)
        else:
            heappush(self._heap, rank)


def lfu_eviction() -> EvictionPolicy:
    """Least often used first. Uses are counted while a block is cached and forgotten with it."""
    return RankedEviction(lambda history: (history.uses,))


def length_aware_eviction() -> EvictionPolicy:
    """LFU that gives up the later blocks of requests first among those used equally often.

    The arXiv paper's LengthAwareCache is "similar to LFU but prioritises blocks that occur later in requests". It does
    not say whether that is to keep or to evict them; only the second keeps chains matchable from their roots.
    """
    return RankedEviction(lambda history: (history.uses, -history.depth))


def eviction_policy(kind: EvictionKind) -> EvictionPolicy:
    """An empty policy of *kind*."""
    match kind:
        case EvictionKind.LRU:
            return LruEviction()
        case EvictionKind.LFU:
            return lfu_eviction()
        case EvictionKind.LENGTH_AWARE:
            return length_aware_eviction()
        case EvictionKind.REUSE:
            return ReuseEviction()
