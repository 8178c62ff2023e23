"""A preempted sequence's way out of the arena and back: what is copied, and what ends it on the way."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.preemption import SwapBudget
from mooncake_mesh.decode.sequences import DecodeSequence, SequenceStage
from mooncake_mesh.decode.swapping import ArenaBlocks, Swapping
from mooncake_mesh.engine.api import Engine
from mooncake_mesh.errors import Aborted, InvalidRequest, MooncakeError, NoFreeBlocks, PeerUnreachable
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.worker.job_waits import JobWaits
from mooncake_mesh.worker.station import Station
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.serving import DecodeGate, DecodeJob, GateKind, Sampling, Stopping
from mooncake_proto.transfer import Acquire, Acquired, Seal
from tests.mesh.clients import FAKE

ROOT = BlockKey(b"r" * 16)
BLOCK = FAKE.layout.block_bytes
PROMPT = 40
"""Two whole blocks and half a one."""


class EngineDouble:
    spec = type("Spec", (), {"layout": FAKE.layout})

    def bind(self, arena: memoryview) -> None: ...

    def unbind(self) -> None: ...


class StationDouble:
    """Its messenger answers an Acquire with *answer*, or not at all."""

    def __init__(self, answer: Callable[[Acquire], Acquired | MooncakeError] | None) -> None:
        self.me = Holder(instance_id=InstanceId("d"), incarnation=Incarnation("i"))
        self.messenger = self
        self.waits = JobWaits()
        self.told: list[object] = []
        self._answer = answer

    def on_engine_thread(self, work: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(work(*args))
        except MooncakeError as error:
            future.set_exception(error)
        return future

    def post(self, seal: Seal) -> None:
        self.told.append(seal)

    async def release(self, job_id: JobId) -> None:
        self.told.append(job_id)

    async def call(self, request: Acquire, _: type, *, timeout_s: float) -> Acquired:
        self.told.append(request)
        answer = None if self._answer is None else self._answer(request)
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, MooncakeError):
            raise answer
        assert isinstance(answer, Acquired)
        return answer


class Setting:
    """One sequence that is decoded in blocks 0 … 2 of an arena of ten."""

    def __init__(
        self,
        answer: Callable[[Acquire], Acquired | MooncakeError] | None = None,
        *,
        most_bytes: int = 3 * BLOCK,
        patience_s: float = 30.0,
        gate: DecodeGate | None = None,
    ) -> None:
        tokens = token_bytes(range(PROMPT))
        job = DecodeJob(
            job_id=JobId("a"),
            transfer_id=TransferId("t"),
            incarnation=Incarnation("i"),
            tokens=tokens,
            keys=join_keys(chain(ROOT, tokens, 16)),
            key_root=ROOT,
            sampling=Sampling(),
            stopping=Stopping(max_new_tokens=100),
            drawn_tokens=0,
            stream_endpoint="ipc://g",
            deadline_s=60.0,
            gate=gate,
        )
        self.core = DecodeCore(block_tokens=16, max_batch=8, max_jobs=8)
        sequence = self.core.submit(job, 0.0)
        assert isinstance(sequence, DecodeSequence)
        self.sequence = sequence
        self.core.landed(sequence, range(3))
        self.core.first_token(job.job_id, 7)
        self.arena = bytearray(10 * BLOCK)
        for block in range(3):
            self.arena[block * BLOCK : (block + 1) * BLOCK] = bytes([block + 1]) * BLOCK
        self.blocks = ArenaBlocks(cast(Engine, EngineDouble()))
        self.blocks.bind(memoryview(self.arena))
        self.station = StationDouble(answer)
        self.budget = SwapBudget(most_bytes=most_bytes)
        self.changed = Bell()
        self.swapping = Swapping(
            cast(Station, self.station),
            self.core,
            self.blocks,
            self.changed,
            budget=self.budget,
            patience_s=patience_s,
        )

    def content(self, block: int) -> int:
        [value] = set(self.arena[block * BLOCK : (block + 1) * BLOCK])
        return value


def acquired(request: Acquire, cached: int) -> Acquired:
    return Acquired(job_id=request.job_id, blocks=(1, 6, 7, 8, 9, 4, 5), cached_blocks=cached)


def test_only_what_the_pool_has_lost_is_copied_back() -> None:
    setting = Setting(lambda request: acquired(request, 1))
    assert setting.swapping.begin(setting.sequence)
    assert setting.budget.taken_bytes == 3 * BLOCK
    asyncio.run(setting.swapping.out_and_back(setting.sequence))
    assert [setting.content(block) for block in (1, 6, 7, 8)] == [2, 2, 3, 0]
    assert (setting.sequence.stage, setting.sequence.blocks) == (SequenceStage.READY, [1, 6, 7, 8, 9, 4, 5])
    released, request = setting.station.told
    assert (released, setting.sequence.arena_job) == ("a:decode", "a:decode:1")
    assert isinstance(request, Acquire)
    assert (request.job_id, request.n_blocks, request.max_cached_blocks) == ("a:decode:1", 7, 2)
    assert setting.budget.taken_bytes == 0


def test_without_memory_for_its_kv_or_before_it_is_granted_nobody_is_swapped() -> None:
    crowded = Setting(most_bytes=3 * BLOCK - 1)
    gate = DecodeGate(
        kind=GateKind.HOLD,
        tbt_s=1.0,
        step_base_s=0.0,
        step_sequence_s=0.0,
        step_token_s=0.0,
        room_tokens=100,
        decode_s=1.0,
    )
    held = Setting(gate=gate)
    for setting in (crowded, held):
        assert not setting.swapping.begin(setting.sequence)
        assert (setting.sequence.stage, setting.budget.taken_bytes) == (SequenceStage.READY, 0)


@pytest.mark.parametrize("answer", [None, lambda _: InvalidRequest("it never fits")], ids=["no room", "never any"])
def test_who_finds_no_room_is_to_be_placed_again(answer: Callable[[Acquire], MooncakeError] | None) -> None:
    setting = Setting(answer, patience_s=0.01)
    assert setting.swapping.begin(setting.sequence)
    with pytest.raises(NoFreeBlocks):
        asyncio.run(setting.swapping.out_and_back(setting.sequence))
    assert (setting.budget.taken_bytes, setting.sequence.is_coming_back) == (0, False)
    assert setting.sequence.arena_job == "a:decode:1", "what its Acquire may get yet is released by this name"


@pytest.mark.parametrize("wait", ["for room", "for its turn"])
def test_a_stop_ends_the_wait(wait: str) -> None:
    setting = Setting()
    sequence = setting.sequence
    assert setting.swapping.begin(sequence)

    async def stop() -> None:
        for _ in range(10):  # nothing that comes before its wait takes longer here
            await asyncio.sleep(0)
        assert (sequence.swaps, sequence.is_coming_back) == (1, wait == "for room")
        sequence.stop = Aborted("cancelled")
        setting.station.waits.interrupt(sequence.job.job_id)

    async def stopped() -> None:
        if wait == "for its turn":
            setting.core.next_back = lambda: None  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await asyncio.gather(setting.swapping.out_and_back(sequence), stop())

    with pytest.raises(Aborted):
        asyncio.run(stopped())
    assert (setting.budget.taken_bytes, sequence.stage) == (0, SequenceStage.SWAPPED)


def test_a_stop_that_comes_while_it_is_copied_counts() -> None:
    setting = Setting(lambda request: acquired(request, 2))
    assert setting.swapping.begin(setting.sequence)
    setting.sequence.stop = Aborted("cancelled")
    with pytest.raises(Aborted, match="cancelled"):
        asyncio.run(setting.swapping.out_and_back(setting.sequence))
    assert setting.sequence.stage is SequenceStage.SWAPPED


def test_an_arena_that_is_gone_ends_it() -> None:
    setting = Setting()
    assert setting.swapping.begin(setting.sequence)
    setting.blocks.unbind()
    with pytest.raises(PeerUnreachable):
        asyncio.run(setting.swapping.out_and_back(setting.sequence))
    assert setting.budget.taken_bytes == 0
