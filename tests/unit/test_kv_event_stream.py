from collections.abc import Iterable

import pytest

from mooncake_mesh.kv.block_pool import PoolEvent
from mooncake_mesh.kv.event_stream import EventLog, FeedRefused, NodeFeed, Unsendable
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_proto.errors import MalformedMessage
from mooncake_proto.ids import BlockKey, Incarnation, NodeId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents, KvEventsAck, KvSnapshot

NODE = NodeId("node")
NOW, OLD = Incarnation("now"), Incarnation("old")


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def changes(*names: str) -> list[PoolEvent]:
    """``+a`` stored, ``-a`` removed."""
    kinds = {"+": KvChange.STORED, "-": KvChange.REMOVED}
    return [PoolEvent(change=kinds[name[0]], key=key(name[1:])) for name in names]


def log_of(*names: str, replay_events: int = 100) -> EventLog:
    log = EventLog(NODE, NOW, replay_events=replay_events)
    log.append(changes(*names))
    return log


def batch(log: EventLog, next_seq: int, max_events: int = 100) -> KvEvents:
    made = log.batch(next_seq, max_events=max_events)
    assert isinstance(made, KvEvents)
    return made


def known(index: PrefixIndex, names: Iterable[str]) -> str:
    return "".join(name for name in names if index.prefix_blocks([key(name)]))


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(max_entries=1_000)


def test_batches_are_cut_and_continue(index: PrefixIndex) -> None:
    log = log_of("+a", "+b", "-a")
    feed = NodeFeed(index, NODE, NOW)
    first = batch(log, 1, max_events=2)
    assert (first.first_seq, len(first.events)) == (1, 2)
    assert feed.feed(first) == KvEventsAck(next_seq=3, resync=False)
    assert feed.feed(batch(log, 3)) == KvEventsAck(next_seq=4, resync=False)
    assert known(index, "ab") == "b"
    assert log.batch(4, max_events=1) is Unsendable.NOTHING_NEW


def test_a_gap_is_asked_for_and_replayed(index: PrefixIndex) -> None:
    log = log_of("+a", "+b", "+c")
    feed = NodeFeed(index, NODE, NOW)
    ack = feed.feed(batch(log, 3))
    assert ack == KvEventsAck(next_seq=1, resync=True)
    assert known(index, "abc") == ""
    feed.feed(batch(log, ack.next_seq))
    assert known(index, "abc") == "abc"


def test_a_late_replay_does_not_resurrect_a_removed_block(index: PrefixIndex) -> None:
    log = log_of("+a")
    feed = NodeFeed(index, NODE, NOW)
    stored = batch(log, 1)
    log.append(changes("-a"))
    assert feed.feed(batch(log, 2)) == KvEventsAck(next_seq=1, resync=True)
    feed.feed(batch(log, 1))
    assert feed.feed(stored) == KvEventsAck(next_seq=3, resync=False)
    assert known(index, "a") == ""


def test_a_batch_that_overlaps_is_applied_from_the_first_new_event(index: PrefixIndex) -> None:
    log = log_of("+a", "-a")
    feed = NodeFeed(index, NODE, NOW)
    feed.feed(batch(log, 1))
    log.append(changes("+b"))
    assert feed.feed(batch(log, 1)) == KvEventsAck(next_seq=4, resync=False)
    assert known(index, "ab") == "b"


def test_events_that_left_the_log_need_a_snapshot(index: PrefixIndex) -> None:
    log = log_of("+a", "+b", "+c", replay_events=2)
    feed = NodeFeed(index, NODE, NOW)
    assert log.batch(1, max_events=10) is Unsendable.EVENTS_GONE
    assert log.batch(99, max_events=10) is Unsendable.EVENTS_GONE
    assert feed.snapshot(log.snapshot([key("a"), key("b"), key("c")])) == KvEventsAck(next_seq=4, resync=False)
    assert known(index, "abc") == "abc"
    log.append(changes("-b"))
    feed.feed(batch(log, 4))
    assert known(index, "abc") == "ac"


