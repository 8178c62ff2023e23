"""Who holds which part of a stretch of a chain, remembered, so that looking up a long prefix need not walk it all.

A key is hashed over everything before it, so it always stands at the same depth, and the last key of a stretch says
what the stretch consists of. A change of any of its keys makes the answer for a stretch unknown until it is asked for
again; so it is right whatever is evicted, root or leaf.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, repeat
from operator import and_
from typing import Final

from mooncake_proto.ids import BlockKey

SEGMENT_BLOCKS: Final = 32
LONG_BLOCKS: Final = 8 * SEGMENT_BLOCKS
_NOBODY: Final = repeat(0)

Steps = tuple[tuple[int, int], ...]
"""(offset, nodes that hold the stretch up to and including that offset), at 0 and wherever somebody drops out."""


class SegmentMemo:
    """The steps of stretches of SEGMENT_BLOCKS keys, from *masks*, which maps a key to the nodes that hold it.

    A stretch is remembered from the second time on that it is asked for while somebody holds its first key: chains
    that come once cost nothing. At most *max_segments* are, the longest known go first; each takes about 4 KiB.
    Where all stretches of LONG_BLOCKS keys are remembered, so is what they come to together. What is left at the end of
    a chain is remembered by its last key as well, as many again.
    """

    def __init__(self, masks: Mapping[BlockKey, int], *, max_segments: int) -> None:
        self._masks = masks
        self._max_segments = max_segments
        self.known: dict[BlockKey, Steps] = {}
        self.known_long: dict[BlockKey, Steps] = {}
        self._long_of: dict[BlockKey, BlockKey] = {}
        self._members: dict[BlockKey, tuple[BlockKey, ...]] = {}
        self._segment_of: dict[BlockKey, BlockKey] = {}
        self._tails: dict[BlockKey, tuple[Sequence[BlockKey], Steps]] = {}
        self._tail_of: dict[BlockKey, BlockKey] = {}
        self._asked: set[BlockKey] = set()

    def steps(self, keys: Sequence[BlockKey], start: int) -> Steps:
        """Of the stretch of *keys* from *start* on. ``known`` has them by its last key, perhaps."""
        last = keys[start + SEGMENT_BLOCKS - 1]
        known = self.known.get(last)
        if known is not None:
            return known
        stretch = keys[start : start + SEGMENT_BLOCKS]
        steps = _steps(list(accumulate(map(self._masks.get, stretch, _NOBODY), and_)))
        if steps[0][1] and (last in self._members or self._is_worth_it(last)):
            self._remember(last, tuple(stretch))
            self.known[last] = steps
        return steps

    def long_steps(self, keys: Sequence[BlockKey], start: int) -> Steps:
        """Of LONG_BLOCKS of *keys* from *start* on. ``known_long`` has them by the last of these keys, perhaps."""
        end = start + LONG_BLOCKS
        steps: list[tuple[int, int]] = []
        for at in range(start, end, SEGMENT_BLOCKS):
            for offset, holders in self.steps(keys, at):
                left = steps[-1][1] & holders if steps else holders
                if not steps or left != steps[-1][1]:
                    steps.append((at - start + offset, left))
        lasts = keys[start + SEGMENT_BLOCKS - 1 : end : SEGMENT_BLOCKS]
        if all(last in self.known for last in lasts):
            self.known_long[keys[end - 1]] = tuple(steps)
            self._long_of.update(dict.fromkeys(lasts, keys[end - 1]))
        return tuple(steps)

    def tail_steps(self, tail: Sequence[BlockKey]) -> Steps:
        """Of what is left of a chain, less than a segment.

        A tail is compared with the one that is known by its last key: it is short, and so need not be of a chain."""
        last = tail[-1]
        known = self._tails.get(last)
        if known is not None and known[0] == tail:
            return known[1]
        steps = _steps(list(accumulate(map(self._masks.get, tail, _NOBODY), and_)))
        if steps[0][1] and self._is_worth_it(last):
            self._remember_tail(last, tail, steps)
        return steps

    def changed(self, key: BlockKey) -> None:
        """The mask of *key* is another one now."""
        last = self._segment_of.get(key)
        if last is not None:
            self._forget(last)
        tail = self._tail_of.get(key)
        if tail is not None:
            self._forget_tail(tail)

    def all_changed(self, keys: Sequence[BlockKey]) -> None:
        """As :meth:`changed` for each of *keys*."""
        for key in (self._segment_of.keys() & keys) | (self._tail_of.keys() & keys):
            self.changed(key)

    def _forget(self, last: BlockKey) -> None:
        self.known.pop(last, None)
        long = self._long_of.pop(last, None)
        if long is not None:
            self.known_long.pop(long, None)

    def _forget_tail(self, last: BlockKey) -> None:
        tail, _ = self._tails.pop(last)
        for key in tail:
            self._tail_of.pop(key, None)  # the same key twice: no chain, but nobody forbids it

    def _remember_tail(self, last: BlockKey, tail: Sequence[BlockKey], steps: Steps) -> None:
        """A key is in one tail at most: of chains that end a few blocks apart the last one that was asked for."""
        for key in tail:
            other = self._tail_of.get(key)
            if other is not None:
                self._forget_tail(other)
        if len(self._tails) >= self._max_segments:
            self._forget_tail(next(iter(self._tails)))
        self._tails[last] = tail, steps
        self._tail_of.update(dict.fromkeys(tail, last))

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
            self._forget(oldest)
            for key in self._members.pop(oldest):
                self._segment_of.pop(key, None)
        self._members[last] = stretch
        self._segment_of.update(dict.fromkeys(stretch, last))


def _steps(holders: list[int]) -> Steps:
    """*holders*: for each offset, who holds everything up to it."""
    if holders[0] == holders[-1]:
        return ((0, holders[0]),)
    changes = [at for at in range(1, len(holders)) if holders[at] != holders[at - 1]]
    return tuple((at, holders[at]) for at in (0, *changes))
