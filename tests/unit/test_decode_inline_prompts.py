"""Prompts that a decode instance computes itself: chunk by chunk, in order, each ended once."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.inline_prompts import InlinePrompts, PromptEnd, first_token
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import Drawn, Engine, PrefillChunk
from mooncake_mesh.errors import Aborted, InternalError, MooncakeError, PeerUnreachable
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_mesh.policy.decode_gate import Batch
from mooncake_mesh.worker.station import Station
from mooncake_proto.ids import BlockKey, Incarnation, JobId, TransferId
from mooncake_proto.serving import DecodeJob, InlinePrefill, MixedStep, Sampling, Stopping
from mooncake_proto.transfer import Seal
from tests.mesh.clients import FAKE

ROOT = BlockKey(b"r" * 16)


class EngineDouble:
    """Draws token 7. *during* runs between the layers of each chunk."""

    class spec:
        layout = FAKE.layout

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.chunks: list[PrefillChunk] = []
        self._during = during

    def prefill(self, chunk: PrefillChunk, on_layer: Callable[[int], None]) -> Drawn | None:
        on_layer(0)
        self._during()
        on_layer(1)
        self.chunks.append(chunk)
        return None if chunk.sample is None else Drawn(token=7)


class StationDouble:
    """Its engine thread is the caller's; its messenger keeps what it is told."""

    def __init__(self) -> None:
        self.messenger = self
        self.seals: list[Seal] = []
        self.lost = False

    def on_engine_thread(self, work: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        try:
            future.set_result(work(*args))
        except Exception as error:  # noqa: BLE001  as the engine thread does
            future.set_exception(error)
        return future

    def post(self, seal: Seal) -> None:
        if self.lost:
            raise PeerUnreachable("no messenger")
        self.seals.append(seal)


NOBODY = Batch(jobs=0, tokens=0, max_jobs=8)


def chunks_of(tokens: int) -> MixedStep:
    """They take no time, so all are that long."""
    return MixedStep(
        limit_s=1.0,
        most_tokens=tokens,
        base_s=0.0,
        sequence_s=0.0,
        context_token_s=0.0,
        token_s=0.0,
        before_token_s=0.0,
        pair_s=0.0,
    )


def sequence(name: str, prompt_tokens: int, *, step: MixedStep | None = None) -> DecodeSequence:
    tokens = token_bytes(range(prompt_tokens))
    job = DecodeJob(
        job_id=JobId(name),
        transfer_id=TransferId(f"{name}.kv"),
        incarnation=Incarnation("i"),
        tokens=tokens,
        keys=join_keys(chain(ROOT, tokens, 16)),
        key_root=ROOT,
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=10, min_new_tokens=5, stop_token_ids=(2,)),
        drawn_tokens=3,
        stream_endpoint="ipc://g",
        deadline_s=60.0,
        inline_prefill=InlinePrefill(step=step or chunks_of(32)),
    )
    entered = DecodeCore(block_tokens=16, max_batch=8, max_jobs=8).submit(job, 0.0)
    assert isinstance(entered, DecodeSequence)
    return entered


def prompts(engine: EngineDouble, station: StationDouble | None = None) -> InlinePrompts:
    return InlinePrompts(cast(Station, station or StationDouble()), cast(Engine, engine))


def steps(line: InlinePrompts) -> list[PromptEnd]:
    """Every end, computing until nothing is due."""

    async def run() -> list[PromptEnd]:
        ends = []
        while line.is_due:
            forward = line.start(NOBODY, 0.0)
            assert forward is not None
            end = await line.finish(forward)
            if end is not None:
                ends.append(end)
        return ends

    return asyncio.run(run())


def test_chunks_follow_the_cached_prefix_and_the_last_one_draws() -> None:
    engine, station = EngineDouble(), StationDouble()
    line, one = prompts(engine, station), sequence("a", 90)
    line.add(one, tuple(range(10, 16)), 1)
    assert line.waiting() == ((74, 16),)
    [end] = steps(line)
    assert [(chunk.start, len(chunk.tokens)) for chunk in engine.chunks] == [(16, 32), (48, 32), (80, 10)]
    assert all(list(chunk.blocks) == list(range(10, 16)) for chunk in engine.chunks), "the engine plans for the whole"
    assert [b"".join(chunk.keys) for chunk in engine.chunks] == [one.job.keys[: 16 * n] for n in (1, 3, 5)]
    assert [chunk.sample is None for chunk in engine.chunks] == [True, True, False]
    sample = engine.chunks[-1].sample
    assert sample is not None
    assert (sample.position, len(sample.history), sample.banned) == (3, 90, (2,))
    assert [(seal.first_block, len(seal.keys) // 16) for seal in station.seals] == [(1, 2), (3, 2)]
    assert b"".join(seal.keys for seal in station.seals) == one.job.keys[16:]
    assert isinstance(end.result, Drawn)
    first = first_token(end.prompt, end.result, None, end.prompt.started_s + 2.0)
    assert (first.token, first.position, first.cached_tokens) == (7, 3, 16)
    assert first.prefill_s == pytest.approx(2.0)


def test_one_prompt_after_the_other() -> None:
    line = prompts(EngineDouble())
    for name in ("a", "b"):
        line.add(sequence(name, 40), (0, 1, 2), 0)
    assert [end.prompt.sequence.job.job_id for end in steps(line)] == ["a", "b"]


def test_who_waits_can_be_taken_out_of_the_line() -> None:
    engine = EngineDouble()
    line, one, two = prompts(engine), sequence("a", 40), sequence("b", 40)
    line.add(one, (0, 1, 2), 0)
    line.add(two, (3, 4, 5), 0)
    assert line.drop(two)
    assert not line.drop(two)
    assert [end.prompt.sequence for end in steps(line)] == [one]


def test_a_stop_in_the_middle_of_a_chunk_ends_it_at_the_next_layer() -> None:
    stop = Aborted("the caller left")

    def interrupted() -> None:
        assert not line.drop(one), "whoever computes it ends it"
        one.stop = stop

    engine, station = EngineDouble(interrupted), StationDouble()
    line, one = prompts(engine, station), sequence("a", 90)
    line.add(one, tuple(range(6)), 0)
    [end] = steps(line)
    assert end.result is stop
    assert (engine.chunks, station.seals, line.is_due) == ([], [], False)


@pytest.mark.parametrize(("trouble", "expected"), [("engine", InternalError), ("messenger", PeerUnreachable)])
def test_trouble_ends_one_prompt_and_not_the_next(trouble: str, expected: type[MooncakeError]) -> None:
    def fail() -> None:
        if trouble == "engine" and not failed:
            failed.append(True)
            raise RuntimeError("out of memory")

    failed: list[bool] = []
    station = StationDouble()
    line = prompts(EngineDouble(fail), station)
    line.add(sequence("a", 20), (0, 1), 0)
    station.lost = trouble == "messenger"
    [end] = steps(line)
    assert isinstance(end.result, expected)
    station.lost = False
    line.add(sequence("b", 20), (0, 1), 0)
    [end] = steps(line)
    assert end.result == Drawn(token=7)
