"""Which context of a sequence that is over another one gets."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.engine.retired_contexts import RetiredContexts, shared_blocks
from mooncake_mesh.kv.block_hash import chain, token_bytes
from mooncake_proto.ids import BlockKey

ROOT = BlockKey(b"r" * 16)


@dataclass(frozen=True)
class Context:
    name: str
    n_bytes: int = 100


def keys(*tokens: int) -> list[BlockKey]:
    """One block for each token."""
    return chain(ROOT, token_bytes(tokens), 1)


def retired(**kept: tuple[int, ...]) -> RetiredContexts[Context]:
    """Contexts by their tokens, oldest first."""
    contexts = RetiredContexts[Context]()
    for name, tokens in kept.items():
        contexts.add(Context(name), keys(*tokens))
    return contexts


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
def test_shared_blocks_are_counted_up_to_the_first_difference(ones: list[int], others: list[int]) -> None:
    expected = next(
        (i for i, (a, b) in enumerate(zip(ones, others, strict=False)) if a != b), min(len(ones), len(others))
    )
    assert shared_blocks(keys(*ones), keys(*others)) == expected


def test_the_one_that_shares_most_is_taken_and_is_gone() -> None:
    contexts = retired(short=(1, 2), long=(1, 2, 3, 4), other=(9, 2, 3, 4))
    assert contexts.take(keys(1, 2, 3, 4, 5)) == (Context("long"), 4)
    assert contexts.take(keys(1, 2, 3, 4, 5)) == (Context("short"), 2)
    assert contexts.take(keys(1, 2, 3, 4, 5)) is None
    assert (len(contexts), contexts.n_bytes) == (1, 100)


def test_of_equal_ones_the_newest_is_taken() -> None:
    assert retired(older=(1, 2), newer=(1, 2)).take(keys(1, 2)) == (Context("newer"), 2)


@pytest.mark.parametrize(("shared", "is_taken"), [(1, False), (2, False), (3, True), (5, True)])
def test_one_that_holds_much_more_than_is_shared_stays(shared: int, is_taken: bool) -> None:
    contexts = retired(long=(1, 2, 3, 4, 5, 6))
    found = contexts.take(keys(*range(1, shared + 1), 99, 98, 97))
    assert (found == (Context("long"), shared)) is is_taken
    assert len(contexts) == (0 if is_taken else 1)


def test_the_oldest_goes_first_and_bytes_are_counted() -> None:
    contexts = retired(a=(1,), b=(2,), c=(3,))
    contexts.drop_oldest()
    assert contexts.take(keys(1)) is None
    assert contexts.n_bytes == 200
    contexts.clear()
    assert (len(contexts), contexts.n_bytes) == (0, 0)
    with pytest.raises(IndexError):
        contexts.drop_oldest()
