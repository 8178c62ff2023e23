"""Chunks of equal time, and layers split by what they cost."""

import itertools
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.policy.chunking import (
    UNMEASURED,
    ChunkCost,
    ChunkSample,
    fit_chunk_cost,
    plan_chunks,
    split_layers,
)

BLOCK = 16
costs = st.builds(
    ChunkCost,
    base_s=st.floats(0.0, 1.0),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0.0, 1e-4),
)


@given(
    first_block=st.integers(0, 600),
    tokens=st.integers(1, 9000),
    stages=st.integers(2, 8),
    largest_blocks=st.integers(1, 128),
    cost=costs,
)
def test_chunks_cover_the_prompt_in_whole_blocks(
    first_block: int, tokens: int, stages: int, largest_blocks: int, cost: ChunkCost
) -> None:
    start, end, largest = first_block * BLOCK, first_block * BLOCK + tokens, largest_blocks * BLOCK
    chunks = plan_chunks(start, end, stages=stages, largest=largest, block_tokens=BLOCK, cost=cost)
    assert chunks[0][0] == start
    assert chunks[-1][1] == end
    assert all(before[1] == after[0] for before, after in itertools.pairwise(chunks))
    assert all(0 < last - first <= largest for first, last in chunks)
    assert all(last % BLOCK == 0 for _, last in chunks[:-1])


def test_chunks_shrink_as_the_prefix_grows_and_take_equally_long() -> None:
    cost = ChunkCost(base_s=0.004, token_s=1e-4, pair_s=2e-8)
    chunks = plan_chunks(0, 8192, stages=2, largest=1024, block_tokens=BLOCK, cost=cost)
    sizes = [last - first for first, last in chunks]
    times_s = [cost.chunk_s(first, last) for first, last in chunks]
    assert sizes[0] > 1.5 * sizes[-1]
    assert max(times_s) < 1.15 * min(times_s)  # whole blocks, so not quite equal
    equal = [cost.chunk_s(at, at + 512) for at in range(0, 8192, 512)]
    assert max(equal) > 2 * min(equal)


def test_overhead_makes_chunks_fewer_and_stages_make_them_more() -> None:
    def count(base_s: float, stages: int) -> int:
        cost = ChunkCost(base_s=base_s, token_s=1e-4, pair_s=0.0)
        return len(plan_chunks(0, 8192, stages=stages, largest=2048, block_tokens=BLOCK, cost=cost))

    assert count(0.02, 2) < count(0.002, 2) < count(0.002, 4)


@given(tokens=st.floats(1.0, 1e6), pair_s=st.sampled_from([0.0, 1e-30, 1e-20, 1e-8, 1e-3]))
def test_work_and_tokens_are_inverse(tokens: float, pair_s: float) -> None:
    cost = ChunkCost(base_s=0.0, token_s=1e-4, pair_s=pair_s)
    work_s = cost.work_s(cast(int, tokens))  # the formula holds between whole tokens too
    assert cost.tokens_in(work_s) == pytest.approx(tokens, rel=1e-9)


def test_a_short_rest_is_one_chunk() -> None:
    assert plan_chunks(32, 33, stages=4, largest=512, block_tokens=BLOCK, cost=UNMEASURED) == ((32, 33),)


def test_the_cost_is_learnt_from_chunks() -> None:
    real = ChunkCost(base_s=0.05, token_s=3e-4, pair_s=4e-8)
    bounds = [(0, 512), (512, 896), (896, 1280), (1280, 1536), (0, 256), (256, 512), (512, 640)]
    samples = [ChunkSample(start=s, end=e, elapsed_s=real.chunk_s(s, e)) for s, e in bounds]
    fitted = fit_chunk_cost(samples)
    assert fitted.chunk_s(2048, 2304) == pytest.approx(real.chunk_s(2048, 2304), rel=1e-6)
    assert fit_chunk_cost(samples[:5]) == UNMEASURED
    noisy = [ChunkSample(start=s, end=e, elapsed_s=3e-4 * (e - s)) for s, e in bounds]
    assert fit_chunk_cost(noisy).base_s > 0.01  # or prompts would be cut into crumbs


def test_layers_are_split_by_their_cost() -> None:
    assert split_layers([1.0] * 30, stages=4) in {(8, 8, 7, 7), (7, 8, 8, 7), (7, 7, 8, 8), (8, 7, 7, 8), (7, 8, 7, 8)}
    assert split_layers([1.0] * 8, stages=2, last_s=2.0) == (5, 3)
    assert split_layers([4.0, 1.0, 1.0, 1.0, 1.0], stages=2) == (1, 4)
    assert split_layers([1.0, 1.0, 1.0], stages=3) == (1, 1, 1)
    with pytest.raises(ValueError, match="stages"):
        split_layers([1.0], stages=2)


@given(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=7), st.data())
def test_no_split_is_better(layer_s: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(layer_s)))

    def slowest(split: tuple[int, ...]) -> float:
        bounds = [0, *itertools.accumulate(split)]
        return max(sum(layer_s[first:last]) for first, last in itertools.pairwise(bounds))

    every = (
        split for split in itertools.product(range(1, len(layer_s) + 1), repeat=stages) if sum(split) == len(layer_s)
    )
    assert slowest(split_layers(layer_s, stages=stages)) <= min(map(slowest, every)) * (1 + 1e-9)
