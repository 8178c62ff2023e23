"""The C functions of this package as ctypes knows them: their structures, and what they take."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from mooncake_mesh.engine.native.weight_memory import WeightMemory

SOURCES: Final = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))

POINTER, SIZE, FLOAT, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int


class Tokens(ctypes.Structure):
    """See team.h, as for Chunk and Product."""

    _fields_ = (
        *((name, POINTER) for name in ("q", "k", "v")),
        *((name, SIZE) for name in ("q_stride", "k_stride", "v_stride")),
        *((name, POINTER) for name in ("out", "contexts", "capacities", "positions")),
        *((name, SIZE) for name in ("batch", "kv_heads", "groups", "head_dim")),
    )


class Chunk(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("q", "k", "v")),
        *((name, SIZE) for name in ("q_stride", "k_stride", "v_stride")),
        ("out", POINTER),
        *((name, SIZE) for name in ("tokens", "start", "kv_heads", "groups", "head_dim", "window")),
        ("scaling", FLOAT),
    )


class Product(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("rows", "weights", "bias", "summands", "out")),
        *((name, SIZE) for name in ("m", "columns", "inner")),
        ("gated", INT),
    )


class Shape(ctypes.Structure):
    """See layers.c, as for Layer and Rows."""

    _fields_ = tuple((name, SIZE) for name in ("size", "heads", "kv_heads", "head_dim", "inner"))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("norm", "qkv", "qkv_bias", "attended", "attended_bias")),
        *((name, POINTER) for name in ("mlp_norm", "gate_up", "gate_up_bias", "down", "down_bias")),
        ("window", SIZE),
        *((name, FLOAT) for name in ("norm_eps", "mlp_norm_eps", "scaling")),
    )


class Rows(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("hidden", "cos", "sin", "normed", "qkv", "attended", "gated")),
        ("m", SIZE),
    )


class Library:
    """Functions of the shared library at *path*; none returns anything.

    ``multiplies``: whether those of AVX512-BF16 are among them; ``memory`` is for the weights that they read. Raises
    OSError, or AttributeError, for a torch that brought another OpenMP.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self.memory = WeightMemory()
        self.multiplies = bool(self._library.multiplies_bfloat16())
        self.rms_norm = self._function("rms_norm", [*[POINTER] * 3, SIZE, SIZE, FLOAT, INT])
        self.rotate = self._function("rotate", [*[POINTER] * 3, *[SIZE] * 4, INT])
        self.token_attention = self._function("token_attention", [POINTER, SIZE, SIZE, FLOAT, INT])
        self.copy_pages = self._function("copy_pages", [POINTER, *[SIZE] * 3, *[POINTER] * 3, *[SIZE] * 5, SIZE, INT])
        if self.multiplies:
            self.chunk_attention = self._function("chunk_attention", [POINTER, POINTER, INT])
            self.pack_weights = self._function("pack_weights", [POINTER, POINTER, SIZE, SIZE])
            self.product = self._function("product", [POINTER, INT])
            self.before_attention = self._function("before_attention", [*[POINTER] * 3, INT])
            self.after_attention = self._function("after_attention", [*[POINTER] * 3, INT])
            some = [POINTER, POINTER, SIZE, SIZE, POINTER]  # of what layers, for what rows
            self.decode_layers = self._function("decode_layers", [*some, *[POINTER] * 3, INT])
            self.chunk_layers = self._function("chunk_layers", [*some, POINTER, SIZE, SIZE, POINTER, INT])

    def _function(self, name: str, arguments: Sequence[Any]) -> Any:
        function = getattr(self._library, name)
        function.argtypes, function.restype = list(arguments), None
        return function


def address(tensor: torch.Tensor | None) -> int | None:
    """Of its first element; NULL for none."""
    return None if tensor is None else tensor.data_ptr()
