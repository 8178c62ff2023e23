"""Prefixes that somebody pays to have kept (context caches): their blocks are soft-pinned for a time.

Whoever pins renews in time, and finds out then how much is still here: a pin is no promise, see kv/soft_pins.py. Where
the node has an SSD tier, what is pinned is saved there at once, and so outlives the messenger.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from mooncake_mesh.errors import InvalidRequest, NoFreeBlocks
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.kv.block_pool import BlockPool
from mooncake_proto.ids import BlockId
from mooncake_proto.transfer import PinPrefix, PrefixPinned

_MOST_PINS: Final = 4096
_LONGEST_S: Final = 7 * 86_400.0


class PrefixPins:
    """Which prefixes are pinned in *pool*, and until when. Runs on the event loop."""

    def __init__(self, pool: BlockPool, save: Callable[[Sequence[BlockId]], None]) -> None:
        """*save* is told of the blocks of every pin, again when it is renewed."""
        self._pool = pool
        self._save = save
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def pin(self, request: PinPrefix) -> PrefixPinned:
        """Pin what is in the arena of a prefix, in place of what its ``pin_id`` pinned before.

        Raises InvalidRequest for a time that is none, and NoFreeBlocks where there are too many pins.
        """
        if not (math.isfinite(request.keep_s) and 0 <= request.keep_s <= _LONGEST_S):
            raise InvalidRequest(f"keep_s must be between 0 and {_LONGEST_S:g}", param="keep_s")
        blocks = self._pool.match(list(split_keys(request.keys)))
        self._end(request.pin_id)
        if not blocks or not request.keep_s:
            return PrefixPinned(n_blocks=len(blocks))
        if len(self._timers) >= _MOST_PINS:
            raise NoFreeBlocks(f"{_MOST_PINS} prefixes are pinned already")
        self._pool.pin(_pinner(request.pin_id), blocks, monotonic() + request.keep_s)
        self._save(blocks)
        loop = asyncio.get_running_loop()
        self._timers[request.pin_id] = loop.call_later(request.keep_s, self._end, request.pin_id)
        return PrefixPinned(n_blocks=len(blocks))

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def _end(self, pin_id: str) -> None:
        timer = self._timers.pop(pin_id, None)
        if timer is not None:
            timer.cancel()
            self._pool.unpin(_pinner(pin_id))


def _pinner(pin_id: str) -> str:
    return f"prefix:{pin_id}"
