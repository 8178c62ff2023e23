"""The kernels of kernels.c on torch's tensors.

All take bfloat16 on the CPU and use as many threads as torch does just then. :func:`kernels_for` says for which models.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import structlog
import torch
import torch.nn.functional as functional

from mooncake_mesh.engine.attention_kernels import HAS_AMX, LayerCall
from mooncake_mesh.engine.model_files import cache_folder
from mooncake_mesh.engine.native.compiling import NativeUnavailable, compiled
from mooncake_mesh.kv.layout import KvLayout

SOURCE: Final = Path(__file__).with_name("kernels.c")
_HEAD_DIMS: Final = (64, 128, 192, 256)
_LANES: Final = 16
_MAX_GROUPS: Final = 16
_TILE: Final = 64
_TOLERANCE: Final = 0.02
"""Rounding to bfloat16 makes a relative difference of 0.002 or so."""

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int

log = structlog.get_logger(__name__)


class Places:
    """Where the next position of each of several sequences goes: contexts (layers, 2, kv_heads, capacity, head_dim)."""

    def __init__(self, contexts: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
        self._contexts = contexts
        self._positions = positions
        self.addresses = torch.tensor([context.data_ptr() for context in contexts])
        self.capacities = torch.tensor([context.shape[3] for context in contexts])
        self.positions = torch.tensor(positions)

    def newest(self) -> torch.Tensor:
        """What was written to the places: (sequences, layers, 2, kv_heads, head_dim)."""
        pairs = zip(self._contexts, self._positions, strict=True)
        return torch.stack([context[:, :, :, position] for context, position in pairs])


class Kernels:
    """Functions of a loaded library. ``attend_chunks``: whether :meth:`chunk_attention` is there."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = [_SIZE] * 5
        self._rms_norm = _function(library, "rms_norm", [*[_POINTER] * 3, _SIZE, _SIZE, _FLOAT, _INT])
        self._rotate = _function(library, "rotate", [*[_POINTER] * 3, *sizes[:4], _INT])
        self._decode = _function(
            library,
            "decode_attention",
            [*[_POINTER] * 3, *sizes[:3], _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, *sizes, _FLOAT, _INT],
        )
        self._copy_pages = _function(
            library, "copy_pages", [_POINTER, *sizes[:3], *[_POINTER] * 3, *sizes, _SIZE, _INT]
        )
        # With AMX torch's own attention multiplies faster than AVX512-BF16 can.
        self.attend_chunks = bool(library.has_chunk_attention()) and not HAS_AMX
        if self.attend_chunks:
            self._chunk = _function(
                library,
                "chunk_attention",
                [_POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, *sizes, _SIZE, _FLOAT, _INT],
            )

    def rms_norm(self, rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Contiguous *rows* (.., size) divided by their root mean square, times *weight*."""
        size = rows.shape[-1]
        out = torch.empty_like(rows)
        self._rms_norm(
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
        self._rotate(
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

    def token_attention(self, call: LayerCall, places: Places) -> torch.Tensor:
        """Write K and V of one new token of each sequence to its place in the call's layer, and attend over all up to
        there: (batch, 1, heads, head_dim)."""
        batch, heads, _, head_dim = call.q.shape
        kv_heads = call.k.shape[1]
        q, k, v = (_by_head(tensor) for tensor in (call.q, call.k, call.v))
        out = torch.empty((batch, 1, heads, head_dim), dtype=torch.bfloat16)
        self._decode(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            out.data_ptr(),
            places.addresses.data_ptr(),
            call.layer,
            places.capacities.data_ptr(),
            places.positions.data_ptr(),
            batch,
            kv_heads,
            heads // kv_heads,
            head_dim,
            call.window or 0,
            _scaling(call),
            torch.get_num_threads(),
        )
        return out

    def chunk_attention(self, call: LayerCall, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the last tokens of *k* and *v* (1, kv_heads, positions, head_dim), heads evenly apart, each over
        what is not behind it: (1, tokens, heads, head_dim)."""
        _, heads, tokens, head_dim = call.q.shape
        _, kv_heads, positions, _ = k.shape
        q, k, v = _by_token(call.q), _by_position(k), _by_position(v)
        out = torch.empty((1, tokens, heads, head_dim), dtype=torch.bfloat16)
        room = torch.empty(2 * kv_heads * -(-positions // _TILE) * _TILE * head_dim, dtype=torch.bfloat16)
        self._chunk(
            q.data_ptr(),
            q.stride(2),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(1),
            v.stride(1),
            out.data_ptr(),
            room.data_ptr(),
            tokens,
            positions - tokens,
            kv_heads,
            heads // kv_heads,
            head_dim,
            call.window or 0,
            _scaling(call),
            torch.get_num_threads(),
        )
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
        self._copy_pages(
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


def kernels_for(model: Any, layout: KvLayout) -> Kernels | None:
    """Kernels that compute what *model* has torch compute; None where its numbers or shapes are not theirs."""
    shapes_fit = (
        layout.head_dim in _HEAD_DIMS
        and model.config.num_attention_heads <= layout.kv_heads * _MAX_GROUPS
        and model.config.hidden_size % _LANES == 0
    )
    if model.device.type != "cpu" or model.dtype is not torch.bfloat16 or not shapes_fit:
        return None
    return _loaded()


@cache
def _loaded() -> Kernels | None:
    try:
        return load(cache_folder() / "native")
    except NativeUnavailable as error:
        log.warning("kernels_unavailable", reason=str(error), instead="torch's operations, which take longer")
        return None


def load(folder: Path) -> Kernels:
    """Kernels whose library lies in *folder* or is made there. Raises NativeUnavailable, also for wrong results."""
    library = compiled(SOURCE, folder)
    try:
        kernels = Kernels(ctypes.CDLL(str(library)))
    except (OSError, AttributeError) as error:  # a torch that brought another OpenMP
        raise NativeUnavailable(f"{library} cannot be used: {error}") from error
    with torch.inference_mode():
        _check(kernels)
    return kernels


def _check(kernels: Kernels) -> None:
    """Raises NativeUnavailable unless small examples have torch's results: a compiler may be wrong."""
    made = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=made).bfloat16()

    rows, weight = some(3, 64), some(64)
    _same("rms_norm", kernels.rms_norm(rows, weight, 1e-5), functional.rms_norm(rows, (64,), weight, 1e-5))
    heads, cos, sin = some(1, 2, 3, 64), some(1, 2, 64), some(1, 2, 64)
    swapped = torch.cat((-heads[..., 32:], heads[..., :32]), dim=-1)
    turned = heads * cos.unsqueeze(2) + swapped * sin.unsqueeze(2)
    _same("rotate", kernels.turned(heads, 3, cos, sin), turned)
    q, context = some(1, 4, 70, 64), some(1, 2, 2, 80, 64)
    k, v = context[0, :, :, :70]
    call = LayerCall(layer=0, q=q[:, :, 69:], k=k[None, :, 69:], v=v[None, :, 69:], scaling=None, window=None, other={})
    own = kernels.token_attention(call, Places([context], [69]))
    theirs = functional.scaled_dot_product_attention(q, k[None], v[None], is_causal=True, enable_gqa=True)
    theirs = theirs.transpose(1, 2)
    _same("decode_attention", own, theirs[:, 69:])
    pages, copied = some(3, 1, 2, 16, 2, 64), torch.empty(1, 2, 2, 40, 64, dtype=torch.bfloat16)
    kernels.read_pages(pages, 0, [2, 0, 1], 3, copied)
    row = torch.cat((pages[2], pages[0], pages[1]), dim=2).transpose(2, 3)
    _same("copy_pages", copied, row[:, :, :, 3:43])
    if kernels.attend_chunks:
        call = LayerCall(layer=0, q=q, k=k[None], v=v[None], scaling=None, window=None, other={})
        _same("chunk_attention", kernels.chunk_attention(call, k[None], v[None]), theirs)


def _same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not difference <= _TOLERANCE:
        raise NativeUnavailable(f"{name} differs from torch's result by {difference:.2g}")


def _function(library: ctypes.CDLL, name: str, arguments: list[Any]) -> Any:
    function = getattr(library, name)
    function.argtypes, function.restype = arguments, None
    return function


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
