"""Where K and V live: the arena's pages in host memory.

They are the truth: every position's K and V are written there, and what other workers' arenas sent is read from there.
What attention computes with are copies on the device (contexts.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from mooncake_mesh.engine.page_copies import read_positions, write_positions
from mooncake_mesh.engine.staging import Staging
from mooncake_mesh.engine.streams import HostStreams
from mooncake_mesh.errors import InvariantViolated
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.ids import BlockKey

_TORCH_DTYPES: Final = {KvDtype.FLOAT32: torch.float32, KvDtype.BFLOAT16: torch.bfloat16}


def torch_dtype(dtype: KvDtype) -> torch.dtype:
    return _TORCH_DTYPES[dtype]


class PageKernels(Protocol):
    """Copies between pages and rows in C; see Kernels."""

    def read_pages(
        self, pages: torch.Tensor, first_layer: int, blocks: Sequence[int], start: int, out: torch.Tensor
    ) -> None: ...

    def write_pages(
        self, pages: torch.Tensor, first_layer: int, blocks: Sequence[int], start: int, kv: torch.Tensor
    ) -> None: ...


class ArenaPages:
    """The arena as a tensor (blocks, layers, K or V, block_tokens, kv_heads, head_dim) on the host. What *kernels* can
    copy they do: torch takes a call for each block that does not lie behind the one before, with the interpreter. From
    and to a device all goes by *staging*."""

    def __init__(self, layout: KvLayout, kernels: PageKernels | None = None, staging: Staging | None = None) -> None:
        self.layout = layout
        self._kernels = kernels
        self._staging = staging or Staging(HostStreams())
        self._pages: torch.Tensor | None = None

    def bind(self, arena: memoryview) -> None:
        """View *arena*, a whole number of blocks, as pages. Raises ValueError."""
        if arena.nbytes % self.layout.block_bytes:
            raise ValueError(
                f"arena of {arena.nbytes} bytes is no whole number of {self.layout.block_bytes}-byte blocks"
            )
        self._pages = torch.frombuffer(arena, dtype=torch_dtype(self.layout.dtype)).view(-1, *self.layout.shape)

    def unbind(self) -> None:
        self._pages = None

    @property
    def pages(self) -> torch.Tensor:
        if self._pages is None:
            raise InvariantViolated("the engine is not bound to an arena")
        return self._pages

    def write_layers(self, first_layer: int, blocks: Sequence[int], start: int, kv: torch.Tensor) -> None:
        """Write *kv* (layers, 2, kv_heads, tokens, head_dim) at positions *start* onwards of a sequence."""
        if not kv.is_cpu:
            self._staging.write(
                kv, lambda index, rows: self.write_layers(first_layer + index, blocks, start, rows[None])
            )
            return
        if (kernels := self._kernels_for(kv)) is not None:
            kernels.write_pages(self.pages, first_layer, blocks, start, kv)
            return
        for layer, layer_kv in enumerate(kv, first_layer):
            write_positions(self.pages, layer, blocks, start, layer_kv)

    def read_positions(self, layer: int, blocks: Sequence[int], start: int, end: int, out: torch.Tensor) -> None:
        """Copy one layer of positions *start* to *end* into *out* (2, kv_heads, end - start, head_dim)."""
        if not out.is_cpu:
            self._staging.read(out[None], lambda _, rows: self.read_positions(layer, blocks, start, end, rows))
        elif (kernels := self._kernels_for(out)) is not None:
            kernels.read_pages(self.pages, layer, blocks, start, out[None])
        else:
            read_positions(self.pages, layer, blocks, start, end, out)

    def write_tokens(self, blocks: torch.Tensor, offsets: torch.Tensor, kv: torch.Tensor) -> None:
        """Write all layers of one token of each of several sequences: *kv* (tokens, layers, 2, kv_heads, head_dim)."""
        self.pages[blocks, :, :, offsets] = kv.to("cpu")

    def read_all(self, blocks: Sequence[int], start: int, end: int, out: torch.Tensor, *, first_layer: int = 0) -> None:
        """Copy positions *start* to *end* of a sequence into *out* (layers, 2, kv_heads, end - start, head_dim).

        *out* has the layers from *first_layer* on, as many as it has room for.
        """
        if not out.is_cpu:
            self._staging.read(
                out, lambda index, rows: self.read_positions(first_layer + index, blocks, start, end, rows)
            )
            return
        if (kernels := self._kernels_for(out)) is not None:
            kernels.read_pages(self.pages, first_layer, blocks, start, out)
            return
        pages, block_tokens = self.pages[:, first_layer : first_layer + len(out)], self.layout.block_tokens
        position = start
        while position < end:
            index, offset = divmod(position, block_tokens)
            count = min(block_tokens - offset, end - position)
            piece = pages[blocks[index], :, :, offset : offset + count].transpose(2, 3)
            out[:, :, :, position - start : position - start + count] = piece
            position += count

    def _kernels_for(self, rows: torch.Tensor) -> PageKernels | None:
        return self._kernels if rows.is_cpu and rows.stride(-1) == 1 else None

    def read_layer(self, layer: int, block_ids: torch.Tensor, end: int, out: torch.Tensor) -> None:
        """Copy one layer of the first *end* positions into *out* (2, kv_heads, end, head_dim).

        *block_ids* are those of the whole blocks that hold them.
        """
        gathered = self.pages[:, layer].index_select(0, block_ids)  # (blocks, 2, block_tokens, kv_heads, head_dim)
        rows = gathered.permute(1, 3, 0, 2, 4).flatten(2, 3)
        out.copy_(rows[:, :, :end])


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Work on one sequence: positions below ``start`` have K and V in ``blocks``, those up to ``end`` get them now.

    ``keys``: those of the whole blocks before ``start``, as far as they are known.
    """

    sequence: str
    blocks: Sequence[int]
    start: int
    end: int
    keys: Sequence[BlockKey] = ()
