"""Attention of one layer over contiguous K and V, and which way to compute it.

Query heads that share a kv head are never served by repeating K and V: for one query token they become the query
positions of that head, for many they share one view.

torch's fused CPU kernel multiplies bfloat16 in small pieces, at a tenth of the speed of whole products unless the
processor has AMX. There, plain products with a softmax between them win (docs/engine.md has the figures). Scores are
rounded to bfloat16 then, as in transformers' own eager attention.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as functional

HAS_AMX: Final[bool] = torch.cpu._is_amx_tile_supported()
_PLAIN_POSITIONS: Final = 512
_BLOCK_TOKENS: Final = range(8, 65)
_BLOCK_SCORES: Final = 1 << 21
"""Scores that are worked out at a time: query tokens times heads times positions. A larger block leaves the caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One layer's attention: q (batch, heads, tokens, head_dim), k and v (batch, kv_heads, tokens, head_dim).

    ``window``: how many positions, its own among them, a token sees; None for all. ``other`` are the arguments that the
    model passed beside these.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scaling: float | None
    window: int | None
    other: dict[str, Any]


def causal_attention(call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of the last tokens of *k* and *v* (1, kv_heads, positions, head_dim) over all that is not behind them,
    on the CPU: (1, tokens, heads, head_dim)."""
    if _plain_pays(call.q):
        return blocked_attention(call, k, v)
    if call.q.shape[2] < k.shape[2]:
        return split_attention(call, k, v)
    return chunk_attention(call, k, v, None)


def _plain_pays(q: torch.Tensor) -> bool:
    return q.is_cpu and q.dtype is torch.bfloat16 and not HAS_AMX


def token_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention of one token: *q* (1, kv_heads, group, head_dim) over *k* and *v* (1, kv_heads, positions, head_dim).

    Over few positions torch's fused kernel costs less than two calls. In the product of the scores the keys come first:
    few queries times many keys run at a quarter of that speed.
    """
    if k.shape[2] < _PLAIN_POSITIONS or not _plain_pays(q):
        return functional.scaled_dot_product_attention(q, k, v, scale=scaling)
    scaled = q.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return torch.matmul(torch.matmul(k, scaled).transpose(-1, -2).softmax(-1), v)


def chunk_attention(call: LayerCall, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Attention of one sequence's chunk over *k* and *v* (1, kv_heads, positions, head_dim).

    Without a *mask* (tokens, positions) the chunk is the first one and plainly causal, or a single token that sees all.
    """
    _, heads, tokens, head_dim = call.q.shape
    kv_heads, positions = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    attended = functional.scaled_dot_product_attention(
        call.q.view(kv_heads, groups, tokens, head_dim),
        k[0, :, None].expand(kv_heads, groups, positions, head_dim),
        v[0, :, None].expand(kv_heads, groups, positions, head_dim),
        attn_mask=mask,
        is_causal=mask is None and tokens > 1,
        scale=call.scaling,
    )
    return attended.permute(2, 0, 1, 3).reshape(1, tokens, heads, head_dim)


def split_attention(call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As :func:`chunk_attention` on the CPU, for a chunk behind others: over what was before, and causally over itself.

    A mask would be read and added for every head, and half of the chunk's own square computed for nothing. The two
    results are weighed by the sums of exponentials that each was divided by.
    """
    _, heads, tokens, head_dim = call.q.shape
    kv_heads, start = k.shape[1], k.shape[2] - tokens
    groups = heads // kv_heads
    q = call.q.reshape(1, kv_heads, groups * tokens, head_dim)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    past, past_lse = attend(q, k[:, :, :start], v[:, :, :start], 0.0, False, scale=call.scaling)
    own, own_lse = attend(
        q.view(kv_heads, groups, tokens, head_dim),
        k[0, :, None, start:].expand(kv_heads, groups, tokens, head_dim),
        v[0, :, None, start:].expand(kv_heads, groups, tokens, head_dim),
        0.0,
        True,
        scale=call.scaling,
    )
    share = torch.sigmoid(own_lse - past_lse.view(own_lse.shape)).unsqueeze(-1).to(own.dtype)
    attended = torch.lerp(past.view(own.shape), own, share)
    return attended.permute(2, 0, 1, 3).reshape(1, tokens, heads, head_dim)


def blocked_attention(call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As :func:`causal_attention`, by plain products for a block of query tokens at a time."""
    _, heads, tokens, head_dim = call.q.shape
    kv_heads, positions = k.shape[1], k.shape[2]
    groups, start = heads // kv_heads, positions - tokens
    scaling = head_dim**-0.5 if call.scaling is None else call.scaling
    q = (call.q * scaling).view(kv_heads, groups, tokens, head_dim)
    keys, values = k[0].transpose(1, 2).contiguous(), v[0]
    attended = torch.empty((1, tokens, heads, head_dim), dtype=q.dtype)
    rows = attended.view(tokens, kv_heads, groups, head_dim)
    block = max(_BLOCK_TOKENS.start, min(_BLOCK_TOKENS.stop - 1, _BLOCK_SCORES // (heads * positions)))
    hidden = torch.full((block, block), float("-inf"), dtype=q.dtype).triu(1)
    for first in range(0, tokens, block):
        n = min(block, tokens - first)
        end = start + first + n
        scores = torch.bmm(q[:, :, first : first + n].reshape(kv_heads, groups * n, head_dim), keys[:, :, :end])
        scores.view(kv_heads, groups, n, end)[..., end - n :] += hidden[:n, :n]
        mixed = torch.bmm(scores.softmax(-1), values[:, :end])
        rows[first : first + n] = mixed.view(kv_heads, groups, n, head_dim).permute(2, 0, 1, 3)
    return attended
