"""Weights in the order in which oneDNN multiplies with them.

A plain bfloat16 product on the CPU puts the weights into that order every time, which for one token costs more than the
product. Packed once, at load, a decode step of one sequence takes about 60 % of the time, and a chunk of 512 tokens
70 % (docs/engine.md). float32 stays as it is: its product has no such order to pay for, and its results stay those of
transformers to the last bit.
"""

from typing import Any, Final

import torch
from torch import nn

_HINT_ROWS: Final = 512
"""Rows that the order is best for. One row loses a tenth by it; a chunk loses 60 % by the order best for one row."""


class PackedLinear(nn.Module):
    """A linear layer that keeps its weights packed only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _HINT_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return product


def can_pack(model: Any) -> bool:
    """Whether packing helps *model* on this machine."""
    return (
        model.device.type == "cpu"
        and model.dtype is torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(model: Any) -> None:
    """Replace the linear layers of *model*, for good: its weights cannot be read any more."""
    with torch.inference_mode():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:
                    setattr(parent, name, PackedLinear(child))
