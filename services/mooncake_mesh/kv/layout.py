"""Shape of the KVCache of one model: how a block lies in memory.

A block holds ``block_tokens`` consecutive tokens of all layers as ``[layer][K, V][token][kv_head][head_dim]`` in C
order, so that one layer of one block (a slice) is contiguous and layer-wise streaming needs no gather.
"""

import enum
from dataclasses import dataclass
from typing import Any


class KvDtype(enum.Enum):
    """Element types a cache may have."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def item_bytes(self) -> int:
        return {KvDtype.FLOAT32: 4, KvDtype.BFLOAT16: 2}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    layers: int
    kv_heads: int
    head_dim: int
    dtype: KvDtype
    block_tokens: int

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(layers, 2, block_tokens, kv_heads, head_dim) of one block; axis 1 is K, V."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return 2 * self.block_tokens * self.kv_heads * self.head_dim * self.dtype.item_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """KVCache bytes of one token over all layers."""
        return self.block_bytes // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that *tokens* tokens need, the last one perhaps partial."""
        return -(-tokens // self.block_tokens)


def layout_from_config(config: Any, dtype: KvDtype, block_tokens: int) -> KvLayout:
    """Layout for a transformers model config (duck-typed, so that this module needs no transformers)."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KvLayout(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        dtype=dtype,
        block_tokens=block_tokens,
    )
