"""Which nodes hold whole stretches of a chain, remembered, so that looking up a long prefix need not walk it all.

A key is hashed over everything before it, so it always stands at the same depth, and the last key of a stretch says
what the stretch consists of. A change of any of its keys makes the answer for a stretch unknown until it is asked for
again; so it is right whatever is evicted, root or leaf.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import and_
from typing import Final

from mooncake_proto.ids import BlockKey

SEGMENT_BLOCKS: Final = 32
_NOBODY: Final = repeat(0)


class SegmentMemo:
    """For each remembered stretch of SEGMENT_BLOCKS keys, the AND of what *masks* has for them.

    A stretch is remembered from the second time on that it is asked for while somebody holds all of it: chains that
    come once cost nothing. At most *max_segments* are, the longest known go first; each takes about 4 KiB.
    """

    def __init__(self, masks: Mapping[BlockKey, int], *, max_segments: int) -> None:
        self._masks = masks
        self._max_segments = max_segments
        self.commons: dict[BlockKey, int] = {}
        self._members: dict[BlockKey, tuple[BlockKey, ...]] = {}
        self._segment_of: dict[BlockKey, BlockKey] = {}
        self._asked: set[BlockKey] = set()

    def common(self, keys: Sequence[BlockKey], start: int) -> int:
        """Nodes that hold all of the stretch of *keys* from *start* on."""
        last = keys[start + SEGMENT_BLOCKS - 1]
        known = self.commons.get(last)
        if known is not None:
            return known
        stretch = keys[start : start + SEGMENT_BLOCKS]
        common = reduce(and_, map(self._masks.get, stretch, _NOBODY))
        if common and (last in self._members or self._is_worth_it(last)):
            self._remember(last, tuple(stretch))
            self.commons[last] = common
        return common

    def changed(self, key: BlockKey) -> None:
        """The mask of *key* is another one now."""
        last = self._segment_of.get(key)
        if last is not None:
            self.commons.pop(last, None)

    def _is_worth_it(self, last: BlockKey) -> bool:
        if last in self._asked:
            self._asked.discard(last)
            return True
        if len(self._asked) >= self._max_segments:
            self._asked.clear()
        self._asked.add(last)
        return False

    def _remember(self, last: BlockKey, stretch: tuple[BlockKey, ...]) -> None:
        if last in self._members:
            return
        if len(self._members) >= self._max_segments:
            oldest = next(iter(self._members))
            self.commons.pop(oldest, None)
            for key in self._members.pop(oldest):
                self._segment_of.pop(key, None)
        self._members[last] = stretch
        for key in stretch:
            self._segment_of[key] = last
