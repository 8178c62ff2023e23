"""Decoder layers of the Llama family by layers.c: a decode step takes a call for some layers, a chunk two for each."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from mooncake_mesh.engine.attention import attend, running_pass
from mooncake_mesh.engine.attention_kernels import LayerCall
from mooncake_mesh.engine.native.kernels import chunk_room
from mooncake_mesh.engine.native.library import Layer, Library, Rows, Shape, address
from mooncake_mesh.engine.native.places import ChunkPlace, TokenPlaces
from mooncake_mesh.engine.native.products import PackedWeights

_AT_ONCE: Final = 6
_TOKENS_AT_ONCE: Final = 512
"""Most layers of one call, and most tokens times layers. It is between calls that the number of threads can change, a
forward be stopped, and what was computed go on its way."""

_LANES: Final = 16

Sines = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Of one layer; norms are (size)."""

    norm: torch.Tensor
    qkv: PackedWeights
    attended: PackedWeights
    mlp_norm: torch.Tensor
    gate_up: PackedWeights
    down: PackedWeights


class NativeLayer(nn.Module):
    """What *layer*, of transformers, computes: one that can be fused (see fused_layer.py) and fits.

    Reads its weights once and does not keep it.
    """

    def __init__(self, library: Library, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.library = library
        self.index: int = attention.layer_idx
        self._window: int | None = getattr(attention, "sliding_window", None) or None
        self._weights = _Weights(
            norm=layer.input_layernorm.weight.detach(),
            qkv=PackedWeights.of(library, [attention.q_proj, attention.k_proj, attention.v_proj]),
            attended=PackedWeights.of(library, [attention.o_proj]),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=PackedWeights.gated(library, mlp.gate_proj, mlp.up_proj),
            down=PackedWeights.of(library, [mlp.down_proj]),
        )
        self.shape = Shape(
            size=self._weights.qkv.inner,
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            inner=self._weights.down.inner,
        )
        self.struct = self._struct(attention.scaling, layer)

    def _struct(self, scaling: float, layer: Any) -> Layer:
        weights = self._weights
        return Layer(
            norm=weights.norm.data_ptr(),
            qkv=weights.qkv.packed.data_ptr(),
            qkv_bias=address(weights.qkv.bias),
            attended=weights.attended.packed.data_ptr(),
            attended_bias=address(weights.attended.bias),
            mlp_norm=weights.mlp_norm.data_ptr(),
            gate_up=weights.gate_up.packed.data_ptr(),
            gate_up_bias=address(weights.gate_up.bias),
            down=weights.down.packed.data_ptr(),
            down_bias=address(weights.down.bias),
            window=self._window or 0,
            norm_eps=layer.input_layernorm.variance_epsilon,
            mlp_norm_eps=layer.post_attention_layernorm.variance_epsilon,
            scaling=scaling,
        )

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Sines, **_: Any) -> torch.Tensor:
        way = _Way(hidden_states, position_embeddings, self.shape)
        self.pass_on(way)
        return way.hidden

    def pass_on(self, way: "_Way") -> None:
        """Change the rows of *way* by this layer."""
        threads, rows = torch.get_num_threads(), ctypes.byref(way.struct)
        self.library.before_attention(ctypes.byref(self.shape), ctypes.byref(self.struct), rows, threads)
        way.take_attended(attend(self._call(way)).contiguous())
        threads = torch.get_num_threads()
        self.library.after_attention(ctypes.byref(self.shape), ctypes.byref(self.struct), rows, threads)

    def _call(self, way: "_Way") -> LayerCall:
        heads, turned = self.shape.heads, self.shape.heads + self.shape.kv_heads
        return LayerCall(
            layer=self.index,
            q=way.qkv[:, :, :heads].transpose(1, 2),
            k=way.qkv[:, :, heads:turned].transpose(1, 2),
            v=way.qkv[:, :, turned:].transpose(1, 2),
            scaling=self.struct.scaling,
            window=self._window,
            other={},
        )


