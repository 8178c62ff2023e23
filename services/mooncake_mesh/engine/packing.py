"""Weights in the order in which oneDNN multiplies with them, for bfloat16 on the CPU.

A plain product puts the weights into that order every time, which for a few rows costs more than the product. Packed
once, at load, they also allow what a layer does next to be part of the product: the activation, and the sum with the
residual. float32 stays as it is: its results are those of transformers to the last bit. docs/engine.md has the figures.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_HINT_ROWS: Final = 512
"""Rows that the order is best for. One row loses a tenth by it; a chunk loses 60 % by the order best for one row."""


class PackedLinear(nn.Module):
    """The linear layers of the same input as one, their weights packed only. All have a bias, or none has."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _HINT_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, "none")

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        """SiLU of the product."""
        return self._product(rows, "swish")

    def times(self, rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """The product's elements times *factors*."""
        return self._with(rows, factors, "mul")

    def plus(self, rows: torch.Tensor, summands: torch.Tensor) -> torch.Tensor:
        """The product's elements plus *summands*."""
        return self._with(rows, summands, "add")

    def _product(self, rows: torch.Tensor, function: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, function, [], "")
        return result

    def _with(self, rows: torch.Tensor, other: torch.Tensor, function: str) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            rows, other, self._weight, self._bias, function
        )
        return result


def can_pack(model: Any) -> bool:
    """Whether packing helps *model* on this machine."""
    return (
        model.device.type == "cpu"
        and model.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(model: Any, packed: Callable[[nn.Linear], nn.Module] = PackedLinear) -> None:
    """Replace the linear layers of *model*, for good: its weights cannot be read any more."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, packed(child))
