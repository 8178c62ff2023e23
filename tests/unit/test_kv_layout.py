import math
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_mesh.kv.layout import KvDtype, KvLayout, layout_from_config


def layout(**changes: int) -> KvLayout:
    sizes = {"layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 16} | changes
    return KvLayout(**sizes, dtype=KvDtype.BFLOAT16)


@pytest.mark.parametrize(("dtype", "item_bytes"), [(KvDtype.FLOAT32, 4), (KvDtype.BFLOAT16, 2)])
def test_bytes_follow_from_the_shape(dtype: KvDtype, item_bytes: int) -> None:
    kv = KvLayout(layers=30, kv_heads=3, head_dim=64, dtype=dtype, block_tokens=16)
    assert kv.shape == (30, 2, 16, 3, 64)
    assert kv.block_bytes == math.prod(kv.shape) * item_bytes
    assert kv.slice_bytes * kv.layers == kv.block_bytes
    assert kv.token_bytes * kv.block_tokens == kv.block_bytes


def test_a_slice_is_one_contiguous_run() -> None:
    kv = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=5)
    block = np.zeros(kv.shape, dtype=np.float32)
    assert block.nbytes == kv.block_bytes
    for layer in range(kv.layers):
        piece = block[layer]
        assert piece.flags.c_contiguous
        assert piece.nbytes == kv.slice_bytes
        assert piece.ctypes.data - block.ctypes.data == layer * kv.slice_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (161, 11)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert layout().blocks_for(tokens) == blocks


@pytest.mark.parametrize("name", ["layers", "kv_heads", "head_dim", "block_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=name):
        layout(**{name: value})


def config(**fields: object) -> SimpleNamespace:
    base = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
    return SimpleNamespace(**(base | fields))


@pytest.mark.parametrize(
    ("fields", "kv_heads", "head_dim"),
    [
        ({}, 8, 32),
        ({"num_key_value_heads": 2}, 2, 32),
        ({"num_key_value_heads": None, "head_dim": None}, 8, 32),
        ({"num_key_value_heads": 1, "head_dim": 128}, 1, 128),
    ],
    ids=["multi-head", "grouped", "fields present but None", "head_dim of its own"],
)
def test_layout_of_a_model_config(fields: dict[str, object], kv_heads: int, head_dim: int) -> None:
    made = layout_from_config(config(**fields), KvDtype.FLOAT32, 32)
    assert made == KvLayout(layers=4, kv_heads=kv_heads, head_dim=head_dim, dtype=KvDtype.FLOAT32, block_tokens=32)
