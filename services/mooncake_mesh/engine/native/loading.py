"""Has the C functions of this package compiled, loaded and checked. :func:`kernels_for` says for which models."""

from functools import cache
from pathlib import Path
from typing import Any, Final

import structlog
import torch
import torch.nn.functional as functional

from mooncake_mesh.engine.attention_kernels import LayerCall
from mooncake_mesh.engine.model_files import cache_folder
from mooncake_mesh.engine.native.compiling import NativeUnavailable, compiled
from mooncake_mesh.engine.native.kernels import Kernels
from mooncake_mesh.engine.native.library import SOURCES, Library
from mooncake_mesh.engine.native.places import TokenPlaces
from mooncake_mesh.engine.native.products import PackedWeights, multiplied
from mooncake_mesh.kv.layout import KvDtype, KvLayout

_HEAD_DIMS: Final = (64, 128, 192, 256)
_LANES: Final = 16
_MAX_GROUPS: Final = 16
_TOLERANCE: Final = 0.02
"""Rounding to bfloat16 makes a relative difference of 0.002 or so."""

log = structlog.get_logger(__name__)


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


def host_kernels(layout: KvLayout) -> Kernels | None:
    """Kernels for copies of pages of *layout* in host memory, wherever the model is; None where there are none."""
    return _loaded() if layout.dtype is KvDtype.BFLOAT16 and layout.head_dim in _HEAD_DIMS else None


@cache
def _loaded() -> Kernels | None:
    try:
        return load(cache_folder() / "native")
    except NativeUnavailable as error:
        log.warning("kernels_unavailable", reason=str(error), instead="torch's operations, which take longer")
        return None


def load(folder: Path) -> Kernels:
    """Kernels whose library lies in *folder* or is made there. Raises NativeUnavailable, also for wrong results."""
    library = compiled(SOURCES, folder)
    try:
        kernels = Kernels(Library(library))
    except (OSError, AttributeError) as error:
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
    own = kernels.token_attention(call, TokenPlaces([context], [69]))
    theirs = functional.scaled_dot_product_attention(q, k[None], v[None], is_causal=True, enable_gqa=True)
    theirs = theirs.transpose(1, 2)
    _same("token_attention", own, theirs[:, 69:])
    pages, copied = some(3, 1, 2, 16, 2, 64), torch.empty(1, 2, 2, 40, 64, dtype=torch.bfloat16)
    kernels.read_pages(pages, 0, [2, 0, 1], 3, copied)
    row = torch.cat((pages[2], pages[0], pages[1]), dim=2).transpose(2, 3)
    _same("copy_pages", copied, row[:, :, :, 3:43])
    if kernels.multiplies:
        for n in (8, 16, 70):  # one, two and three vectors of queries, as for the rows of a product below
            first = q[:, :, :n], k[None, :, :n], v[None, :, :n]
            call = LayerCall(layer=0, q=first[0], k=first[1], v=first[2], scaling=None, window=None, other={})
            _same("chunk_attention", kernels.chunk_attention(call, *first[1:]), theirs[:, :n])
        many, matrix = some(30, 64), some(40, 64)
        packed = PackedWeights(kernels.library, matrix, None)
        for n in range(1, len(many) + 1):  # the compiler made a loop of its own for each number of rows
            _same("product", multiplied(kernels.library, many[:n], packed), functional.linear(many[:n], matrix))


def _same(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not difference <= _TOLERANCE:
        raise NativeUnavailable(f"{name} differs from torch's result by {difference:.2g}")
