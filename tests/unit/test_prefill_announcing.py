"""One chunk's forward on the engine thread, and what it tells of layers."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from mooncake_mesh.engine.api import PrefillChunk
from mooncake_mesh.engine.fake import FakeEngine
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.prefill import announcing
from mooncake_mesh.prefill.announcing import Forwarded, LayerNews, StopRequested, forward, to_messenger
from mooncake_mesh.prefill.core import ChunkBlocks
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import SliceReady
from tests.mesh.clients import FAKE


class Messenger:
    def __init__(self) -> None:
        self.posted: list[SliceReady] = []

    def post(self, body: SliceReady) -> None:
        self.posted.append(body)


def news(messenger: Messenger, *, is_stopped: bool, n_layers: int = FAKE.layout.layers) -> LayerNews:
    blocks = ChunkBlocks(first_block=0, n_blocks=1)
    announce = to_messenger(
        cast(RpcClient, messenger), TransferId("t"), blocks, failed=lambda error: pytest.fail(str(error))
    )
    return LayerNews(announce, layers=LayerRange.whole(n_layers), is_stopped=lambda: is_stopped)


def engine(*, bound: bool) -> FakeEngine:
    made = FakeEngine(FAKE)
    if bound:
        made.bind(memoryview(bytearray(4 * made.spec.layout.block_bytes)))
    return made


def run(engine: FakeEngine, messenger: Messenger, *, is_stopped: bool) -> Forwarded:
    chunk = PrefillChunk(sequence="s", tokens=np.arange(5, dtype=np.int32), start=0, blocks=[0])

    async def scenario() -> Any:
        done = forward(engine, chunk, news(messenger, is_stopped=is_stopped))
        await asyncio.sleep(0)  # what it announces is posted on the loop
        return done

    return cast(Forwarded, asyncio.run(scenario()))


def test_every_layer_is_announced() -> None:
    messenger = Messenger()
    run(engine(bound=True), messenger, is_stopped=False)
    layers = [layer for told in messenger.posted for layer in range(told.layer, told.layer + told.n_layers)]
    assert layers == list(range(FAKE.layout.layers))


@pytest.mark.parametrize(
    ("layer_s", "announced"),
    [(0.0, [(0, 8)]), (0.012, [(0, 3), (3, 3), (6, 2)]), (0.031, [(n, 1) for n in range(8)])],
)
def test_layers_that_come_fast_are_announced_together_and_the_last_one_at_once(
    layer_s: float, announced: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(50.0 + layer_s * n for n in range(9))  # the chunk begins before its first layer is there
    monkeypatch.setattr(announcing, "monotonic", lambda: next(clock))
    messenger = Messenger()

    async def scenario() -> None:
        tell = news(messenger, is_stopped=False, n_layers=8)
        for layer in range(8):
            tell(layer)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert [(told.layer, told.n_layers) for told in messenger.posted] == announced


@pytest.mark.parametrize("bound", [True, False])
def test_a_stopped_job_computes_nothing_even_where_its_arena_is_gone(bound: bool) -> None:
    """The node's messenger died between two chunks: the job is placed again, it has not failed."""
    messenger = Messenger()
    with pytest.raises(StopRequested):
        run(engine(bound=bound), messenger, is_stopped=True)
    assert messenger.posted == []


def test_an_engine_that_fails_says_so() -> None:
    with pytest.raises(RuntimeError, match="not bound"):
        run(engine(bound=False), Messenger(), is_stopped=False)
