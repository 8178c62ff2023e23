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
from mooncake_mesh.prefill.core import LayerProgress
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import SliceReady

_PAUSE_S: Final = 0.03
"""Between two announcements. Each costs this process and two messengers a millisecond, of cores that may be the
engine's; and what is left to send at the end takes less than that."""


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


class LayerNews:
    """The ``on_layer`` of one chunk's forward, of *layers*. Slices go to the messenger while later layers compute.

    *is_stopped* is read on the engine thread, between layers; *failed* hears on the loop that the messenger is gone.
    Without *transfer_id* nothing is announced.
    """

    def __init__(
        self,
        messenger: RpcClient,
        transfer_id: TransferId | None,
        *,
        layers: LayerRange,
        first_block: int,
        n_blocks: int,
        is_stopped: Callable[[], bool],
        failed: Callable[[MooncakeError], None],
    ) -> None:
        self._messenger = messenger
        self._transfer_id = transfer_id
        self._first_block = first_block
        self._n_blocks = n_blocks
        self._is_stopped = is_stopped
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._progress = LayerProgress(layers.first)
        self._last_layer = layers.end - 1
        self._told_s = 0.0

    def check(self) -> None:
        """Raises StopRequested."""
        if self._is_stopped():
            raise StopRequested

    def __call__(self, layer: int) -> None:
        """Raises StopRequested."""
        self.check()
        if self._transfer_id is not None and self._is_time(layer) and self._progress.wrote(layer):
            self._loop.call_soon_threadsafe(self._announce)

    def _is_time(self, layer: int) -> bool:
        """Others may wait for the last layer, and none for those just before the next."""
        now_s = monotonic()
        if layer < self._last_layer and now_s - self._told_s < _PAUSE_S:
            return False
        self._told_s = now_s
        return True

    def _announce(self) -> None:
        """On the loop: all layers written so far, which is one of a real model and may be all of a fast one."""
        layers = self._progress.take()
        if not layers or self._transfer_id is None:
            return
        try:
            self._messenger.post(
                SliceReady(
                    transfer_id=self._transfer_id,
                    layer=layers.start,
                    n_layers=len(layers),
                    first_block=self._first_block,
                    n_blocks=self._n_blocks,
                )
            )
        except PeerUnreachable as error:
            self._failed(error)
