"""Pinned prefixes: kept through pressure, ended by time, by their owner or by the next pin, and never a promise."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import BlockPool, NoRoom
from mooncake_mesh.messenger.prefix_pins import PrefixPins
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.transfer import PinPrefix

KEYS = [BlockKey(bytes([i]) * 16) for i in range(8)]


def pool_with(n_keys: int) -> BlockPool:
    pool = BlockPool(20)
    blocks = pool.reserve("writer", n_keys)
    assert not isinstance(blocks, NoRoom)
    for block, key in zip(blocks, KEYS, strict=False):
        pool.seal("writer", block, key)
    pool.release("writer")
    return pool


def crowd(pool: BlockPool, n_blocks: int) -> int:
    """Another job takes *n_blocks* and fills them; how many of KEYS are left."""
    taken = pool.reserve("crowd", n_blocks)
    assert not isinstance(taken, NoRoom)
    for i, block in enumerate(taken):
        pool.seal("crowd", block, BlockKey(bytes([100 + i]) * 16))
    pool.release("crowd")
    return len(pool.match(KEYS))


def on_loop(play: Callable[[], None]) -> None:
    async def run() -> None:
        play()

    asyncio.run(run())


def pin(pins: PrefixPins, n_keys: int, keep_s: float = 60.0) -> int:
    return pins.pin(PinPrefix(pin_id="one", keys=join_keys(KEYS[:n_keys]), keep_s=keep_s)).n_blocks


def _save_nothing(_: Sequence[BlockId]) -> None:
    """There is no SSD."""


def test_what_is_pinned_is_saved_and_again_when_the_pin_is_renewed() -> None:
    def play() -> None:
        pool = pool_with(8)
        saved: list[Sequence[BlockId]] = []
        pins = PrefixPins(pool, saved.append)
        for keep_s in (60.0, 60.0, 0.0):
            pin(pins, 4, keep_s)
        assert saved == [pool.match(KEYS[:4])] * 2
        pins.close()

    on_loop(play)


def test_a_pinned_prefix_outlives_a_full_pool() -> None:
    def play() -> None:
        pool = pool_with(8)
        pins = PrefixPins(pool, _save_nothing)
        assert pin(pins, 8) == 8
        assert crowd(pool, 12) == 8
        assert crowd(pool, 12) == 8  # the crowd's own cached blocks go first
        pins.close()

    on_loop(play)


def test_what_is_not_here_is_not_pinned() -> None:
    on_loop(lambda: _expect(pin(PrefixPins(pool_with(3), _save_nothing), 8), 3))


@pytest.mark.parametrize("end", ["no keys", "no time", "shorter"])
def test_a_pin_replaces_the_one_before(end: str) -> None:
    def play() -> None:
        pool = pool_with(8)
        pins = PrefixPins(pool, _save_nothing)
        pin(pins, 8)
        pin(pins, *{"no keys": (0, 60.0), "no time": (8, 0.0), "shorter": (2, 60.0)}[end])
        crowd(pool, 12)
        assert crowd(pool, 8) == (2 if end == "shorter" else 0)
        pins.close()

    on_loop(play)


def test_a_pin_ends_by_itself() -> None:
    async def play() -> None:
        pool = pool_with(8)
        pins = PrefixPins(pool, _save_nothing)
        pin(pins, 8, keep_s=0.001)
        await asyncio.sleep(0.05)
        crowd(pool, 12)
        assert crowd(pool, 8) == 0
        pin(pins, 8)
        assert pin(pins, 8) == 0

    asyncio.run(play())


@pytest.mark.parametrize("keep_s", [-1.0, float("inf"), float("nan"), 1e9])
def test_a_time_must_be_one(keep_s: float) -> None:
    with pytest.raises(InvalidRequest):
        PrefixPins(pool_with(1), _save_nothing).pin(PinPrefix(pin_id="one", keys=b"", keep_s=keep_s))


def _expect(got: int, wanted: int) -> None:
    assert got == wanted
