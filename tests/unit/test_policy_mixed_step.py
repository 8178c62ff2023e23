"""Steps with a chunk of a prompt: what they take, how long the chunk may be, and who is next in line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.nodes import NODES
from mooncake_mesh.decode.prompt_line import STRETCH_CHUNKS, PromptLine
from mooncake_mesh.policy.cost_fit import PolynomialCost
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.mixed_step import CHUNK_GRAIN_TOKENS, LONGEST_CHUNK_TOKENS, longest_chunk, mixed_step, step_s
from tests.unit.test_decode_inline_prompts import sequence

POLYNOMIAL = PolynomialCost(
    prefill_base_s=0.004,
    prefill_token_s=1e-4,
    prefill_pair_s=1e-9,
    cached_token_s=2e-6,
    step_base_s=0.02,
    step_sequence_s=1e-4,
    step_context_token_s=3e-8,
    transfer_base_s=0.001,
    transfer_byte_s=1e-9,
)
sequences = st.integers(1, 200)
contexts = st.integers(0, 1_000_000)
starts = st.integers(0, 130_000)


@pytest.mark.parametrize("cost", [POLYNOMIAL, NODES["8xa800"]], ids=["fitted", "8xa800"])
@given(n=sequences, context=contexts, chunk=st.integers(200, 2048), start=starts, factor=st.floats(0.2, 5.0))
def test_the_terms_say_what_the_cost_model_says(
    cost: CostModel, n: int, context: int, chunk: int, start: int, factor: float
) -> None:
    expected_s = factor * cost.mixed_step_s(n, context, chunk, start)
    assert step_s(mixed_step(cost, factor, 0.1), n, context, chunk, start) == pytest.approx(expected_s, rel=1e-6)


@given(n=sequences, context=contexts, start=starts, limit_s=st.floats(0.001, 2.0))
def test_chunks_are_the_longest_that_keep_the_limit(n: int, context: int, start: int, limit_s: float) -> None:
    step = mixed_step(POLYNOMIAL, 1.0, limit_s)
    got = longest_chunk(step, n, context, start)
    assert got % CHUNK_GRAIN_TOKENS == 0
    assert got <= LONGEST_CHUNK_TOKENS
    assert got == 0 or step_s(step, n, context, got, start) <= limit_s + 1e-9
    if got < LONGEST_CHUNK_TOKENS:
        assert step_s(step, n, context, got + CHUNK_GRAIN_TOKENS, start) > limit_s - 1e-9


@given(
    prompt_tokens=st.integers(1, 5_000),
    batches=st.lists(st.tuples(sequences, contexts), min_size=1, max_size=8),
    limit_s=st.floats(0.01, 0.2),
)
def test_a_prompt_is_computed_whole_in_chunks_that_keep_the_limit(
    prompt_tokens: int, batches: list[tuple[int, int]], limit_s: float
) -> None:
    step = mixed_step(POLYNOMIAL, 1.0, limit_s)
    line, one = PromptLine(block_tokens=16), sequence("a", prompt_tokens, step=step)
    line.add(one, tuple(range(1 + prompt_tokens // 16)), 0)
    done, keys, turn = 0, 0, 0
    while line.waiting()[0][0]:
        # a batch stays for a stretch, and each of its sequences has a token more after each step
        n, context = batches[turn // STRETCH_CHUNKS % len(batches)]
        prompt = line.begin(0.0, n, context + turn % STRETCH_CHUNKS * n)
        assert prompt is not None
        tokens = prompt.next_tokens
        context += turn % STRETCH_CHUNKS * n
        assert tokens <= CHUNK_GRAIN_TOKENS or step_s(step, n, context, tokens, done) <= limit_s + 1e-9
        first, new = line.computed()
        assert first == keys
        done, keys, turn = done + tokens, keys + len(new), turn + 1
        assert prompt.computed_tokens == done
    assert (done, keys) == (prompt_tokens, prompt_tokens // 16)
    assert line.pop().sequence is one
    assert not line


def test_a_step_for_which_somebody_has_waited_is_as_much_shorter() -> None:
    step = mixed_step(POLYNOMIAL, 1.0, 0.1)
    line = PromptLine(block_tokens=16)
    line.add(sequence("a", 4_000, step=step), tuple(range(251)), 0)

    def chunk(waited_s: float) -> int | None:
        prompt = line.begin(0.0, 1, 0, waited_s)
        return None if prompt is None else prompt.next_tokens

    whole = chunk(0.0)
    shorter = chunk(0.04)
    assert whole is not None
    assert shorter is not None
    assert step_s(step, 1, 0, shorter, 0) <= 0.06 < step_s(step, 1, 0, whole, 0)
    assert chunk(0.09) is None, "the step alone takes 0.02 s"
    assert chunk(0.2) == whole, "nobody is helped any more"
    line.computed()
    assert line.waiting() == ((4_000 - whole, whole),)
