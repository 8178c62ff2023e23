"""Our attention inside transformers' models.

transformers looks its attention function up by name in a registry and calls it with one layer's q, k and v. Ours hands
them to the *pass* of the forward that is running (a context variable: a model has no argument that reaches every
attention layer). The pass adds K and V to its sequences' contexts and attends over them. The mask function of that name
builds nothing, for the mask follows from the positions that a pass knows.

Query heads that share a kv head are never served by repeating K and V: for one query token they become the query
positions of that head, for many they share one expanded view.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as functional
from transformers import AttentionInterface, AttentionMaskInterface

from mooncake_mesh.engine.kv_storage import ArenaPages, Context, Span
from mooncake_mesh.errors import InvariantViolated

IMPLEMENTATION: Final = "mooncake_paged"
_PLAIN_POSITIONS: Final = 512
_HAS_AMX: Final[bool] = torch.cpu._is_amx_tile_supported()


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


class AttentionPass(Protocol):
    """One forward's attention."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """(batch, tokens, heads, head_dim)"""


_current: ContextVar[AttentionPass] = ContextVar("mooncake_attention_pass")


@contextmanager
def attention_pass(attention: AttentionPass) -> Iterator[None]:
    """Forwards of models with our implementation, on this thread, attend through *attention*."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def attend(call: LayerCall) -> torch.Tensor:
    """(batch, tokens, heads, head_dim), by the pass of the forward that is running."""
    return _current.get().attend(call)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call."""
    layer: Any = module.layer_idx
    other["attention_mask"] = attention_mask
    call = LayerCall(layer=layer, q=query, k=key, v=value, scaling=scaling, window=sliding_window or None, other=other)
    return attend(call), None


def _no_mask(*_: Any, **__: Any) -> None:
    """What transformers' models call to build a mask."""


AttentionInterface.register(IMPLEMENTATION, paged_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)


class PrefillPass:
    """One chunk of one sequence. *store* gets each layer's K and V (2, kv_heads, tokens, head_dim), then it attends."""

    def __init__(self, span: Span, context: Context, store: Callable[[int, torch.Tensor], None]) -> None:
        self._span = span
        self._context = context
        self._store = store
        self._masks: dict[tuple[int | None, int], torch.Tensor | None] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        span = self._span
        kv = torch.cat((call.k, call.v))
        self._store(call.layer, kv)
        k, v = self._context.extend(call.layer, kv)
        if call.q.is_cpu and 1 < call.q.shape[2] < k.shape[2] and (call.window is None or call.window >= span.end):
            return split_attention(call, k, v)
        first = 0 if call.window is None else max(0, span.start + 1 - call.window)
        return chunk_attention(call, k[:, :, first:], v[:, :, first:], self._mask(call, first))

    def _mask(self, call: LayerCall, first: int) -> torch.Tensor | None:
        """0 where a token sees a position, -inf elsewhere; None where plain causality is all. Equal for most layers."""
        window = call.window
        if window is not None and window >= self._span.end:
            window = None
        key = (window, first)
        if key not in self._masks:
            self._masks[key] = _chunk_mask(self._span, window, first, call.q)
        return self._masks[key]


class DecodePass:
    """One token of each of several sequences. The arena is written by :meth:`store`, once, after the last layer."""

    def __init__(self, arena: ArenaPages, spans: Sequence[Span], contexts: Sequence[Context]) -> None:
        block_tokens = arena.layout.block_tokens
        self._arena = arena
        self._contexts = contexts
        self._blocks = torch.tensor([span.blocks[span.start // block_tokens] for span in spans])
        self._offsets = torch.tensor([span.start % block_tokens for span in spans])
        self._written: list[torch.Tensor] = []

    def attend(self, call: LayerCall) -> torch.Tensor:
        if call.layer != len(self._written):
            raise InvariantViolated(f"layer {call.layer} attended after {len(self._written)} layers")
        batch, heads, _, head_dim = call.q.shape
        kv_heads = call.k.shape[1]
        kv = torch.stack((call.k, call.v), dim=1)
        self._written.append(kv)
        queries = call.q.reshape(batch, kv_heads, heads // kv_heads, head_dim).split(1)
        attended = []
        for query, new, context in zip(queries, kv.unbind(0), self._contexts, strict=True):
            k, v = context.extend(call.layer, new)
            if call.window is not None and call.window < k.shape[2]:
                k, v = k[:, :, -call.window :], v[:, :, -call.window :]
            attended.append(token_attention(query, k, v, call.scaling))
        return torch.cat(attended).view(batch, 1, heads, head_dim)

    def store(self) -> None:
        """Write the K and V of all layers to the arena."""
        self._arena.write_tokens(self._blocks, self._offsets, torch.stack(self._written, dim=1).squeeze(4))


def token_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """Attention of one token: *q* (1, kv_heads, group, head_dim) over *k* and *v* (1, kv_heads, positions, head_dim).

    Over many positions in bfloat16, torch's fused CPU kernel takes twice as long as two plain products do, as long as
    the keys come first in theirs (docs/engine.md). Where a processor has AMX that was not measured.
    """
    if k.shape[2] < _PLAIN_POSITIONS or not q.is_cpu or q.dtype is not torch.bfloat16 or _HAS_AMX:
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


def _chunk_mask(span: Span, window: int | None, first: int, like: torch.Tensor) -> torch.Tensor | None:
    if span.end - span.start == 1 or (span.start == 0 and window is None):
        return None
    queries = torch.arange(span.start, span.end, device=like.device)[:, None]
    positions = torch.arange(first, span.end, device=like.device)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