class NativeLayers(nn.Module):
    """*layers*, one behind the other and all there are, as one."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        super().__init__()
        self._layers = tuple(layers)
        self._library, self._shape = layers[0].library, layers[0].shape
        self._structs = (Layer * len(layers))(*(layer.struct for layer in layers))

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings: Sines, **_: Any) -> torch.Tensor:
        way, running = _Way(hidden_states, position_embeddings, self._shape), running_pass()
        at_once = max(1, min(_AT_ONCE, _TOKENS_AT_ONCE // way.struct.m))
        first, zeroth = 0, self._layers[0].index
        while first < len(self._layers):
            end = min(first + at_once, len(self._layers))
            match running.places(zeroth + first, zeroth + end):
                case TokenPlaces() as places:
                    self._decode(way, places, first, end)
                case ChunkPlace() as place:
                    end = first + len(place.context)
                    self._compute(way, place, first, end)
                    place.wrote()
                case None:
                    for layer in self._layers[first:end]:
                        layer.pass_on(way)
            first = end
        return way.hidden

    def _decode(self, way: "_Way", places: TokenPlaces, first: int, end: int) -> None:
        self._library.decode_layers(
            ctypes.byref(self._shape),
            self._structs,
            first,
            end,
            ctypes.byref(way.struct),
            places.addresses.data_ptr(),
            places.capacities.data_ptr(),
            places.positions.data_ptr(),
            torch.get_num_threads(),
        )

    def _compute(self, way: "_Way", place: ChunkPlace, first: int, end: int) -> None:
        self._library.chunk_layers(
            ctypes.byref(self._shape),
            self._structs,
            first,
            end,
            ctypes.byref(way.struct),
            place.context.data_ptr(),
            place.context.shape[3],
            place.start,
            way.chunk_room(place.start).data_ptr(),
            torch.get_num_threads(),
        )


class _Way:
    """Rows on their way through layers of one shape: ``hidden`` (batch, tokens, size), a copy that layers change.

    ``qkv`` (batch, tokens, heads of all three, head_dim) is that of the layer at hand.
    """

    def __init__(self, hidden: torch.Tensor, sines: Sines, shape: Shape) -> None:
        batch, tokens, size = hidden.shape
        self._shape = shape
        self.hidden = hidden.clone(memory_format=torch.contiguous_format)
        self._sines = [sine.expand(batch, tokens, shape.head_dim).contiguous() for sine in sines]
        self._normed, self._gated = self._room(size), self._room(shape.inner)
        self.qkv = self._room((shape.heads + 2 * shape.kv_heads) * shape.head_dim).unflatten(2, (-1, shape.head_dim))
        self._attended = self._room(shape.heads * shape.head_dim)
        self._chunk_room: torch.Tensor | None = None
        cos, sin = self._sines
        self.struct = Rows(
            hidden=self.hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            normed=self._normed.data_ptr(),
            qkv=self.qkv.data_ptr(),
            attended=self._attended.data_ptr(),
            gated=self._gated.data_ptr(),
            m=batch * tokens,
        )

    def chunk_room(self, start: int) -> torch.Tensor:
        """For attention of the rows, a chunk behind *start* positions."""
        if self._chunk_room is None:
            shape = self._shape
            self._chunk_room = chunk_room(shape.kv_heads, start + self.struct.m, shape.head_dim)
        return self._chunk_room

    def take_attended(self, attended: torch.Tensor) -> None:
        """(batch, tokens, heads, head_dim), contiguous."""
        self._attended = attended
        self.struct.attended = attended.data_ptr()

    def _room(self, columns: int) -> torch.Tensor:
        batch, tokens, _ = self.hidden.shape
        return torch.empty((batch, tokens, columns), dtype=self.hidden.dtype)


def fits(layer: Any) -> bool:
    """Whether a layer that can be fused has numbers that layers.c takes."""
    mlp = layer.mlp
    return mlp.gate_proj.out_features % _LANES == 0 and (mlp.gate_proj.bias is None) == (mlp.up_proj.bias is None)
