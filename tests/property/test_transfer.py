"""Two messengers back to back over a link that loses, repeats, reorders, damages and delays, on real bytes.

Everything may end at any moment: either job, either worker, either messenger, the transfer; word of it comes late,
twice or never. A messenger that died begins anew, with an empty arena and generations from 0, and what was under way to
and from its old life goes on arriving. Meanwhile other jobs take, write and share blocks on both nodes. What must hold:
a slice is applied at most once; what has landed, and what is found by its key, is what was computed; nobody's blocks
change under him; every transfer ends once; in the end nothing is held.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

import xxhash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_mesh.errors import NoFreeBlocks, SliceLost
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.landing import Destination, Landing, LandingState
from mooncake_mesh.messenger.sending import Outbound, OutgoingSlice
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.transfer import Acquire, Acquired, PushBlocks, SliceReady

N_BLOCKS, LAYERS, SLICE_BYTES = 7, 3, 4
BLOCK_BYTES = LAYERS * SLICE_BYTES
LIFE = Incarnation("life")
KEYS = {family: [BlockKey(f"{family}{i}".encode().ljust(16, b".")) for i in range(3)] for family in "ab"}


def content(seed: bytes) -> bytes:
    """The KV of one block: a function of its key, or of its job where it has none."""
    return hashlib.sha256(seed).digest()[:BLOCK_BYTES]


WHOLE_WAY = st.just(["plan", "compute", "send", "compute", "send", "compute", "send"])
RARELY = st.sampled_from([False, False, False, True])


class Node:
    def __init__(self, name: str) -> None:
        self.worker = InstanceId(name)
        self.core = MessengerCore(n_blocks=N_BLOCKS, block_bytes=BLOCK_BYTES)
        self.arena = bytearray(N_BLOCKS * BLOCK_BYTES)

    def block(self, block: int) -> bytes:
        return bytes(self.arena[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def put(self, block: int, data: bytes, at: int = 0) -> None:
        start = block * BLOCK_BYTES + at
        self.arena[start : start + len(data)] = data

    def acquire(self, job: str, n_blocks: int, keys: list[BlockKey], landing: str | None = None) -> Acquired | None:
        request = Acquire(
            job_id=JobId(job),
            instance_id=self.worker,
            incarnation=LIFE,
            keys=join_keys(keys),
            n_blocks=n_blocks,
            max_cached_blocks=len(keys),
            landing=None if landing is None else TransferId(landing),
            landing_blocks=n_blocks,
            landing_layers=LAYERS,
        )
        result = self.core.acquire(request, 0.0)
        return None if isinstance(result, NoRoom) else result


@dataclass
class Transfer:
    """``blocks`` and ``computed`` are the sender's: where its job's KV lies, and how many layers of it."""

    landing: Landing
    out: Outbound
    receiving_job: JobId
    sending_job: JobId
    keys: list[BlockKey]
    expected: list[bytes]
    blocks: list[int] = field(default_factory=list)
    first_fresh: int = 0
    computed: int = LAYERS
    is_planned: bool = False
    is_lost: bool = False
    """The receiving messenger died."""
    ended: LandingState | None = None


@dataclass
class Batch:
    """Slices on the link. A ``copied`` one carries its bytes; the other's are read when they are written, from the
    arena of the life that sent them: it stays mapped.
    """

    transfer: Transfer
    pieces: list[OutgoingSlice]
    checksums: list[int]
    copied: list[bytes] | None
    arena: bytearray


@dataclass
class Write:
    batch: Batch
    places: list[Destination]
    is_damaged: bool


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sender, self.receiver = Node("sender"), Node("receiver")
        self.transfers: list[Transfer] = []
        self.wire: list[Batch] = []
        self.writes: list[Write] = []
        self.aborts: list[TransferId] = []
        self.others: dict[str, tuple[Node, list[int], bytes]] = {}
        self.applied: Counter[tuple[TransferId, int, int]] = Counter()
        self.names = 0

    def name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    # --- transfers begin ----------------------------------------------------------------------------------------------

    @initialize(family=st.sampled_from("ab"), whole=st.integers(1, 3), tail=st.booleans())
    def begin(self, family: str, whole: int, tail: bool) -> None:
        self.request(family, whole, tail)

    @rule(family=st.sampled_from("ab"), whole=st.integers(0, 3), tail=st.booleans())
    def request(self, family: str, whole: int, tail: bool) -> None:
        """A request is placed: its decode node reserves, its prefill node will compute what it has not."""
        n_blocks = whole + tail
        if n_blocks == 0:
            return
        name, keys = self.name(), KEYS[family][:whole]
        if self.receiver.acquire(f"{name}.d", n_blocks, keys, name) is None:
            return
        acquired = self.sender.acquire(f"{name}.p", n_blocks, keys)
        if acquired is None:
            self.receiver.core.release(JobId(f"{name}.d"), "not placed")
            return
        transfer_id = TransferId(name)
        landing = self.receiver.core.landing(transfer_id)
        assert landing is not None
        transfer = Transfer(
            landing=landing,
            out=self.sender.core.start_send(transfer_id, JobId(f"{name}.p"), n_blocks, LAYERS),
            receiving_job=JobId(f"{name}.d"),
            sending_job=JobId(f"{name}.p"),
            keys=keys,
            expected=[*map(content, keys), *([content(name.encode())] if tail else [])],
            blocks=list(acquired.blocks),
            first_fresh=acquired.cached_blocks,
            computed=0,
        )
        if acquired.cached_blocks:
            self.announce(transfer, 0, LAYERS, 0, acquired.cached_blocks)
        self.transfers.append(transfer)

    @rule(family=st.sampled_from("ab"), n_keys=st.integers(1, 3))
    def fetch(self, family: str, n_keys: int) -> None:
        """The receiver asks the sender for a prefix, which it may hold in part or not at all."""
        name, keys = self.name(), KEYS[family][:n_keys]
        owner = Acquire(
            job_id=JobId("o"),
            instance_id=self.receiver.worker,
            incarnation=LIFE,
            keys=b"",
            n_blocks=0,
            max_cached_blocks=0,
        )
        try:
            landing = self.receiver.core.open_fetch(TransferId(name), owner, keys, 0.0)
        except NoFreeBlocks:
            return
        push = PushBlocks(transfer_id=TransferId(name), target="", keys=join_keys(keys), deadline_s=1.0)
        out = self.sender.core.start_push(push, self.sender.worker, LIFE)
        transfer = Transfer(
            landing=landing,
            out=out,
            receiving_job=JobId(name),
            sending_job=out.job_id,
            keys=keys,
            expected=[content(key) for key in keys],
        )
        self.announce(transfer, 0, 1, 0, out.n_blocks)
        self.transfers.append(transfer)

    def announce(self, transfer: Transfer, layer: int, n_layers: int, first_block: int, n_blocks: int) -> None:
        ready = SliceReady(
            transfer_id=transfer.out.transfer_id,
            layer=layer,
            n_layers=n_layers,
            first_block=first_block,
            n_blocks=n_blocks,
        )
        transfer.out.ready(ready)

    def pick(self, which: int) -> Transfer:
        return self.transfers[-1 - which % len(self.transfers)]

    def is_sending(self, transfer: Transfer) -> bool:
        return self.sender.core.outbound(transfer.out.transfer_id) is transfer.out

    # --- transfers go on ----------------------------------------------------------------------------------------------

    def plan(self, which: int) -> None:
        """The sender learns what the receiver wants; of a fetch, the receiver learns what there is."""
        transfer = self.pick(which)
        if not self.is_sending(transfer):
            return
        transfer.is_planned = True
        transfer.out.planned(transfer.landing.slots)
        if transfer.landing.layers == 1:
            transfer.landing.shorten(transfer.out.n_blocks)
            self.receiver.core.settle(transfer.landing)

    def compute(self, which: int) -> None:
        transfer = self.pick(which)
        if not self.is_sending(transfer) or transfer.computed == LAYERS:
            return
        layer, fresh = transfer.computed, range(transfer.first_fresh, len(transfer.blocks))
        transfer.computed += 1
        for logical in fresh:
            at = layer * SLICE_BYTES
            self.sender.put(transfer.blocks[logical], transfer.expected[logical][at : at + SLICE_BYTES], at)
        self.announce(transfer, layer, 1, transfer.first_fresh, len(fresh))
        if transfer.computed == LAYERS:
            self.sender.core.seal(transfer.sending_job, transfer.first_fresh, transfer.keys[transfer.first_fresh :])

    @precondition(lambda self: self.transfers)
    @rule(
        which=st.integers(0, 2),
        steps=WHOLE_WAY
        | WHOLE_WAY
        | st.lists(st.sampled_from(["plan", "compute", "send", "send little"]), min_size=1, max_size=3),
        copies=st.booleans(),
    )
    def go_on(self, which: int, steps: list[str], copies: bool) -> None:
        """Some steps of one transfer, up to slices on the link."""
        for step in steps:
            if step == "plan":
                self.plan(which)
            elif step == "compute":
                self.compute(which)
            else:
                self.send(which, 1 if step == "send little" else 10**6, copies)

    @precondition(lambda self: self.wire)
    @rule()
    def deliver(self) -> None:
        """The link as it should be: all batches, oldest first."""
        while self.wire:
            n_writes = len(self.writes)
            self.arrive(0, False, False)
            if len(self.writes) > n_writes:
                self.write(n_writes)

    def send(self, which: int, max_bytes: int, copies: bool) -> None:
        transfer = self.pick(which)
        if not self.is_sending(transfer):
            return
        pieces = transfer.out.take(max_bytes)
        data = [bytes(self.sender.arena[piece.offset : piece.offset + piece.size_bytes]) for piece in pieces]
        if pieces:
            sums = [xxhash.xxh3_64_intdigest(one) for one in data]
            self.wire.append(Batch(transfer, pieces, sums, data if copies else None, self.sender.arena))

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 9), is_repeated=st.booleans(), is_damaged=RARELY, is_stale=st.booleans())
    def arrive(self, which: int, is_repeated: bool, is_damaged: bool, is_stale: bool = False) -> None:
        """A batch reaches the receiver; if it may land, its first bytes are written now.

        The receiver finds a landing by its id. A *stale* link still has the one that it found before.
        """
        index = which % len(self.wire)
        batch = self.wire[index] if is_repeated else self.wire.pop(index)
        landing = self.receiver.core.landing(batch.transfer.out.transfer_id)
        is_over = landing is not batch.transfer.landing
        if is_over and (batch.transfer.is_lost or not is_stale):
            return
        try:
            places = batch.transfer.landing.admit([piece.span for piece in batch.pieces], self.receiver.core.pool)
        except SliceLost:
            return
        assert not (is_over and places), "a landing outlived its job"
        for place in places:
            self.receiver.arena[place.offset] ^= 0xFF
        self.writes.append(Write(batch, places, is_damaged))

    @precondition(lambda self: self.writes)
    @rule(which=st.integers(0, 9))
    def write(self, which: int) -> None:
        """The rest of a batch is written and checked, whatever became of its job in between."""
        write = self.writes.pop(which % len(self.writes))
        batch, landing = write.batch, write.batch.transfer.landing
        is_good = True
        for place in write.places:
            index = next(i for i, piece in enumerate(batch.pieces) if piece.span == place.span)
            piece = batch.pieces[index]
            source = batch.arena[piece.offset : piece.offset + piece.size_bytes]
            data = bytearray(source if batch.copied is None else batch.copied[index])
            if write.is_damaged:
                data[0] ^= 1
            self.receiver.arena[place.offset : place.offset + place.size_bytes] = data
            is_good = is_good and xxhash.xxh3_64_intdigest(bytes(data)) == batch.checksums[index]
        if not is_good:
            landing.spoiled(write.places, self.receiver.core.pool, "damaged")
            return
        for place in write.places:
            for layer in range(place.span.layer, place.span.layer + place.span.n_layers):
                self.applied[landing.transfer_id, place.span.logical, layer] += 1
        landing.written(write.places, self.receiver.core.pool, 1.0)
        self.receiver.core.settle(landing)

    # --- everything may end -------------------------------------------------------------------------------------------

    def abort(self, transfer: Transfer) -> None:
        """The sender ends; that the receiver hears of it is another matter."""
        self.sender.core.release(transfer.sending_job, "aborted")
        self.aborts.append(transfer.out.transfer_id)

    @precondition(lambda self: self.aborts)
    @rule(which=st.integers(0, 9), is_repeated=st.booleans())
    def hear(self, which: int, is_repeated: bool) -> None:
        """An abort reaches the receiver, or whatever life of it there is."""
        index = which % len(self.aborts)
        transfer_id = self.aborts[index] if is_repeated else self.aborts.pop(index)
        landing = self.receiver.core.give_up(transfer_id, "aborted")
        assert landing is None or landing.state is not LandingState.OPEN

    @precondition(lambda self: self.wire or self.writes or any(t.ended for t in self.transfers))
    @rule(which=st.integers(0, 3), how=st.sampled_from(["abort", "lose", "receiver", "sender", "decode", "prefill"]))
    def end(self, which: int, how: str) -> None:
        """The sender gives up, perhaps over a lost batch; one of the jobs is over; one of the workers dies."""
        transfer = self.pick(which)
        if how == "abort":
            self.abort(transfer)
        elif how == "lose" and self.wire:
            self.abort(self.wire.pop().transfer)
        elif how == "receiver":
            self.receiver.core.release(transfer.receiving_job, "released")
        elif how == "sender":
            self.sender.core.release(transfer.sending_job, "released")
        elif how in ("decode", "prefill"):
            node = self.receiver if how == "decode" else self.sender
            for job_id in node.core.jobs_of(node.worker, LIFE):
                node.core.release(job_id, "its worker is gone")
                self.others.pop(job_id, None)

    @precondition(lambda self: self.transfers)
    @rule(at_receiver=st.booleans(), really=RARELY, is_noticed=st.booleans())
    def messenger_dies(self, at_receiver: bool, really: bool, is_noticed: bool) -> None:
        """Its writes end with it, what it read may be read on. The other end notices at once, or has to be told."""
        if not really:
            return
        if at_receiver:
            self.receiver = Node("receiver")
            self.writes.clear()
            for transfer in self.transfers:
                transfer.is_lost = True
        else:
            self.sender = Node("sender")
            for transfer in self.transfers:
                if is_noticed and not transfer.is_lost:
                    self.receiver.core.give_up(transfer.out.transfer_id, "its sender is gone")
        alive = (self.sender, self.receiver)
        self.others = {name: other for name, other in self.others.items() if other[0] in alive}

    # --- others use the nodes too -------------------------------------------------------------------------------------

    @rule(at_receiver=st.booleans(), n_blocks=st.integers(1, 4), ends=st.booleans())
    def other_job(self, at_receiver: bool, n_blocks: int, ends: bool) -> None:
        """One that is there ends, or another takes blocks and writes them."""
        if ends and self.others:
            name = min(self.others)
            self.others.pop(name)[0].core.release(JobId(name), "done")
            return
        node, name = self.receiver if at_receiver else self.sender, self.name()
        acquired = node.acquire(name, n_blocks, [])
        if acquired is None:
            return
        pattern = content(name.encode())
        for block in acquired.blocks:
            node.put(block, pattern)
        self.others[name] = (node, list(acquired.blocks), pattern)

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_agree(self) -> None:
        for node in (self.sender, self.receiver):
            node.core.pool.check_invariants()

    @invariant()
    def nobodys_blocks_change_under_him(self) -> None:
        for name, (node, blocks, pattern) in self.others.items():
            for block in blocks:
                assert node.block(block) == pattern, f"block {block} of {name}"

    @invariant()
    def what_is_found_is_what_was_computed(self) -> None:
        for node in (self.sender, self.receiver):
            keys = node.core.pool.keys()
            for key in keys:
                [block] = node.core.pool.match([key])
                assert node.block(block) == content(key)

    @invariant()
    def what_has_landed_is_what_was_sent(self) -> None:
        for transfer in self.transfers:
            landing = transfer.landing
            if landing.state is LandingState.LANDED and self.receiver.core.landing(landing.transfer_id) is landing:
                for slot in landing.slots:
                    assert self.receiver.block(slot.block) == transfer.expected[slot.logical]

    @invariant()
    def a_slice_is_applied_once_and_a_transfer_ends_once(self) -> None:
        assert all(times == 1 for times in self.applied.values())
        for transfer in self.transfers:
            assert transfer.ended in (None, transfer.landing.state)
            if transfer.landing.state is not LandingState.OPEN:
                transfer.ended = transfer.landing.state

    def teardown(self) -> None:
        for write in self.writes:  # copies that were running end, good or not
            write.batch.transfer.landing.spoiled(write.places, self.receiver.core.pool, "stopped")
        for node in (self.sender, self.receiver):
            for job_id in node.core.all_jobs():
                node.core.release(job_id, "stopped")
            node.core.pool.check_invariants()
            assert node.core.pool.available_blocks == N_BLOCKS
        for transfer in self.transfers:
            assert transfer.is_lost or transfer.landing.state is not LandingState.OPEN
            assert self.receiver.core.landing(transfer.landing.transfer_id) is None
            assert self.sender.core.outbound(transfer.out.transfer_id) is None


TestTransfer = TransferMachine.TestCase
TestTransfer.settings = settings(stateful_step_count=60)


def test_the_machine_sees_transfers_that_land() -> None:
    """The straight way through the rules above, so that their guards do not hide all success."""
    machine = TransferMachine()
    machine.request("a", 2, True)
    [transfer] = machine.transfers
    machine.compute(0)
    machine.send(0, 10**6, True)
    assert machine.wire == [], "there is no plan yet"
    machine.plan(0)
    for _ in range(LAYERS):
        machine.send(0, 1, False)
        machine.compute(0)
    machine.send(0, 10**6, True)
    while machine.wire:
        machine.arrive(len(machine.wire) - 1, False, False)
        machine.write(0)
    assert transfer.landing.state is LandingState.LANDED
    machine.what_has_landed_is_what_was_sent()
    assert len(machine.receiver.core.pool.match(KEYS["a"])) == 2
    assert machine.receiver.core.pool.state(BlockId(transfer.landing.slots[2].block)).value == "reserved"
    machine.teardown()
