"""Pages and contexts, without a model."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from mooncake_mesh.engine.kv_storage import ArenaPages, ContextCache, Span  # noqa: E402
from mooncake_mesh.errors import InvariantViolated  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, KvLayout  # noqa: E402

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=4)
CPU = torch.device("cpu")


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
        pages.write_layer(layer, [7, 2, 5, 0], 6, new[layer])
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
        pages.write_layer(layer, blocks, 0, new[layer])
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


def forward(pages: ArenaPages, cache: ContextCache, spans: Sequence[Span], numbers: Sequence[int]) -> None:
    """One forward over *spans* that checks what attention would see."""
    contexts = cache.open(spans)
    for layer in range(3):
        for span, number, context in zip(spans, numbers, contexts, strict=True):
            new = values(number, span.start, span.end)[layer]
            pages.write_layer(layer, span.blocks, span.start, new)
            k, v = context.extend(layer, new)
            expected = values(number, 0, span.end)[layer]
            assert torch.equal(k, expected[0:1])
            assert torch.equal(v, expected[1:2])
    cache.commit(spans)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), budget_blocks=st.sampled_from([0, 2, 5, 9, 100]))
def test_contexts_always_hold_what_the_sequence_wrote(seed: int, budget_blocks: int) -> None:
    """Sequences join, grow, break off, leave and leave their blocks to others, under any budget."""
    rng = random.Random(seed)
    pages, _ = bound(n_blocks=24)
    budget_bytes = budget_blocks * LAYOUT.block_bytes
    cache = ContextCache(pages, CPU, budget_bytes)
    free = list(range(24))
    rng.shuffle(free)
    running: dict[int, tuple[list[int], int]] = {}
    for number in range(30):
        if len(free) >= 6 and rng.random() < 0.7:
            running[number] = ([free.pop() for _ in range(6)], 0)
        chosen = [one for one in running if rng.random() < 0.6]
        spans = []
        for one in chosen:
            blocks, start = running[one]
            end = min(start + rng.randint(1, 7), 24)
            spans.append(Span(sequence=str(one), blocks=blocks[: LAYOUT.blocks_for(end)], start=start, end=end))
        spans = [span for span in spans if span.start < span.end]
        if rng.random() < 0.15:
            cache.open(spans)
            cache.abandon(spans)
        else:
            forward(pages, cache, spans, [int(span.sequence) for span in spans])
            for span in spans:
                running[int(span.sequence)] = (running[int(span.sequence)][0], span.end)
        assert cache.kept_bytes <= budget_bytes
        for one in [one for one, (_, end) in running.items() if end >= 20]:
            free.extend(running.pop(one)[0])


def test_a_kept_context_does_not_read_the_pages_again() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=0, end=5)], [1])
    arena[:] = -1.0
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=5, end=6)], [1])


def test_a_cleared_cache_reads_the_pages_again() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=0, end=5)], [1])
    cache.clear()
    assert cache.kept_bytes == 0
    arena[:] = -1.0
    with pytest.raises(AssertionError):
        forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=5, end=6)], [1])


def test_the_least_recently_used_context_goes_first() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 2 * LAYOUT.block_bytes)
    spans = [Span(sequence=str(i), blocks=[i], start=0, end=2) for i in range(3)]
    for i in (0, 1, 0, 2):
        forward(pages, cache, [spans[i]], [i])
    assert list(cache._kept) == ["0", "2"]
