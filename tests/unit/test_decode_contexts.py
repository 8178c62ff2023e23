"""What a decode instance has its engine load and keep: asked for once, and failing for the one sequence only."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import structlog.testing

from mooncake_mesh.decode.contexts import SequenceContexts
from mooncake_mesh.engine.api import Engine
from mooncake_mesh.errors import Aborted, InternalError, MooncakeError
from mooncake_mesh.worker.station import Station
from mooncake_proto.ids import BlockKey
from mooncake_proto.transfer import Acquired, Landed
from tests.mesh.clients import FAKE
from tests.unit.test_decode_inline_prompts import StationDouble, sequence


class EngineDouble:
    """Keeps what it is asked, and loads when it is told."""

    class spec:
        layout = FAKE.layout

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.loading: Future[None] = Future()

    def preload(self, name: str, blocks: Sequence[int], n_tokens: int, keys: Sequence[BlockKey]) -> "Future[None]":
        self.asked.append((name, tuple(blocks), n_tokens, b"".join(keys)))
        return self.loading

    def retire(self, name: str, keys: Sequence[BlockKey]) -> None:
        self.asked.append((name, b"".join(keys)))


class Broken(EngineDouble):
    def preload(self, name: str, blocks: Sequence[int], n_tokens: int, keys: Sequence[BlockKey]) -> "Future[None]":
        raise RuntimeError("no memory")


def loaded(engine: EngineDouble, meanwhile: Callable[[Any], None] = lambda _: None) -> tuple[MooncakeError | None, Any]:
    """What load says of a prompt of 40 tokens, and its sequence; *meanwhile* is called while it waits."""
    one = sequence("a", 40)
    contexts = SequenceContexts(cast(Station, StationDouble()), cast(Engine, engine))
    landed = Landed(received_bytes=100, first_slice_s=0.1, last_slice_s=0.2)
    acquired = Acquired(job_id=one.arena_job, blocks=(7, 8, 9), cached_blocks=1, landed=landed)

    async def run() -> MooncakeError | None:
        task = asyncio.ensure_future(contexts.load(one, acquired))  # noqa: TID251  ends in this function
        await asyncio.sleep(0)
        meanwhile(one)
        return await task

    with structlog.testing.capture_logs():
        return asyncio.run(run()), one


def test_a_prompt_is_loaded_with_the_keys_of_its_whole_blocks() -> None:
    engine = EngineDouble()
    failure, one = loaded(engine, lambda _: engine.loading.set_result(None))
    assert failure is None
    assert engine.asked == [("a", (7, 8, 9), 40, one.job.keys)]
    assert len(one.job.keys) == 2 * 16


def test_one_that_is_stopped_meanwhile_is_not_decoded() -> None:
    engine, why = EngineDouble(), Aborted("cancelled")

    def stop(one: Any) -> None:
        one.stop = why
        engine.loading.set_result(None)

    assert loaded(engine, stop)[0] is why


def test_a_load_that_fails_ends_its_own_sequence() -> None:
    engine = EngineDouble()
    failure, _ = loaded(engine, lambda _: engine.loading.set_exception(IndexError("block 400")))
    assert isinstance(failure, InternalError)
    assert "IndexError" in str(failure)
    assert isinstance(loaded(Broken())[0], InternalError)


def test_the_stop_of_a_lost_arena_goes_before_what_it_breaks() -> None:
    engine, why = EngineDouble(), Aborted("the node's messenger is gone")

    def lose(one: Any) -> None:
        one.stop = why
        engine.loading.set_exception(RuntimeError("not bound"))

    assert loaded(engine, lose)[0] is why


def test_what_is_over_is_retired_under_the_keys_of_all_its_whole_blocks() -> None:
    engine, one = EngineDouble(), sequence("a", 40)
    contexts = SequenceContexts(cast(Station, StationDouble()), cast(Engine, engine))
    asyncio.run(contexts.retire(one))
    assert engine.asked == [("a", one.job.keys)]
