"""Pages, without a model."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mooncake_mesh.engine.kv_storage import ArenaPages  # noqa: E402
from mooncake_mesh.errors import InvariantViolated  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, KvLayout  # noqa: E402

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=4)


def bound(n_blocks: int = 12) -> tuple[ArenaPages, np.ndarray]:
    arena = np.zeros(n_blocks * LAYOUT.block_bytes, np.uint8)
    pages = ArenaPages(LAYOUT)
    pages.bind(arena.data)
    return pages, arena.view(np.float32).reshape(n_blocks, *LAYOUT.shape)


def values(sequence: int, start: int, end: int) -> Any:
    """Distinct numbers (layers, 2, kv_heads, tokens, head_dim) for positions of a sequence."""
    positions = torch.arange(start, end)
    cells = torch.arange(3 * 2 * 2 * 4, dtype=torch.float32).view(3, 2, 2, 1, 4)
    return cells + 100 * positions[:, None] + 100_000 * sequence


def test_pages_have_the_layouts_shape() -> None:
    pages, arena = bound()
    new = values(1, 6, 13)
    for layer in range(3):
        pages.write_layers(layer, [7, 2, 5, 0], 6, new[layer : layer + 1])
    for position in range(6, 13):
        block = [7, 2, 5, 0][position // 4]
        for side in (0, 1):
            np.testing.assert_array_equal(arena[block, :, side, position % 4], new[:, side, :, position - 6].numpy())
    assert not arena[[1, 3, 4, 6, 8]].any()
    assert not arena[7].any()
    assert not arena[2, :, :, :2].any()
    assert not arena[0, :, :, 1:].any()


@pytest.mark.parametrize("blocks", [[9, 3, 11, 0], [4, 5, 6, 7], [2, 3, 8, 9]])
def test_what_is_written_is_read(blocks: list[int]) -> None:
    pages, _ = bound()
    new = values(1, 0, 14)
    for layer in range(3):
        pages.write_layers(layer, blocks, 0, new[layer : layer + 1])
    for start, end in ((0, 14), (3, 5), (4, 8), (13, 14)):
        out = torch.empty(3, 2, 2, end - start, 4)
        pages.read_all(blocks, start, end, out)
        assert torch.equal(out, new[:, :, :, start:end])
        for layer in range(3):
            pages.read_positions(layer, blocks, start, end, out[layer].zero_())
        assert torch.equal(out, new[:, :, :, start:end])
    for end in (1, 4, 14):
        out = torch.empty(2, 2, end, 4)
        pages.read_layer(1, torch.tensor(blocks[: LAYOUT.blocks_for(end)]), end, out)
        assert torch.equal(out, new[1, :, :, :end])


def test_tokens_of_several_sequences_are_written_at_once() -> None:
    pages, arena = bound()
    new = torch.stack([values(i, i, i + 1).squeeze(3) for i in range(3)])
    pages.write_tokens(torch.tensor([4, 0, 7]), torch.tensor([3, 0, 1]), new)
    for i, (block, offset) in enumerate(((4, 3), (0, 0), (7, 1))):
        np.testing.assert_array_equal(arena[block, :, :, offset], new[i].numpy())
    assert np.count_nonzero(arena.any(axis=(1, 2, 4, 5))) == 3


def test_unbound_pages_are_an_error() -> None:
    with pytest.raises(InvariantViolated, match="not bound"):
        _ = ArenaPages(LAYOUT).pages
