"""From the engine thread to the messenger: which layers of a chunk are written."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, thread_time
from typing import Final

from mooncake_mesh.engine.api import Drawn, Engine, PrefillChunk
from mooncake_mesh.errors import MooncakeError, PeerUnreachable
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.prefill.core import ChunkBlocks, LayerProgress
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import SliceReady

_PAUSE_S: Final = 0.03
"""Before the first announcement, and between two. Each costs this process and two messengers a millisecond, of cores
that may be the engine's; and what is left to send at the end takes less than that."""


class StopRequested(Exception):
    """Raised on the engine thread to leave a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forwarded:
    """One chunk's forward: what was drawn, if anything, and when it ran. ``cpu_s`` is the engine thread's."""

    drawn: Drawn | None
    began_s: float
    compute_s: float
    cpu_s: float


def forward(engine: Engine, chunk: PrefillChunk, news: "LayerNews") -> Forwarded:
    """Compute *chunk*; on the engine thread. Raises StopRequested, or what the engine raises.

    A job that was stopped has, maybe, no arena any more: the thread was told to let go of it after the stop.
    """
    news.check()
    began_s, cpu_s = monotonic(), thread_time()
    drawn = engine.prefill(chunk, news)
    return Forwarded(drawn=drawn, began_s=began_s, compute_s=monotonic() - began_s, cpu_s=thread_time() - cpu_s)


Announce = Callable[[range], None]
"""Hears on the loop, in order, of layers of one chunk that are written; perhaps of several at once."""


def to_messenger(
    messenger: RpcClient, transfer_id: TransferId | None, blocks: ChunkBlocks, failed: Callable[[MooncakeError], None]
) -> Announce | None:
    """The node's messenger sends on what it hears of, while later layers compute. None where there is no transfer.

    *failed* hears that the messenger is gone.
    """
    if transfer_id is None:
        return None

    def announce(layers: range) -> None:
        ready = SliceReady(
            transfer_id=transfer_id,
            layer=layers.start,
            n_layers=len(layers),
            first_block=blocks.first_block,
            n_blocks=blocks.n_blocks,
        )
        try:
            messenger.post(ready)
        except PeerUnreachable as error:
            failed(error)

    return announce


class LayerNews:
    """The ``on_layer`` of one chunk's forward, of *layers*, which are announced while later ones compute.

    *is_stopped* is read on the engine thread, between layers.
    """

    def __init__(self, announce: Announce | None, *, layers: LayerRange, is_stopped: Callable[[], bool]) -> None:
        self._announce = announce
        self._is_stopped = is_stopped
        self._loop = asyncio.get_running_loop()
        self._progress = LayerProgress(layers.first)
        self._last_layer = layers.end - 1
        self._told_s = monotonic()

    def check(self) -> None:
        """Raises StopRequested."""
        if self._is_stopped():
            raise StopRequested

    def __call__(self, layer: int) -> None:
        """Raises StopRequested."""
        self.check()
        if self._announce is not None and self._is_time(layer) and self._progress.wrote(layer):
            self._loop.call_soon_threadsafe(self._tell)

    def _is_time(self, layer: int) -> bool:
        """Others may wait for the last layer, and none for those just before the next."""
        now_s = monotonic()
        if layer < self._last_layer and now_s - self._told_s < _PAUSE_S:
            return False
        self._told_s = now_s
        return True

    def _tell(self) -> None:
        """On the loop: all layers written so far, which is one of a real model and may be all of a fast one."""
        layers = self._progress.take()
        if layers and self._announce is not None:
            self._announce(layers)
