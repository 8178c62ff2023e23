"""Attention of one new token of each of several sequences, over contexts that lie anywhere on the device.

In Triton, which torch brings along for CUDA. The addresses of the contexts are data, so that a graph of a step serves
every batch of its size. The positions of a sequence are dealt out to several programs, whose parts one more puts
together: a batch is small, and a device has many processors.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl

_SPLITS: Final = 16
_TILE: Final = 64
_LEAST_OF_DOT: Final = 16
"""Rows and columns of the smallest product that Triton has."""

_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _keys_of(q, addresses, capacities, sequence, head, layer, kv_heads, head_dim):  # type: ignore[no-untyped-def]
    """Those of one head in a context of elements like q's, and how far behind them its values are."""
    capacity = tl.load(capacities + sequence)
    side = kv_heads * capacity * head_dim
    context = tl.load(addresses + sequence).to(tl.pointer_type(q.dtype.element_ty))
    return context + layer * 2 * side + head * capacity * head_dim, side


@triton.jit  # type: ignore[untyped-decorator]
def _queries_of(  # type: ignore[no-untyped-def]
    q, sequence, head, kv_heads, groups, head_dim, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Those of one kv head (GROUPS, HEAD_DIM); where they are, in q as in what comes out; and which are no padding."""
    group, column = tl.arange(0, GROUPS), tl.arange(0, HEAD_DIM)
    rows = (sequence * kv_heads * groups + head * groups + group) * head_dim
    cells = rows[:, None] + column[None, :]
    is_cell = (group < groups)[:, None] & (column < head_dim)[None, :]
    return tl.load(q + cells, mask=is_cell, other=0.0).to(tl.float32), cells, is_cell


@triton.jit  # type: ignore[untyped-decorator]
def _attend_past(  # type: ignore[no-untyped-def]
    q,
    addresses,
    capacities,
    positions,
    mixed,
    most,
    total,
    layer,
    window,
    scaling,
    kv_heads,
    groups,
    head_dim,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The positions before the new one, every SPLITS-th tile of them; relative to the greatest score of these."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + sequence)
    keys, side = _keys_of(q, addresses, capacities, sequence, head, layer, kv_heads, head_dim)
    query, _, _ = _queries_of(q, sequence, head, kv_heads, groups, head_dim, GROUPS, HEAD_DIM)
    group, column = tl.arange(0, GROUPS), tl.arange(0, HEAD_DIM)
    greatest = tl.full((GROUPS,), float("-inf"), tl.float32)
    sums = tl.zeros((GROUPS,), tl.float32)
    mixture = tl.zeros((GROUPS, HEAD_DIM), tl.float32)
    first = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    for at in range(first + split * TILE, position, SPLITS * TILE):
        places = at + tl.arange(0, TILE)
        is_place = places < position
        cells = places[:, None] * head_dim + column[None, :]
        is_cell = is_place[:, None] & (column < head_dim)[None, :]
        key = tl.load(keys + cells, mask=is_cell, other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scaling
        scores = tl.where(is_place[None, :], scores, float("-inf"))
        next_greatest = tl.maximum(greatest, tl.max(scores, axis=1))
        shrink = tl.exp2(greatest - next_greatest)
        weights = tl.exp2(scores - next_greatest[:, None])
        value = tl.load(keys + side + cells, mask=is_cell, other=0.0).to(tl.float32)
        mixture = mixture * shrink[:, None] + tl.dot(weights, value, input_precision=PRECISION)
        sums = sums * shrink + tl.sum(weights, axis=1)
        greatest = next_greatest
    part = ((sequence * kv_heads + head) * SPLITS + split) * GROUPS + group
    tl.store(most + part, greatest)
    tl.store(total + part, sums)
    tl.store(mixed + part[:, None] * HEAD_DIM + column[None, :], mixture)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    q,
    new,
    addresses,
    capacities,
    positions,
    mixed,
    most,
    total,
    out,
    layer,
    scaling,
    kv_heads,
    groups,
    head_dim,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of all positions before, and the new one, whose K and V go to their place."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + sequence)
    group, column = tl.arange(0, GROUPS), tl.arange(0, HEAD_DIM)
    is_column = column < head_dim
    own = ((sequence * 2) * kv_heads + head) * head_dim + column
    key = tl.load(new + own, mask=is_column, other=0.0)
    value = tl.load(new + own + kv_heads * head_dim, mask=is_column, other=0.0)
    keys, side = _keys_of(q, addresses, capacities, sequence, head, layer, kv_heads, head_dim)
    place = keys + position * head_dim + column
    tl.store(place, key, mask=is_column)
    tl.store(place + side, value, mask=is_column)
    query, cells, is_cell = _queries_of(q, sequence, head, kv_heads, groups, head_dim, GROUPS, HEAD_DIM)
    score = tl.sum(query * key.to(tl.float32)[None, :], axis=1) * scaling
    first = (sequence * kv_heads + head) * SPLITS * GROUPS
    every = first + tl.arange(0, SPLITS)[:, None] * GROUPS + group[None, :]
    top = tl.maximum(tl.max(tl.load(most + every), axis=0), score)
    sums = tl.exp2(score - top)
    mixture = sums[:, None] * value.to(tl.float32)[None, :]
    for split in range(SPLITS):
        part = first + split * GROUPS + group
        shrink = tl.exp2(tl.load(most + part) - top)
        sums += tl.load(total + part) * shrink
        mixture += tl.load(mixed + part[:, None] * HEAD_DIM + column[None, :]) * shrink[:, None]
    tl.store(out + cells, (mixture / sums[:, None]).to(q.dtype.element_ty), mask=is_cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTable:
    """Where the next position of each sequence goes, all int64 on the device: addresses of contexts (layers, 2,
    kv_heads, capacity, head_dim), their capacities, and the positions."""

    addresses: torch.Tensor
    capacities: torch.Tensor
    positions: torch.Tensor


class TokenAttention:
    """For batches of up to *batch* sequences; the parts' memory is made once."""

    def __init__(self, batch: int, kv_heads: int, groups: int, head_dim: int, device: torch.device) -> None:
        self._kv_heads, self._groups, self._head_dim = kv_heads, groups, head_dim
        self._padded: dict[str, Any] = {
            "GROUPS": max(_LEAST_OF_DOT, triton.next_power_of_2(groups)),
            "HEAD_DIM": max(_LEAST_OF_DOT, triton.next_power_of_2(head_dim)),
            "SPLITS": _SPLITS,
        }
        parts = (batch, kv_heads, _SPLITS, self._padded["GROUPS"])
        self._most, self._total = torch.empty((2, *parts), dtype=torch.float32, device=device)
        self._mixed = torch.empty((*parts, self._padded["HEAD_DIM"]), dtype=torch.float32, device=device)

    def __call__(
        self, q: torch.Tensor, new: torch.Tensor, table: ContextTable, layer: int, *, window: int, scaling: float
    ) -> torch.Tensor:
        """Contiguous *q* (batch, heads, head_dim) over the sequences' positions and their *new* K and V, contiguous
        (batch, 2, kv_heads, head_dim), which go to their places in *layer*: (batch, heads, head_dim)."""
        out, where = torch.empty_like(q), (table.addresses, table.capacities, table.positions)
        parts, sizes = (self._mixed, self._most, self._total), (self._kv_heads, self._groups, self._head_dim)
        binary = scaling * _LOG2_E  # weights are powers of two
        precision = "ieee" if q.dtype is torch.float32 else "tf32"  # which has all of a bfloat16
        _attend_past[(len(q), self._kv_heads, _SPLITS)](
            q, *where, *parts, layer, window, binary, *sizes, **self._padded, TILE=_TILE, PRECISION=precision
        )
        _join[(len(q), self._kv_heads)](q, new, *where, *parts, out, layer, binary, *sizes, **self._padded)
        return out
