"""A decoder layer of the Llama family in half as many operations, for bfloat16 on the CPU.

In a decode step of few sequences, what transformers' layer does beside its products takes a third of the time: some
sixty small operations. This one multiplies with query, key and value weights at once, turns queries and keys together,
and lets the MLP's activation, its product with the gate, and the sums with the residual be part of the products.

It serves layers of classes that are known to compute just that; whoever replaces them compares the model's logits.
"""

from typing import Any, Final, Protocol

import torch
import torch.nn.functional as functional
from torch import nn

from mooncake_mesh.engine.attention import attend
from mooncake_mesh.engine.attention_kernels import LayerCall
from mooncake_mesh.engine.packing import PackedLinear

_KNOWN: Final = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"})


class RowMaths(Protocol):
    """What a layer does with rows beside its products."""

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """*rows* (.., size) divided by their root mean square, times *weight*."""

    def turned(self, rows: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """The first *heads* heads of *rows* (batch, tokens, all heads, head_dim), turned; *rows* may be changed.

        *cos* and *sin* are (batch, tokens, head_dim).
        """


class TorchRows:
    """By torch's operations. The sines of one forward, with the signs that turning takes, are worked out once."""

    def __init__(self) -> None:
        self._of: torch.Tensor | None = None
        self._signed = torch.empty(0)

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(rows, weight.shape, weight, eps)

    def turned(self, rows: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = rows[:, :, :heads]
        swapped = turned.unflatten(3, (2, -1)).flip(3).flatten(3)
        return torch.addcmul(turned * cos.unsqueeze(2), swapped, self._with_signs(sin))

    def _with_signs(self, sin: torch.Tensor) -> torch.Tensor:
        """*sin* (batch, tokens, head_dim) as (batch, tokens, 1, head_dim), the first half negative."""
        if self._of is not sin:
            first, second = sin.chunk(2, dim=-1)
            self._of, self._signed = sin, torch.cat((-first, second), dim=-1).unsqueeze(2)
        return self._signed


class FusedLayer(nn.Module):
    """What *layer*, of transformers, computes. Reads its weights once and does not keep it."""

    def __init__(self, layer: Any, maths: RowMaths) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._maths = maths
        self._layer: int = attention.layer_idx
        self._scaling: float = attention.scaling
        self._window: int | None = getattr(attention, "sliding_window", None) or None
        self._head_dim: int = attention.head_dim
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._norm, self._norm_eps = layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon
        self._mlp_norm = layer.post_attention_layernorm.weight
        self._mlp_norm_eps = layer.post_attention_layernorm.variance_epsilon
        self._qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = PackedLinear(attention.o_proj)
        self._gate, self._up = PackedLinear(mlp.gate_proj), PackedLinear(mlp.up_proj)
        self._down = PackedLinear(mlp.down_proj)

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        rows = self._maths.rms_norm(hidden_states, self._norm, self._norm_eps)
        hidden = self._out.plus(self._attended(rows, position_embeddings), hidden_states)
        rows = self._maths.rms_norm(hidden, self._mlp_norm, self._mlp_norm_eps)
        return self._down.plus(self._up.times(rows, self._gate.silu(rows)), hidden)

    def _attended(self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(batch, tokens, heads * head_dim)"""
        batch, tokens, _ = rows.shape
        cos, sin = position_embeddings
        turned_heads = self._heads + self._kv_heads
        qkv = self._qkv(rows).view(batch, tokens, -1, self._head_dim)
        qk = self._maths.turned(qkv, turned_heads, cos, sin)
        call = LayerCall(
            layer=self._layer,
            q=qk[:, :, : self._heads].transpose(1, 2),
            k=qk[:, :, self._heads : turned_heads].transpose(1, 2),
            v=qkv[:, :, turned_heads:].transpose(1, 2),
            scaling=self._scaling,
            window=self._window,
            other={},
        )
        return attend(call).reshape(batch, tokens, -1)


def can_fuse(layer: nn.Module) -> bool:
    """Whether *layer* is one that FusedLayer computes, judged by its class and its parts."""
    if type(layer).__name__ not in _KNOWN:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    together = (attention.q_proj, attention.k_proj, attention.v_proj)
    linears = (*together, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len({linear.bias is None for linear in together}) == 1
        and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )
