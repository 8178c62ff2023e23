"""The conductor's index against brute force, and the event stream against a link that loses, repeats and reorders."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_mesh.kv.block_pool import PoolEvent
from mooncake_mesh.kv.event_stream import EventLog, FeedRefused, NodeFeed, Unsendable
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.kv.prefix_segments import LONG_BLOCKS, SEGMENT_BLOCKS
from mooncake_proto.ids import BlockKey, Incarnation, NodeId
from mooncake_proto.kvcache import KvChange, KvEvents, KvEventsAck, KvSnapshot, KvTier

KEYS = [BlockKey(bytes([i]) * 16) for i in range(8)]
NODES = [NodeId(f"node-{i}") for i in range(4)]

keys = st.sampled_from(KEYS)
nodes = st.sampled_from(NODES)
chains = st.lists(keys, unique=True, max_size=8) | st.integers(0, 8).map(lambda n: KEYS[:n])


def brute_force(known: dict[NodeId, set[BlockKey]], chain: list[BlockKey]) -> dict[NodeId, int]:
    found = {}
    for node, mine in known.items():
        depth = 0
        while depth < len(chain) and chain[depth] in mine:
            depth += 1
        if depth:
            found[node] = depth
    return found


class IndexMachine(RuleBasedStateMachine):
    """Direct calls, with a cap that is often reached."""

    CAP = 14

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=self.CAP)
        self.known: dict[NodeId, set[BlockKey]] = {}
        self.on_ssd: set[tuple[NodeId, BlockKey]] = set()
        self.arrived: list[BlockKey] = []

    @rule(node=nodes, key=keys, tier=st.sampled_from(KvTier))
    def stored(self, node: NodeId, key: BlockKey, tier: KvTier) -> None:
        self.index.apply_stored(node, key, tier)
        self._store(node, key, tier)

    @rule(node=nodes, run=st.lists(keys, max_size=6), tier=st.sampled_from(KvTier))
    def all_stored(self, node: NodeId, run: list[BlockKey], tier: KvTier) -> None:
        self.index.apply_all_stored(node, run, tier)
        for key in run:
            self._store(node, key, tier)

    @rule(node=nodes, key=keys)
    def removed(self, node: NodeId, key: BlockKey) -> None:
        self.index.apply_removed(node, key)
        if node in self.known:
            self.known[node].discard(key)
        self._forget_unheld()

    @rule(node=nodes, chain=chains, n_ssd=st.integers(0, 3))
    def replaced(self, node: NodeId, chain: list[BlockKey], n_ssd: int) -> None:
        on_ssd, in_arena = chain[:n_ssd], chain[n_ssd:]
        self.index.replace(node, in_arena, on_ssd)
        self.known.setdefault(node, set()).intersection_update(chain)
        self._forget_unheld()
        for key in chain:
            self._store(node, key, KvTier.SSD if key in on_ssd else KvTier.DRAM)

    @rule(node=nodes)
    def dropped(self, node: NodeId) -> None:
        self.index.drop_node(node)
        self.known.pop(node, None)
        self._forget_unheld()

    @rule(chain=st.lists(keys, max_size=10) | chains)
    def looked_up(self, chain: list[BlockKey]) -> None:
        found = self.index.prefix_blocks(chain)
        assert found == brute_force(self.known, chain)
        on_ssd = {node: [(node, key) in self.on_ssd for key in chain[:depth]] for node, depth in found.items()}
        starts = {node: slow.index(True) for node, slow in on_ssd.items() if True in slow}
        assert self.index.ssd_starts(chain, found) == starts

    def _store(self, node: NodeId, key: BlockKey, tier: KvTier) -> None:
        self.known.setdefault(node, set()).add(key)
        (self.on_ssd.add if tier is KvTier.SSD else self.on_ssd.discard)((node, key))
        if key not in self.arrived:
            self.arrived.append(key)
        while sum(map(len, self.known.values())) > self.CAP:
            oldest = self.arrived.pop(0)
            for mine in self.known.values():
                mine.discard(oldest)

        self._forget_unheld()

    def _forget_unheld(self) -> None:
        self.on_ssd = {(node, key) for node, key in self.on_ssd if key in self.known.get(node, ())}
        self.arrived = [key for key in self.arrived if any(key in mine for mine in self.known.values())]

    @invariant()
    def knows_exactly_this(self) -> None:
        assert set(self.index.nodes()) == set(self.known)
        assert self.index.entries == sum(map(len, self.known.values())) <= self.CAP
        assert self.index.n_keys == len(self.arrived)
        for node in NODES:
            assert self.index.blocks(node) == len(self.known.get(node, ()))
        for key in KEYS:
            holders = {node: 1 for node, mine in self.known.items() if key in mine}
            assert self.index.prefix_blocks([key]) == holders
            slow = {node: 0 for node in holders if (node, key) in self.on_ssd}
            assert self.index.ssd_starts([key], holders) == slow


ROOT = [BlockKey(b"root" + i.to_bytes(12, "big")) for i in range(LONG_BLOCKS + 40)]
BRANCHES = [
    ROOT + [BlockKey(name * 4 + i.to_bytes(12, "big")) for i in range(2 * SEGMENT_BLOCKS)] for name in (b"a", b"b")
]
places = st.integers(0, len(BRANCHES[0]))


class LongChainsMachine(RuleBasedStateMachine):
    """Chains of which stretches are remembered: runs of them come, grow and go, in any order, and are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_entries=100_000)
        self.known: dict[NodeId, set[BlockKey]] = {}

    @rule(node=nodes, branch=st.sampled_from(BRANCHES), first=st.just(0) | places, end=places, at_once=st.booleans())
    def stored(self, node: NodeId, branch: list[BlockKey], first: int, end: int, at_once: bool) -> None:
        run = branch[first:end]
        if at_once:
            self.index.apply_all_stored(node, run)
        else:
            for key in run:
                self.index.apply_stored(node, key)
        if run:
            self.known.setdefault(node, set()).update(run)

    @rule(node=nodes, branch=st.sampled_from(BRANCHES), first=places, n=st.integers(1, 40))
    def removed(self, node: NodeId, branch: list[BlockKey], first: int, n: int) -> None:
        for key in branch[first : first + n]:
            self.index.apply_removed(node, key)
            self.known.get(node, set()).discard(key)

    @rule(node=nodes)
    def dropped(self, node: NodeId) -> None:
        self.index.drop_node(node)
        self.known.pop(node, None)

    @rule(branch=st.sampled_from(BRANCHES), n=places, times=st.integers(1, 3))
    def looked_up(self, branch: list[BlockKey], n: int, times: int) -> None:
        for _ in range(times):
            self._looked_up(branch[:n])

    def _looked_up(self, chain: list[BlockKey]) -> None:
        assert self.index.prefix_blocks(chain) == brute_force(self.known, chain)


