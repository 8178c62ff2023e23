"""Attention, rows and pages by the C functions of this package, on torch's tensors.

All take bfloat16 on the CPU and use as many threads as torch does just then.
"""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from mooncake_mesh.engine.attention_kernels import HAS_AMX, LayerCall
from mooncake_mesh.engine.native.library import Chunk, Library, Tokens
from mooncake_mesh.engine.native.places import TokenPlaces

_TILE: Final = 64


class Kernels:
    """Functions of *library* on tensors.

    ``multiplies``: whether its products are to be used, and with them :meth:`chunk_attention`. With AMX torch's own
    multiply faster than AVX512-BF16 can.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.multiplies = library.multiplies and not HAS_AMX

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Contiguous *rows* (.., size) divided by their root mean square, times *weight*."""
        size = rows.shape[-1]
        out = torch.empty_like(rows)
        self.library.rms_norm(
            rows.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows.numel() // size,
            size,
            eps,
            torch.get_num_threads(),
        )
        return out

    def turned(self, rows: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """*rows* (batch, tokens, all heads, head_dim), contiguous, the first *heads* heads turned in place.

        *cos* and *sin* are (batch, tokens, head_dim).
        """
        batch, tokens, all_heads, head_dim = rows.shape
        cos, sin = cos.contiguous(), sin.contiguous()
        self.library.rotate(
            rows.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            batch * tokens,
            all_heads * head_dim,
            heads,
            head_dim,
            torch.get_num_threads(),
        )
        return rows

    def token_attention(self, call: LayerCall, places: TokenPlaces) -> torch.Tensor:
        """Write K and V of one new token of each sequence to its place in the call's layer, and attend over all up to
        there: (batch, 1, heads, head_dim)."""
        batch, heads, _, head_dim = call.q.shape
        kv_heads = call.k.shape[1]
        q, k, v = (_by_head(tensor) for tensor in (call.q, call.k, call.v))
        out = torch.empty((batch, 1, heads, head_dim), dtype=torch.bfloat16)
        tokens = Tokens(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_stride=q.stride(0),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            out=out.data_ptr(),
            contexts=places.addresses.data_ptr(),
            capacities=places.capacities.data_ptr(),
            positions=places.positions.data_ptr(),
            batch=batch,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            head_dim=head_dim,
        )
        self.library.token_attention(
            ctypes.byref(tokens), call.layer, call.window or 0, _scaling(call), torch.get_num_threads()
        )
        return out

    def chunk_attention(self, call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the last tokens of *k* and *v* (1, kv_heads, positions, head_dim), heads evenly apart, each over
        what is not behind it: (1, tokens, heads, head_dim)."""
        _, heads, tokens, head_dim = call.q.shape
        _, kv_heads, positions, _ = k.shape
        q, k, v = _by_token(call.q), _by_position(k), _by_position(v)
        out = torch.empty((1, tokens, heads, head_dim), dtype=torch.bfloat16)
        chunk = Chunk(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            q_stride=q.stride(2),
            k_stride=k.stride(1),
            v_stride=v.stride(1),
            out=out.data_ptr(),
            tokens=tokens,
            start=positions - tokens,
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            head_dim=head_dim,
            window=call.window or 0,
            scaling=_scaling(call),
        )
        room = chunk_room(kv_heads, positions, head_dim)
        self.library.chunk_attention(ctypes.byref(chunk), room.data_ptr(), torch.get_num_threads())
        return out

    def read_pages(
        self, pages: torch.Tensor, first_layer: int, blocks: Sequence[int], start: int, out: torch.Tensor
    ) -> None:
        """Positions *start* onwards of a sequence in *blocks*, of the layers from *first_layer* on, into *out*.

        *out* is (layers, 2, kv_heads, positions, head_dim).

        *pages* is (blocks, layers, 2, block_tokens, kv_heads, head_dim). Raises IndexError outside *blocks* or *pages*.
        """
        self._move(pages, first_layer, blocks, start, out, to_pages=0)

    def write_pages(
        self, pages: torch.Tensor, first_layer: int, blocks: Sequence[int], start: int, kv: torch.Tensor
    ) -> None:
        """The reverse of :meth:`read_pages`."""
        self._move(pages, first_layer, blocks, start, kv, to_pages=1)

    def _move(
        self,
        pages: torch.Tensor,
        first_layer: int,
        blocks: Sequence[int],
        start: int,
        rows: torch.Tensor,
        to_pages: int,
    ) -> None:
        n_layers, _, kv_heads, positions, head_dim = rows.shape
        block_tokens, item_bytes = pages.shape[3], pages.element_size()
        end = start + positions
        ids = blocks[start // block_tokens : -(-end // block_tokens)]
        if not positions:
            return
        if len(blocks) * block_tokens < end or min(ids) < 0 or max(ids) >= pages.shape[0]:
            raise IndexError(f"positions {start} to {end} are not in {len(blocks)} blocks of an arena of {len(pages)}")
        if first_layer + n_layers > pages.shape[1]:
            raise IndexError(f"layers {first_layer} to {first_layer + n_layers} of {pages.shape[1]}")
        numbers, strides = torch.tensor(ids), torch.tensor([stride * item_bytes for stride in rows.stride()[:4]])
        self.library.copy_pages(
            pages.data_ptr(),
            pages.stride(0) * item_bytes,
            pages.stride(1) * item_bytes,
            block_tokens,
            numbers.data_ptr(),
            rows.data_ptr(),
            strides.data_ptr(),
            first_layer,
            n_layers,
            start,
            end,
            kv_heads,
            head_dim * item_bytes,
            to_pages,
        )


def chunk_room(kv_heads: int, positions: int, head_dim: int) -> torch.Tensor:
    """Where attention of a chunk has V of all *positions* in another order."""
    return torch.empty(kv_heads * -(-positions // _TILE) * _TILE * head_dim, dtype=torch.bfloat16)


def _scaling(call: LayerCall) -> float:
    return float(call.q.shape[3] ** -0.5) if call.scaling is None else call.scaling


def _by_head(one: torch.Tensor) -> torch.Tensor:
    """*one* token of each sequence (batch, heads, 1, head_dim), the heads of a sequence one behind the other."""
    return one if one.stride(1) == one.shape[3] and one.stride(3) == 1 else one.contiguous()


def _by_token(q: torch.Tensor) -> torch.Tensor:
    """*q* (1, heads, tokens, head_dim), the heads of a token one behind the other."""
    if q.stride(1) == q.shape[3] and q.stride(3) == 1:
        return q
    return q.transpose(1, 2).contiguous().transpose(1, 2)


def _by_position(kv: torch.Tensor) -> torch.Tensor:
    """*kv* (1, kv_heads, positions, head_dim), the positions of a head one behind the other."""
    return kv if kv.stride(2) == kv.shape[3] and kv.stride(3) == 1 else kv.contiguous()
