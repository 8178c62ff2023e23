"""Linear layers by products.c, which has one order of the weights for few rows and for many."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as functional
from torch import nn

from mooncake_mesh.engine.native.library import Library, Product, address

_PANEL: Final = 32
_GATED: Final = 16
"""Columns of a gate, and of what it lets through, that lie together."""


class PackedWeights:
    """The weights (columns, inner) of linear layers with the same input, all with a bias or none, behind each other."""

    def __init__(self, library: Library, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.columns, self.inner = weight.shape
        missing = -self.columns % _PANEL
        padded = functional.pad(weight.detach(), (0, 0, 0, missing)).contiguous()
        self.packed = library.memory.empty(padded.shape, padded.dtype)
        library.pack_weights(padded.data_ptr(), self.packed.data_ptr(), *padded.shape)
        self.bias = None if bias is None else functional.pad(bias.detach(), (0, missing)).contiguous()

    @classmethod
    def of(cls, library: Library, linears: Sequence[nn.Linear]) -> "PackedWeights":
        return cls(library, torch.cat([linear.weight for linear in linears]), _biases(linears))

    @classmethod
    def gated(cls, library: Library, gate: nn.Linear, up: nn.Linear) -> "PackedWeights":
        """Of a gate and what it lets through: 16 columns of each in turns."""
        weight = torch.stack((gate.weight.unflatten(0, (-1, _GATED)), up.weight.unflatten(0, (-1, _GATED))), dim=1)
        bias = _biases((gate, up))
        if bias is not None:
            bias = bias.view(2, -1, _GATED).transpose(0, 1).flatten()
        return cls(library, weight.flatten(0, 2), bias)


def _biases(linears: Sequence[nn.Linear]) -> torch.Tensor | None:
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


def multiplied(library: Library, rows: torch.Tensor, weights: PackedWeights) -> torch.Tensor:
    """*rows* (.., inner) times *weights*: (.., columns)."""
    rows = rows.contiguous()
    out = torch.empty((*rows.shape[:-1], weights.columns), dtype=rows.dtype)
    product = Product(
        rows=rows.data_ptr(),
        weights=weights.packed.data_ptr(),
        bias=address(weights.bias),
        out=out.data_ptr(),
        m=rows.numel() // weights.inner,
        columns=weights.columns,
        inner=weights.inner,
    )
    library.product(ctypes.byref(product), torch.get_num_threads())
    return out


class NativeLinear(nn.Module):
    """What *linear* computes, with an even number of inputs, in bfloat16 on the CPU. Does not keep it."""

    def __init__(self, library: Library, linear: nn.Linear) -> None:
        super().__init__()
        self._library = library
        self._weights = PackedWeights.of(library, [linear])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return multiplied(self._library, rows, self._weights)