def test_an_old_snapshot_is_ignored(index: PrefixIndex) -> None:
    log = log_of("+a")
    feed = NodeFeed(index, NODE, NOW)
    late = log.snapshot([key("a")])
    log.append(changes("-a"))
    feed.feed(batch(log, 1))
    assert feed.snapshot(late) == KvEventsAck(next_seq=3, resync=False)
    assert known(index, "a") == ""


def test_a_probe_finds_out_about_a_restarted_conductor(index: PrefixIndex) -> None:
    log = log_of("+a")
    feed = NodeFeed(index, NODE, NOW)
    assert feed.feed(log.probe()) == KvEventsAck(next_seq=1, resync=True)
    feed.feed(batch(log, 1))
    assert feed.feed(log.probe()) == KvEventsAck(next_seq=2, resync=False)


def test_another_incarnation_is_refused(index: PrefixIndex) -> None:
    feed = NodeFeed(index, NODE, NOW)
    old = EventLog(NODE, OLD, replay_events=10)
    old.append(changes("+a"))
    refused = FeedRefused(expected=NOW, got=OLD)
    assert feed.feed(batch(old, 1)) == refused
    assert feed.snapshot(old.snapshot([key("a")])) == refused
    assert index.entries == 0


def test_a_new_incarnation_starts_empty(index: PrefixIndex) -> None:
    NodeFeed(index, NODE, OLD)
    index.replace(NODE, [key("a")])
    feed = NodeFeed(index, NODE, NOW)
    assert (index.entries, feed.next_seq, feed.incarnation) == (0, 1, NOW)


@pytest.mark.parametrize(
    ("first_seq", "bad_key", "path"),
    [(0, None, "first_seq"), (1, "zz", "events[1].key"), (1, "ab" * 15, "events[1].key"), (1, "", "events[1].key")],
)
def test_a_bad_batch_changes_nothing(index: PrefixIndex, first_seq: int, bad_key: str | None, path: str) -> None:
    feed = NodeFeed(index, NODE, NOW)
    good = KvEvent(change=KvChange.STORED, key=key("a").hex())
    bad = good if bad_key is None else KvEvent(change=KvChange.STORED, key=bad_key)
    with pytest.raises(MalformedMessage) as caught:
        feed.feed(KvEvents(node_id=NODE, incarnation=NOW, first_seq=first_seq, events=(good, bad)))
    assert caught.value.path == path
    assert (index.entries, feed.next_seq) == (0, 1)


def test_a_snapshot_tells_what_is_on_ssd_only(index: PrefixIndex) -> None:
    feed = NodeFeed(index, NODE, NOW)
    log = log_of("+a", "+b", "+c")
    feed.snapshot(log.snapshot([key("a")], [key("b"), key("c")]))
    chain = [key("a"), key("b"), key("c")]
    assert index.ssd_starts(chain, index.prefix_blocks(chain)) == {NODE: 1}
    log.append([PoolEvent(change=KvChange.STORED, key=key("b"))])
    feed.feed(batch(log, 4))
    assert index.ssd_starts(chain, index.prefix_blocks(chain)) == {NODE: 2}, "b is in the arena again"


@pytest.mark.parametrize(
    ("seq", "keys", "ssd_keys", "path"),
    [
        (-1, b"", 0, "seq"),
        (2**63 - 1, b"", 0, "seq"),
        (3, b"x" * 17, 0, "keys"),
        (3, b"x" * 16, 2, "ssd_keys"),
        (3, b"x" * 16, -1, "ssd_keys"),
    ],
)
def test_a_bad_snapshot_changes_nothing(index: PrefixIndex, seq: int, keys: bytes, ssd_keys: int, path: str) -> None:
    feed = NodeFeed(index, NODE, NOW)
    feed.feed(batch(log_of("+a"), 1))
    with pytest.raises(MalformedMessage) as caught:
        feed.snapshot(KvSnapshot(node_id=NODE, incarnation=NOW, seq=seq, keys=keys, ssd_keys=ssd_keys))
    assert caught.value.path == path
    assert (known(index, "a"), feed.next_seq) == ("a", 2)
