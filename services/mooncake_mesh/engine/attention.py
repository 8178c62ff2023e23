"""Our attention inside transformers' models.

transformers looks its attention function up by name in a registry and calls it with one layer's q, k and v. Ours hands
them to the *pass* of the forward that is running (a context variable: a model has no argument that reaches every
attention layer). The pass adds K and V to its sequences' contexts and attends over them. The mask function of that name
builds nothing, for the mask follows from the positions that a pass knows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mooncake_mesh.engine.api import Cores
from mooncake_mesh.engine.attention_kernels import LayerCall, causal_attention, chunk_attention, token_attention
from mooncake_mesh.engine.contexts import Context, KeptContext, kept_contexts
from mooncake_mesh.engine.kv_storage import ArenaPages, Span
from mooncake_mesh.engine.native.kernels import Kernels
from mooncake_mesh.engine.native.places import ChunkPlace, Places, TokenPlaces
from mooncake_mesh.errors import InvariantViolated

IMPLEMENTATION: Final = "mooncake_paged"


class AttentionPass(Protocol):
    """One forward's attention."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """(batch, tokens, heads, head_dim)"""

    def places(self, layer: int, end: int) -> Places | None:
        """Where *layer* and the next ones before *end* put their K and V themselves, and attend, if they can; None
        where they call :meth:`attend` each."""


_current: ContextVar[AttentionPass] = ContextVar("mooncake_attention_pass")


@contextmanager
def attention_pass(attention: AttentionPass) -> Iterator[None]:
    """Forwards of models with our implementation, on this thread, attend through *attention*."""
    token = _current.set(attention)
    try:
        yield
    finally:
        _current.reset(token)


def running_pass() -> AttentionPass:
    """That of the forward which is running."""
    return _current.get()


def attend(call: LayerCall) -> torch.Tensor:
    """(batch, tokens, heads, head_dim), by the pass of the forward that is running."""
    return running_pass().attend(call)


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


class SharingPass:
    """*inner*, with as many threads as *cores* give it at its start and at each layer, or every few."""

    def __init__(self, inner: AttentionPass, cores: Cores) -> None:
        self._inner = inner
        self._cores = cores
        self._share()

    def attend(self, call: LayerCall) -> torch.Tensor:
        self._share()
        return self._inner.attend(call)

    def places(self, layer: int, end: int) -> Places | None:
        self._share()
        return self._inner.places(layer, end)

    def _share(self) -> None:
        torch.set_num_threads(self._cores.begin())


class PrefillPass:
    """One chunk of one sequence. *store(first_layer, kv)* gets K and V (layers, 2, kv_heads, tokens, head_dim) of each
    layer before it attends, or of several after."""

    def __init__(
        self,
        span: Span,
        context: Context,
        store: Callable[[int, torch.Tensor], None],
        kernels: Kernels | None = None,
    ) -> None:
        self._span = span
        self._context = context
        self._store = store
        self._kernels = kernels
        self._masks: dict[tuple[int | None, int], torch.Tensor | None] = {}

    def attend(self, call: LayerCall) -> torch.Tensor:
        span = self._span
        kv = torch.cat((call.k, call.v))
        self._store(call.layer, kv[None])
        k, v = self._context.extend(call.layer, kv)
        if self._kernels is not None and self._kernels.multiplies:
            return self._kernels.chunk_attention(call, k, v)
        if call.q.is_cpu and call.q.shape[2] > 1 and (call.window is None or call.window >= span.end):
            return causal_attention(call, k, v)
        first = 0 if call.window is None else max(0, span.start + 1 - call.window)
        return chunk_attention(call, k[:, :, first:], v[:, :, first:], self._mask(call, first))

    def places(self, layer: int, end: int) -> ChunkPlace | None:
        if self._kernels is None or not self._kernels.multiplies:
            return None
        context, start = self._context.writable(layer, end), self._span.start
        if context is None:
            return None
        written = context[:, :, :, start : self._span.end]
        return ChunkPlace(context=context, start=start, wrote=partial(self._store, layer, written))

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
        self._arena = arena
        self._contexts = contexts
        self._blocks, self._offsets = token_places(arena, spans)
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

    def places(self, layer: int, end: int) -> None:
        """They need not all be contexts."""

    def store(self) -> None:
        """Write the K and V of all layers to the arena."""
        self._arena.write_tokens(self._blocks, self._offsets, torch.stack(self._written, dim=1).squeeze(4))


class KernelDecodePass:
    """As :class:`DecodePass` for the first layers of a model, by a kernel that writes into the contexts itself."""

    def __init__(
        self, arena: ArenaPages, spans: Sequence[Span], contexts: Sequence[KeptContext], kernels: Kernels
    ) -> None:
        self._arena = arena
        self._places = TokenPlaces([context.kv for context in contexts], [span.start for span in spans])
        self._kernels = kernels
        self._blocks, self._offsets = token_places(arena, spans)

    def attend(self, call: LayerCall) -> torch.Tensor:
        return self._kernels.token_attention(call, self._places)

    def places(self, layer: int, end: int) -> TokenPlaces:
        return self._places

    def store(self) -> None:
        """Write the K and V of all layers to the arena."""
        self._arena.write_tokens(self._blocks, self._offsets, self._places.newest())


def decode_pass(
    arena: ArenaPages, spans: Sequence[Span], contexts: Sequence[Context], kernels: Kernels | None
) -> DecodePass | KernelDecodePass:
    """The faster pass that serves all of *contexts*."""
    kept = kept_contexts(contexts)
    if kernels is None or kept is None:
        return DecodePass(arena, spans, contexts)
    return KernelDecodePass(arena, spans, kept, kernels)


def token_places(arena: ArenaPages, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """The block of each span's one token, and its place in there."""
    block_tokens = arena.layout.block_tokens
    return (
        torch.tensor([span.blocks[span.start // block_tokens] for span in spans]),
        torch.tensor([span.start % block_tokens for span in spans]),
    )


def _chunk_mask(span: Span, window: int | None, first: int, like: torch.Tensor) -> torch.Tensor | None:
    if span.end - span.start == 1 or (span.start == 0 and window is None):
        return None
    queries = torch.arange(span.start, span.end, device=like.device)[:, None]
    positions = torch.arange(first, span.end, device=like.device)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