Message = KvEvents | KvSnapshot


@dataclass
class Messenger:
    """A node's truth. ``states[n]`` is what it held after its event n."""

    node: NodeId
    incarnation: Incarnation
    log: EventLog
    held: set[BlockKey] = field(default_factory=set)
    states: list[frozenset[BlockKey]] = field(default_factory=lambda: [frozenset()])
    expected_seq: int = 1

    def change(self, change: KvChange, key: BlockKey) -> None:
        self.log.append([PoolEvent(change=change, key=key)])
        (self.held.add if change is KvChange.STORED else self.held.remove)(key)
        self.states.append(frozenset(self.held))

    def message(self, max_events: int) -> Message:
        batch = self.log.batch(self.expected_seq, max_events=max_events)
        if batch is Unsendable.NOTHING_NEW:
            return self.log.probe()
        if batch is Unsendable.EVENTS_GONE:
            return self.log.snapshot(list(self.held))
        assert isinstance(batch, KvEvents)
        return batch


pair = st.sampled_from(NODES[:2])


class StreamMachine(RuleBasedStateMachine):
    """Messengers and a conductor with a bad network between them; everybody may die and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = 0
        self.index = PrefixIndex(max_entries=1_000)
        self.messengers: dict[NodeId, Messenger] = {}
        self.feeds: dict[NodeId, NodeFeed] = {}
        self.wire: list[Message] = []
        for node in NODES[:2]:
            self._start(node)

    # Rules do nothing where they make no sense, instead of preconditions: those starve the rarer sequences of steps.

    @rule(node=pair, fault=st.sampled_from(["messenger starts", "messenger dies", "conductor restarts"]))
    def something_dies(self, node: NodeId, fault: str) -> None:
        if fault == "messenger starts":
            self._start(node)
        elif fault == "conductor restarts":
            self.index = PrefixIndex(max_entries=1_000)
            self.feeds = {node: NodeFeed(self.index, node, m.incarnation) for node, m in self.messengers.items()}
        elif node in self.messengers:
            del self.messengers[node], self.feeds[node]
            self.index.drop_node(node)

    def _start(self, node: NodeId) -> None:
        self.lives += 1
        incarnation = Incarnation(f"{self.lives:016x}")
        log = EventLog(node, incarnation, replay_events=4)
        self.messengers[node] = Messenger(node=node, incarnation=incarnation, log=log)
        self.feeds[node] = NodeFeed(self.index, node, incarnation)

    @rule(node=pair, changed=st.lists(keys, min_size=1, max_size=3))
    def pool_changes(self, node: NodeId, changed: list[BlockKey]) -> None:
        messenger = self.messengers.get(node)
        if messenger is None:
            return
        for key in changed:
            messenger.change(KvChange.REMOVED if key in messenger.held else KvChange.STORED, key)

    @rule(node=pair, max_events=st.integers(1, 3), kind=st.sampled_from(["what is due", "snapshot"]))
    def sends(self, node: NodeId, max_events: int, kind: str) -> None:
        messenger = self.messengers.get(node)
        if messenger is not None:
            due = kind == "what is due"
            self.wire.append(messenger.message(max_events) if due else messenger.log.snapshot(list(messenger.held)))

    @rule(position=st.integers(0, 5), fate=st.sampled_from(["once", "again later", "lost", "answer lost"]))
    def link_delivers(self, position: int, fate: str) -> None:
        if position >= len(self.wire):
            return
        message = self.wire[position] if fate == "again later" else self.wire.pop(position)
        if fate != "lost":
            self._deliver(message, answered=fate != "answer lost")

    def _deliver(self, message: Message, *, answered: bool) -> None:
        feed = self.feeds.get(message.node_id)
        if feed is None:
            return
        handle: Callable[[], KvEventsAck | FeedRefused] = (
            (lambda: feed.feed(message)) if isinstance(message, KvEvents) else (lambda: feed.snapshot(message))
        )
        seen_before = feed.next_seq
        ack = handle()
        assert feed.next_seq >= seen_before, "the index never goes back in time"
        messenger = self.messengers[message.node_id]
        if isinstance(ack, FeedRefused):
            assert message.incarnation != messenger.incarnation
            return
        assert message.incarnation == messenger.incarnation
        before = self._contents(message.node_id)
        assert handle() == ack, "the same message again is answered alike"
        assert self._contents(message.node_id) == before, "and changes nothing"
        if answered:
            messenger.expected_seq = ack.next_seq

    def _contents(self, node: NodeId) -> frozenset[BlockKey]:
        return frozenset(key for key in KEYS if node in self.index.prefix_blocks([key]))

    @rule()
    def network_heals(self) -> None:
        for node, messenger in self.messengers.items():
            for _ in range(100):
                self._deliver(messenger.message(2), answered=True)
                if self.feeds[node].next_seq == messenger.log.next_seq == messenger.expected_seq:
                    break
            assert self._contents(node) == messenger.held

    @invariant()
    def index_is_a_past_truth_of_each_living_node(self) -> None:
        assert set(self.index.nodes()) <= set(self.messengers), "a dead node appears"
        for node, messenger in self.messengers.items():
            assert self._contents(node) == messenger.states[self.feeds[node].next_seq - 1]


TestLongChainsMachine = LongChainsMachine.TestCase
TestLongChainsMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=20)
TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(deadline=None)
TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(deadline=None)
