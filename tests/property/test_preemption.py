"""A decode instance in an arena that is too small for its sequences: they push each other out, and nobody can tell.

The cores of decode and messenger over real bytes, with the fake engine, whose every token depends on every byte of KV
before it. Steps may be running while their sequences are preempted; a sequence may be stopped wherever it is; strangers
take and give back blocks, so that what was sealed is evicted or not. What must hold: each sequence draws the tokens
that it would draw alone; who goes is of the lowest class, and the youngest of it; all come back in the end, and nothing
is held.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_mesh.decode.acquiring import blocks_request, return_request
from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.growth import is_short
from mooncake_mesh.decode.sequences import ACTIVE, DecodeSequence, SequenceStage
from mooncake_mesh.decode.slots import DecodeSlots
from mooncake_mesh.engine.api import PrefillChunk, SampleRequest
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine, expected_tokens
from mooncake_mesh.errors import Aborted
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_mesh.kv.block_pool import NoRoom
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.serving import DecodeJob, Sampling, Stopping
from mooncake_proto.transfer import Acquire, Acquired

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype=KvDtype.BFLOAT16, block_tokens=4)
CONFIG = FakeConfig(name="fake", layout=LAYOUT)
N_BLOCKS = 9
MOST_TOKENS = N_BLOCKS * LAYOUT.block_tokens
ROOT = BlockKey(b"r" * 16)
ME = Holder(instance_id=InstanceId("d"), incarnation=Incarnation("i"))
PROMPTS = [[5] * 3, [5] * 9, [5, 6] * 5, [7] * 13]  # the first two share blocks
SAMPLINGS = [Sampling(temperature=0.0), Sampling(temperature=1.0, seed=3)]


@dataclass
class Served:
    sequence: DecodeSequence
    expected: list[int]
    drawn: list[int] = field(default_factory=list)
    away: list[bytes] | None = None


class CrowdedInstance(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena = bytearray(N_BLOCKS * LAYOUT.block_bytes)
        self.engine = FakeEngine(CONFIG, sleep=lambda _: None)
        self.engine.bind(memoryview(self.arena))
        self.messenger = MessengerCore(n_blocks=N_BLOCKS, block_bytes=LAYOUT.block_bytes)
        self.core = DecodeCore(block_tokens=LAYOUT.block_tokens, max_batch=4, max_jobs=8)
        self.slots = DecodeSlots()
        self.served: dict[JobId, Served] = {}
        self.running: tuple[list[DecodeSequence], list[int]] | None = None
        self.strangers: list[JobId] = []
        self.n = 0

    # --- what comes from outside --------------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from(PROMPTS),
        n_tokens=st.integers(2, 20),
        priority=st.sampled_from([0, 0, 5]),
        sampling=st.sampled_from(SAMPLINGS),
    )
    @precondition(lambda self: self.core.n_jobs < 5)
    def comes(self, prompt: list[int], n_tokens: int, priority: int, sampling: Sampling) -> None:
        """With its prompt computed where it will be decoded, if there is room for that."""
        self.n += 1
        tokens = token_bytes(prompt)
        job = DecodeJob(
            job_id=JobId(f"j{self.n}"),
            transfer_id=TransferId("t"),
            incarnation=Incarnation("i"),
            tokens=tokens,
            keys=join_keys(chain(ROOT, tokens, LAYOUT.block_tokens)),
            key_root=ROOT,
            sampling=sampling,
            stopping=Stopping(max_new_tokens=n_tokens),
            drawn_tokens=0,
            stream_endpoint="g",
            deadline_s=60.0,
            priority=priority,
        )
        sequence = self.core.submit(job, 0.0)
        assert isinstance(sequence, DecodeSequence)
        request = blocks_request(sequence, LAYOUT, ME)
        cached = Acquire(
            job_id=request.job_id,
            instance_id=ME.instance_id,
            incarnation=ME.incarnation,
            keys=job.keys,
            n_blocks=request.n_blocks,
            max_cached_blocks=(len(prompt) - 1) // LAYOUT.block_tokens,
        )
        acquired = self.messenger.acquire(cached, 0.0)
        if isinstance(acquired, NoRoom):
            self.core.stopped(sequence)
            self.core.forget(sequence)
            return
        start = acquired.cached_blocks * LAYOUT.block_tokens
        sample = SampleRequest(sampling=sampling, position=0, history=np.array(prompt, np.int32))
        chunk = PrefillChunk(
            sequence=f"prefill {self.n}",
            tokens=np.array(prompt[start:], np.int32),
            start=start,
            blocks=acquired.blocks,
            sample=sample,
        )
        first = self.engine.prefill(chunk, lambda _: None)
        assert first is not None
        whole = list(chain(ROOT, tokens, LAYOUT.block_tokens))[acquired.cached_blocks :]
        self.messenger.seal(request.job_id, acquired.cached_blocks, whole)
        self.served[job.job_id] = Served(sequence, expected_tokens(CONFIG, prompt, n_tokens, sampling=sampling))
        self.served[job.job_id].drawn.append(first.token)
        self.core.landed(sequence, acquired.blocks)
        self.core.first_token(job.job_id, first.token)

    @rule(n_blocks=st.integers(1, 4))
    def stranger_comes(self, n_blocks: int) -> None:
        self.n += 1
        request = Acquire(
            job_id=JobId(f"s{self.n}"),
            instance_id=ME.instance_id,
            incarnation=ME.incarnation,
            keys=b"",
            n_blocks=n_blocks,
            max_cached_blocks=0,
        )
        acquired = self.messenger.acquire(request, 0.0)
        if isinstance(acquired, Acquired):
            self.strangers.append(acquired.job_id)
            for block in acquired.blocks:
                self.put(block, b"\xff" * LAYOUT.block_bytes)

    @rule()
    @precondition(lambda self: self.strangers)
    def stranger_leaves(self) -> None:
        self.messenger.release(self.strangers.pop(), "left")

    @rule(which=st.integers(0, 7))
    @precondition(lambda self: self.served)
    def is_cancelled(self, which: int) -> None:
        """As the service does it: while a step runs, what is in it ends behind it."""
        job_id = sorted(self.served)[which % len(self.served)]
        sequence = self.served[job_id].sequence
        sequence.stop = Aborted("cancelled")
        if self.running is None or sequence not in self.running[0]:
            self.end(sequence)

    # --- steps --------------------------------------------------------------------------------------------------------

    @rule()
    @precondition(lambda self: self.running is None)
    def step_begins(self) -> None:
        batch = self.core.plan_step()
        if batch:
            drawn = self.engine.decode([self.slots.next(sequence) for sequence in batch])
            self.running = batch, [one.token for one in drawn]

    @rule()
    @precondition(lambda self: self.running is not None)
    def step_ends(self) -> None:
        assert self.running is not None
        (batch, drawn), self.running = self.running, None
        for new in self.core.step_finished(batch, drawn):
            served = self.served[new.sequence.job.job_id]
            assert new.position == len(served.drawn)
            served.drawn.append(new.token)
            self.share(new.sequence)
            if new.finish is not None:
                assert served.drawn == served.expected
                self.end(new.sequence)
        for sequence in batch:
            if sequence.stop is not None and not sequence.is_over:
                self.end(sequence)

    @rule()
    def grows(self) -> None:
        for job_id, n_blocks in self.core.wants_growth().items():
            sequence = self.core.get(job_id)
            assert sequence is not None
            victim = self.core.grown(sequence, self.messenger.grow(sequence.arena_job, n_blocks))
            if victim is not None:
                active = [one.sequence for one in self.served.values() if one.sequence.stage in ACTIVE]
                assert victim.job.priority == max(one.job.priority for one in active)
                younger = [one for one in active if one.admission > victim.admission]
                assert all(one.job.priority < victim.job.priority for one in younger)
                self.core.preempt(victim)

    # --- out and back -------------------------------------------------------------------------------------------------

    @rule()
    def goes_out(self) -> None:
        """Behind the step that runs: its blocks are not given away while the engine writes them."""
        for served in self.served.values():
            sequence = served.sequence
            if sequence.stage is not SequenceStage.SWAPPED or served.away is not None or sequence.stop is not None:
                continue
            if self.running is not None and sequence in self.running[0]:
                continue
            held = sequence.blocks[: LAYOUT.blocks_for(sequence.position)]
            served.away = [self.content(block) for block in held]
            self.share(sequence)
            self.messenger.release(sequence.arena_job, "swapped")
            sequence.blocks = []
            sequence.swaps += 1

    @rule()
    def comes_back(self) -> None:
        sequence = self.core.next_back()
        if sequence is None:
            return
        assert not any(is_short(one.sequence, LAYOUT.block_tokens) for one in self.served.values())
        acquired = self.messenger.acquire(return_request(sequence, LAYOUT, ME), 0.0)
        if isinstance(acquired, NoRoom):
            return
        served = self.served[sequence.job.job_id]
        assert served.away is not None
        for block, content in list(zip(acquired.blocks, served.away, strict=False))[acquired.cached_blocks :]:
            self.put(block, content)
        served.away = None
        self.core.back(sequence, acquired.blocks, acquired.cached_blocks, 0.0)

    # --- books --------------------------------------------------------------------------------------------------------

    def content(self, block: int) -> bytes:
        return bytes(self.arena[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes])

    def put(self, block: int, content: bytes) -> None:
        self.arena[block * LAYOUT.block_bytes : (block + 1) * LAYOUT.block_bytes] = content

    def share(self, sequence: DecodeSequence) -> None:
        whole = self.core.whole_blocks(sequence)
        if whole is not None:
            keys = chain(ROOT, token_bytes(sequence.tokens[: sequence.position].tolist()), LAYOUT.block_tokens)
            assert list(whole.keys) == keys[whole.first_block : whole.first_block + len(whole.keys)]
            self.messenger.seal(sequence.arena_job, whole.first_block, whole.keys)

    def end(self, sequence: DecodeSequence) -> None:
        self.core.stopped(sequence)
        self.messenger.release(sequence.arena_job, "over")
        self.core.forget(sequence)
        self.slots.forget(sequence.job.job_id)
        del self.served[sequence.job.job_id]

    @invariant()
    def books_agree(self) -> None:
        self.messenger.pool.check_invariants()
        for served in self.served.values():
            assert served.drawn == served.expected[: len(served.drawn)]

    def teardown(self) -> None:
        """Left to themselves, all of them come to their ends."""
        for stranger in self.strangers:
            self.messenger.release(stranger, "left")
        for _ in range(600):
            if not self.served:
                break
            if self.running is None:
                self.step_begins()
            else:
                self.step_ends()
            self.grows()
            self.goes_out()
            self.comes_back()
        assert not self.served
        assert (self.core.n_jobs, self.core.n_swapped) == (0, 0)
        assert self.messenger.n_jobs == 0
        assert self.messenger.pool.available_blocks == N_BLOCKS


CrowdedInstance.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=40)
TestCrowdedInstance = CrowdedInstance.TestCase
