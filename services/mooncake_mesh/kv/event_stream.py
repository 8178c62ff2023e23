"""The stream of KV events of one messenger incarnation: numbered at the sender, fenced at the receiver.

Both ends are pure. :class:`EventLog` (messenger) numbers what its pool reports, keeps the last events and can send
any of them again, or a snapshot where they are gone. :class:`NodeFeed` (conductor) applies them to the index strictly
in order: what it has seen before is ignored, what comes too early changes nothing and is asked for. So an old STORED
that is replayed can never undo a newer REMOVED, and after any loss, repetition or reordering the index becomes equal
to the pool as soon as one exchange gets through.
"""

import enum
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.kv.block_hash import join_keys, split_keys
from mooncake_mesh.kv.block_pool import PoolEvent
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_proto.errors import MalformedMessage
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey, Incarnation, NodeId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents, KvEventsAck, KvSnapshot, KvTier

_MOST_EVENTS: Final = 1 << 62
"""Of one life, more than there can be: every number after it has room in a message too."""


class Unsendable(enum.Enum):
    """Why there is no batch. NOTHING_NEW: the receiver has all. EVENTS_GONE: only a snapshot helps."""

    NOTHING_NEW = "nothing_new"
    EVENTS_GONE = "events_gone"


class EventLog:
    """Sender's side. Keeps the last ``replay_events`` events; older ones can only be told by a snapshot."""

    def __init__(self, node_id: NodeId, incarnation: Incarnation, *, replay_events: int) -> None:
        self._node_id = node_id
        self._incarnation = incarnation
        self._events: deque[KvEvent] = deque(maxlen=replay_events)
        self._next_seq = 1

    @property
    def next_seq(self) -> int:
        """Number that the next event will get."""
        return self._next_seq

    def append(self, events: Iterable[PoolEvent]) -> None:
        """Number *events* in the order the pool reported them."""
        for event in events:
            self._events.append(KvEvent(change=event.change, key=event.key.hex(), tier=event.tier))
            self._next_seq += 1

    def batch(self, next_seq: int, *, max_events: int) -> KvEvents | Unsendable:
        """At most *max_events* events from *next_seq* on, which is what the receiver said it expects."""
        if next_seq == self._next_seq:
            return Unsendable.NOTHING_NEW
        first_kept = self._next_seq - len(self._events)
        if not first_kept <= next_seq < self._next_seq:
            return Unsendable.EVENTS_GONE
        start = next_seq - first_kept
        chosen = tuple(itertools.islice(self._events, start, start + max_events))
        return KvEvents(node_id=self._node_id, incarnation=self._incarnation, first_seq=next_seq, events=chosen)

    def probe(self) -> KvEvents:
        """A batch without events: its answer tells what the receiver expects, for instance after it restarted."""
        return KvEvents(node_id=self._node_id, incarnation=self._incarnation, first_seq=self._next_seq, events=())

    def snapshot(self, in_arena: Sequence[BlockKey], on_ssd: Sequence[BlockKey] = ()) -> KvSnapshot:
        """All keys of the node now, those that are on SSD only by themselves.

        Every event that was reported must have been appended before.
        """
        return KvSnapshot(
            node_id=self._node_id,
            incarnation=self._incarnation,
            seq=self._next_seq - 1,
            keys=join_keys([*in_arena, *on_ssd]),
            ssd_keys=len(on_ssd),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRefused:
    """The message is of another incarnation than the one that registered; nothing was applied."""

    expected: Incarnation
    got: Incarnation


class NodeFeed:
    """Receiver's side, for one registered messenger incarnation. The only writer of its node's part of the index.

    Make a new feed when a new incarnation registers: it starts from an empty part of the index and expects event 1.
    In its acknowledgements ``next_seq`` is always what it expects next; ``resync`` says that what came does not
    connect to it.
    """

    def __init__(self, index: PrefixIndex, node_id: NodeId, incarnation: Incarnation) -> None:
        self._index = index
        self._node_id = node_id
        self._incarnation = incarnation
        self._next_seq = 1
        index.drop_node(node_id)

    @property
    def next_seq(self) -> int:
        return self._next_seq

    @property
    def incarnation(self) -> Incarnation:
        return self._incarnation

    def feed(self, batch: KvEvents) -> KvEventsAck | FeedRefused:
        """Apply the events not seen yet, all or nothing. Raises MalformedMessage for a bad number or key."""
        if batch.incarnation != self._incarnation:
            return FeedRefused(expected=self._incarnation, got=batch.incarnation)
        if batch.first_seq < 1:
            raise MalformedMessage(f"must be at least 1, got {batch.first_seq}", path="first_seq")
        if batch.first_seq > self._next_seq:
            return KvEventsAck(next_seq=self._next_seq, resync=True)
        seen = self._next_seq - batch.first_seq
        changes = [(event, _key(event.key, i)) for i, event in enumerate(batch.events) if i >= seen]
        for (change, tier), run in itertools.groupby(changes, key=_kind):
            if change is KvChange.STORED:
                self._index.apply_all_stored(self._node_id, [key for _, key in run], tier)
            else:
                for _, key in run:
                    self._index.apply_removed(self._node_id, key)
        self._next_seq += len(changes)
        return KvEventsAck(next_seq=self._next_seq, resync=False)

    def snapshot(self, snapshot: KvSnapshot) -> KvEventsAck | FeedRefused:
        """Replace the node's keys, unless the snapshot is older than what was applied. Raises MalformedMessage."""
        if snapshot.incarnation != self._incarnation:
            return FeedRefused(expected=self._incarnation, got=snapshot.incarnation)
        if not 0 <= snapshot.seq < _MOST_EVENTS:
            raise MalformedMessage(f"must be from 0 to {_MOST_EVENTS - 1}, got {snapshot.seq}", path="seq")
        if snapshot.seq + 1 >= self._next_seq:
            try:
                keys = list(split_keys(snapshot.keys))
            except ValueError as error:
                raise MalformedMessage(str(error), path="keys") from error
            n_arena = len(keys) - snapshot.ssd_keys
            if not 0 <= n_arena <= len(keys):
                raise MalformedMessage(f"{snapshot.ssd_keys} of {len(keys)} keys", path="ssd_keys")
            self._index.replace(self._node_id, keys[:n_arena], keys[n_arena:])
            self._next_seq = snapshot.seq + 1
        return KvEventsAck(next_seq=self._next_seq, resync=False)


def _kind(change: tuple[KvEvent, BlockKey]) -> tuple[KvChange, KvTier]:
    return (change[0].change, change[0].tier)


def _key(text: str, position: int) -> BlockKey:
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise MalformedMessage("not hexadecimal", path=f"events[{position}].key") from error
    if len(key) != BLOCK_KEY_BYTES:
        raise MalformedMessage(f"{len(key)} bytes, not {BLOCK_KEY_BYTES}", path=f"events[{position}].key")
    return BlockKey(key)
