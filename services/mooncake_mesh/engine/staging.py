"""Copies between pages on the host and rows on a device, by way of pinned memory.

A device copies from and to memory that cannot be swapped out by itself, at the full speed of the bus, and only there
beside its work. Each thread has two pieces for one layer: while one is on its way, the host fills or empties the other.
"""

import threading
from collections.abc import Callable
from typing import Final

import torch

from mooncake_mesh.engine.streams import Mark, Streams

CopyLayer = Callable[[int, torch.Tensor], None]
"""Of the layer with that index, from or to host memory (2, kv_heads, tokens, head_dim)."""

_PIECES: Final = 2


class _Pieces(threading.local):
    """Those of one thread; they grow to the largest layer that it has copied."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._memory = torch.empty(0)

    def like(self, rows: torch.Tensor) -> torch.Tensor:
        """(pieces, *shape of *rows*), of its type and contiguous."""
        n_items = _PIECES * rows.numel()
        if self._memory.dtype is not rows.dtype or self._memory.numel() < n_items:
            self._memory = self._streams.pinned(n_items, rows.dtype)
        return self._memory[:n_items].view(_PIECES, *rows.shape)


class Staging:
    """Copies in the calling thread's stream, done when :meth:`read` and :meth:`write` return."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pieces = _Pieces(streams)

    def read(self, out: torch.Tensor, read_layer: CopyLayer) -> None:
        """Fill *out* (layers, 2, kv_heads, tokens, head_dim), on the device, with what *read_layer* writes."""
        pieces = self._pieces.like(out[0])
        sent: list[Mark] = []
        for index, rows in enumerate(out):
            piece = pieces[index % _PIECES]
            if index >= _PIECES:
                sent[index - _PIECES].wait()
            read_layer(index, piece)
            rows.copy_(piece, non_blocking=True)
            sent.append(self._streams.mark())
        sent[-1].wait()

    def write(self, kv: torch.Tensor, write_layer: CopyLayer) -> None:
        """Hand each layer of *kv* (layers, 2, kv_heads, tokens, head_dim), on the device, to *write_layer*."""
        pieces = self._pieces.like(kv[0])
        landing: list[Mark] = []
        for index, rows in enumerate(kv):
            pieces[index % _PIECES].copy_(rows, non_blocking=True)
            landing.append(self._streams.mark())
            if index:
                self._take(index - 1, pieces, landing, write_layer)
        self._take(len(kv) - 1, pieces, landing, write_layer)

    def _take(self, index: int, pieces: torch.Tensor, landing: list[Mark], write_layer: CopyLayer) -> None:
        landing[index].wait()
        write_layer(index, pieces[index % _PIECES])
