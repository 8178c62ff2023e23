"""The forward of a model of the Llama family whose layers are one module, with nothing between its parts.

transformers' own makes masks that nobody looks at, wraps what goes from part to part, normalizes rows that nobody asked
for, and works out the sines of positions in every forward: a tenth of a decode step of one sequence.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from mooncake_mesh.engine.native.layers import NativeLayers

_KNOWN: Final = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_LEAST_POSITIONS: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Of a forward, by the names that transformers has for them."""

    last_hidden_state: torch.Tensor
    logits: torch.Tensor


class _Sines:
    """What *rotary*, an embedding that sees one position at a time, gives for each; kept for all up to the last one."""

    def __init__(self, rotary: Any, dtype: torch.dtype) -> None:
        self._rotary = rotary
        self._like = torch.empty(1, dtype=dtype)
        self._cos = self._sin = torch.empty(0)

    def of(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of *positions* (batch, tokens): each (batch, tokens, head_dim)."""
        n = int(positions.max()) + 1
        if n > len(self._cos):
            every = torch.arange(max(n, 2 * len(self._cos), _LEAST_POSITIONS))[None]
            cos, sin = self._rotary(self._like, position_ids=every)
            self._cos, self._sin = cos[0], sin[0]
        return self._cos[positions], self._sin[positions]


class DirectBase:
    """A model without its head."""

    def __init__(self, base: Any, dtype: torch.dtype) -> None:
        self._embedding, self._layers, self.norm = base.embed_tokens, base.layers[0], base.norm
        self._sines = _Sines(base.rotary_emb, dtype)

    def __call__(self, *, position_ids: torch.Tensor, use_cache: bool = False, **inputs: torch.Tensor) -> Outputs:
        """*inputs*: ``input_ids`` (batch, tokens) or ``inputs_embeds`` (batch, tokens, hidden_size)."""
        return Outputs(last_hidden_state=self.norm(self.before_norm(position_ids, inputs)), logits=torch.empty(0))

    def before_norm(self, positions: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = inputs.get("inputs_embeds")
        if rows is None:
            rows = self._embedding(inputs["input_ids"])
        hidden: torch.Tensor = self._layers(rows, position_embeddings=self._sines.of(positions))
        return hidden


class DirectModel:
    """A model, or the last stage of one, as :func:`can_be_direct` says. Its logits are those of the last tokens."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self.base_model = DirectBase(model.base_model, dtype)
        self._head = model.get_output_embeddings()

    def __call__(
        self, *, position_ids: torch.Tensor, logits_to_keep: int = 0, use_cache: bool = False, **inputs: torch.Tensor
    ) -> Outputs:
        """As :class:`DirectBase`; logits (batch, *logits_to_keep* or all tokens, vocabulary)."""
        hidden = self.base_model.norm(self.base_model.before_norm(position_ids, inputs)[:, -logits_to_keep:])
        return Outputs(last_hidden_state=hidden, logits=self._head(hidden))


def can_be_direct(model: Any) -> bool:
    """Whether the forward of *model* is known to be nothing but its parts, judged by its class and its layers."""
    layers: Any = getattr(model.base_model, "layers", ())
    return type(model).__name__ in _KNOWN and len(layers) == 1 and isinstance(layers[0], NativeLayers)
