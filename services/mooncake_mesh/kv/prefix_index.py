"""Which node holds which block, as the conductor knows it: a hint for placement, never a promise.

Each key maps to an integer with one bit per node, so the nodes that hold a whole prefix are the AND along its chain,
and one walk of the chain gives every node's prefix at once: a node's prefix ends where its bit drops out. Eviction on
a node need not have been leaf-first for that. Stretches that are asked for often are walked in one step.

Memory is what an index of millions of entries is made of. An entry is one (key, node) pair. A key costs about 64
bytes and its place in the map 60 to 100; each pair adds 30 to 55 in its node's set (and 64 for that node's own copy
of a key which another node told first). Keys that one node alone holds share its bit as their value. The number of
pairs is capped. The tier of a block is kept only where it is not DRAM: another 100 to 150 bytes for a key on SSD.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from typing import Final

from mooncake_mesh.kv.prefix_segments import LONG_BLOCKS, SEGMENT_BLOCKS, SegmentMemo, Steps
from mooncake_proto.ids import BlockKey, NodeId
from mooncake_proto.kvcache import KvTier

_MAX_SEGMENTS: Final = 8_192
_MAX_NAMES: Final = 1_024


class PrefixIndex:
    """Key → nodes. Mutations take O(1) per pair they change; nothing is ever scanned to count.

    When more than ``max_entries`` pairs would be known, the keys that have been known longest are forgotten with all
    their nodes. A chain loses its root that way and matches no more, so the cap belongs above the number of blocks of
    the cluster: it guards the process, it is no eviction policy.
    """

    def __init__(self, *, max_entries: int) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries must be at least 1, got {max_entries}")
        self._max_entries = max_entries
        self._entries = 0
        self._masks: dict[BlockKey, int] = {}
        self._ssd_masks: dict[BlockKey, int] = {}  # who of them has it on SSD only
        self._segments = SegmentMemo(self._masks, max_segments=_MAX_SEGMENTS)
        self._arrivals = _Arrivals()
        self._slot_of: dict[NodeId, int] = {}
        self._slots: list[_Slot | None] = []
        self._names: dict[int, tuple[NodeId, ...]] = {}

    @property
    def entries(self) -> int:
        """Known (key, node) pairs."""
        return self._entries

    @property
    def n_keys(self) -> int:
        return len(self._masks)

    def blocks(self, node: NodeId) -> int:
        """How many keys *node* is known to hold."""
        slot = self._slot_of.get(node)
        return 0 if slot is None else len(self._at(slot).keys)

    def nodes(self) -> list[NodeId]:
        """Nodes that were told of and not dropped, oldest first."""
        return list(self._slot_of)

    def prefix_blocks(self, keys: Sequence[BlockKey]) -> dict[NodeId, int]:
        """Blocks of the longest prefix of *keys* on each node that holds at least the first. Changes nothing."""
        found: dict[NodeId, int] = {}
        if not keys:
            return found
        alive = self._masks.get(keys[0], 0)
        memo, n = self._segments, len(keys)
        start = 0
        while alive and n - start >= LONG_BLOCKS:
            steps = memo.known_long.get(keys[start + LONG_BLOCKS - 1]) or memo.long_steps(keys, start)
            if alive & steps[-1][1] != alive:  # somebody drops out
                alive = self._step_down(found, alive, steps, start)
            start += LONG_BLOCKS
        while alive and n - start >= SEGMENT_BLOCKS:
            steps = memo.known.get(keys[start + SEGMENT_BLOCKS - 1]) or memo.steps(keys, start)
            if alive & steps[-1][1] != alive:
                alive = self._step_down(found, alive, steps, start)
            start += SEGMENT_BLOCKS
        if alive and start < n:
            steps = memo.tail_steps(keys[start:])
            if alive & steps[-1][1] != alive:
                alive = self._step_down(found, alive, steps, start)
        if alive:
            self._record(found, alive, n)
        return found

    def ssd_starts(self, keys: Sequence[BlockKey], prefix_blocks: Mapping[NodeId, int]) -> dict[NodeId, int]:
        """How many blocks of its prefix of *keys* each node has before the first that it must read from SSD.

        *prefix_blocks* is what :meth:`prefix_blocks` said. Nodes that have all of theirs in DRAM are left out.
        """
        found: dict[NodeId, int] = {}
        if not self._ssd_masks or not prefix_blocks:
            return found
        pending = sum(self._at(self._slot_of[node]).bit for node in prefix_blocks)
        longest = max(prefix_blocks.values())
        for depth, on_ssd in enumerate(map(self._ssd_masks.get, keys[:longest], repeat(0))):
            if here := on_ssd & pending:
                pending ^= here
                for number in _bits(here):
                    node = self._at(number).node
                    if depth < prefix_blocks[node]:
                        found[node] = depth
                if not pending:
                    break
        return found

    def apply_stored(self, node: NodeId, key: BlockKey, tier: KvTier = KvTier.DRAM) -> None:
        """*node* holds *key* in *tier*. Known already: no change but that of the tier."""
        number = self._slot_of.get(node)
        slot = self._slots[self._slot_for(node) if number is None else number]
        assert slot is not None
        if tier is KvTier.SSD:
            self._ssd_masks[key] = self._ssd_masks.get(key, 0) | slot.bit
        elif self._ssd_masks:
            self._leave_ssd(slot, key)
        if key in slot.keys:
            return
        mask = self._masks.get(key)
        if mask is None:
            self._arrivals.arrived(key)
        self._masks[key] = slot.bit if mask is None else mask | slot.bit
        self._segments.changed(key)
        slot.keys.add(key)
        self._entries += 1
        while self._entries > self._max_entries:
            self._forget_oldest()

    def apply_all_stored(self, node: NodeId, keys: Sequence[BlockKey], tier: KvTier = KvTier.DRAM) -> None:
        """The same as :meth:`apply_stored` for each of *keys*, in less time."""
        is_plain = tier is KvTier.DRAM and not self._ssd_masks and self._entries + len(keys) <= self._max_entries
        if not keys or not is_plain:
            for key in keys:
                self.apply_stored(node, key, tier)
            return
        slot, masks = self._at(self._slot_for(node)), self._masks
        fresh = [key for key in dict.fromkeys(keys) if key not in slot.keys]
        if not fresh:
            return
        new = [key for key in fresh if key not in masks]
        if len(new) < len(fresh):
            others = [key for key in fresh if key in masks] if new else fresh
            bit = slot.bit
            for key in others:
                masks[key] |= bit
        masks.update(dict.fromkeys(new, slot.bit))
        self._arrivals.all_arrived(new)
        self._segments.all_changed(fresh)
        slot.keys.update(fresh)
        self._entries += len(fresh)

    def apply_removed(self, node: NodeId, key: BlockKey) -> None:
        """*node* holds *key* no more. Not known: no change."""
        number = self._slot_of.get(node)
        if number is None:
            return
        slot = self._at(number)
        if key in slot.keys:
            slot.keys.remove(key)
            self._clear_bit(slot, key)

    def replace(self, node: NodeId, keys: Iterable[BlockKey], on_ssd: Iterable[BlockKey] = ()) -> None:
        """*node* holds exactly *keys* in DRAM and those *on_ssd*. What it held before and holds still keeps its age."""
        slot = self._at(self._slot_for(node))
        wanted = dict.fromkeys(on_ssd, KvTier.SSD) | dict.fromkeys(keys, KvTier.DRAM)
        for key in slot.keys - wanted.keys():
            self.apply_removed(node, key)
        for tier, run in groupby(wanted.items(), key=_tier):
            self.apply_all_stored(node, [key for key, _ in run], tier)

    def drop_node(self, node: NodeId) -> None:
        """Forget *node* and everything about it."""
        number = self._slot_of.pop(node, None)
        if number is None:
            return
        slot = self._at(number)
        self._slots[number] = None
        for key in slot.keys:
            self._clear_bit(slot, key)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _at(self, number: int) -> "_Slot":
        slot = self._slots[number]
        assert slot is not None
        return slot

    def _slot_for(self, node: NodeId) -> int:
        number = self._slot_of.get(node)
        if number is None:
            number = self._slots.index(None) if None in self._slots else len(self._slots)
            if number == len(self._slots):
                self._slots.append(None)
            self._slots[number] = _Slot(node, number)
            self._names.clear()
            self._slot_of[node] = number
        return number

    def _step_down(self, found: dict[NodeId, int], alive: int, steps: Steps, start: int) -> int:
        """Who of *alive* is left after a stretch from *start* on; record those who are not."""
        for offset, holders in steps:
            still = alive & holders
            if still != alive:
                self._record(found, alive ^ still, start + offset)
                alive = still
        return alive

    def _record(self, found: dict[NodeId, int], mask: int, depth: int) -> None:
        names = self._names.get(mask)
        if names is None:
            if len(self._names) >= _MAX_NAMES:
                self._names.clear()
            names = self._names[mask] = tuple(self._at(number).node for number in _bits(mask))
        for node in names:
            found[node] = depth

    def _clear_bit(self, slot: "_Slot", key: BlockKey) -> None:
        mask = self._masks[key] ^ slot.bit
        self._leave_ssd(slot, key)
        self._segments.changed(key)
        if mask:
            self._masks[key] = mask
        else:
            del self._masks[key]
            self._arrivals.gone(key)
            self._arrivals.compact(self._masks)
        self._entries -= 1

    def _leave_ssd(self, slot: "_Slot", key: BlockKey) -> None:
        mask = self._ssd_masks.get(key, 0)
        if mask & slot.bit:
            if mask == slot.bit:
                del self._ssd_masks[key]
            else:
                self._ssd_masks[key] = mask ^ slot.bit

    def _forget_oldest(self) -> None:
        key = self._arrivals.pop_oldest()
        self._ssd_masks.pop(key, None)
        self._segments.changed(key)
        for number in _bits(self._masks.pop(key)):
            self._at(number).keys.remove(key)
            self._entries -= 1


class _Slot:
    """One node's bit and keys. ``bit`` is one object, shared by the map's values."""

    __slots__ = ("bit", "keys", "node")

    def __init__(self, node: NodeId, number: int) -> None:
        self.node = node
        self.bit = 1 << number
        self.keys: set[BlockKey] = set()


class _Arrivals:
    """Keys in order of arrival: 8 bytes a key, where an OrderedDict would take over 60.

    A key that went leaves its place in the queue behind. Places of one key leave in the order they came, so counting
    the stale ones is enough to tell them from the valid one.
    """

    def __init__(self) -> None:
        self._queue: deque[BlockKey] = deque()
        self._stale: dict[BlockKey, int] = {}
        self._n_stale = 0

    def arrived(self, key: BlockKey) -> None:
        self._queue.append(key)

    def all_arrived(self, keys: Iterable[BlockKey]) -> None:
        self._queue.extend(keys)

    def gone(self, key: BlockKey) -> None:
        self._stale[key] = self._stale.get(key, 0) + 1
        self._n_stale += 1

    def compact(self, present: dict[BlockKey, int]) -> None:
        """Drop the stale places once they outnumber *present*, the keys in order of arrival (as dicts have them)."""
        if self._n_stale > 1024 + len(present):
            self._queue = deque(present)
            self._stale.clear()
            self._n_stale = 0

    def pop_oldest(self) -> BlockKey:
        while True:
            key = self._queue.popleft()
            stale = self._stale.get(key)
            if stale is None:
                return key
            self._n_stale -= 1
            if stale == 1:
                del self._stale[key]
            else:
                self._stale[key] = stale - 1


def _tier(known: tuple[BlockKey, KvTier]) -> KvTier:
    return known[1]


def _bits(mask: int) -> Iterator[int]:
    """Numbers of the set bits, ascending."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
