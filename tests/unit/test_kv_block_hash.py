import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.kv.block_hash import RECIPE, chain, join_keys, key_root, split_keys, token_bytes
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

NAMESPACE = {
    "fingerprint": "model@1",
    "dtype": "bfloat16",
    "block_tokens": 4,
    "block_bytes": 4096,
    "tenant": "t",
    "cache_salt": "s",
}
tokens_lists = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def root(**changes: object) -> BlockKey:
    return key_root(**(NAMESPACE | changes))  # type: ignore[arg-type]


def test_the_recipe_written_out() -> None:
    parts = [RECIPE, "model@1", "bfloat16", "4", "4096", "t", "s"]
    data = b"".join(struct.pack("<I", len(p.encode())) + p.encode() for p in parts)
    assert root() == hashlib.sha256(data).digest()[:16]
    first = hashlib.sha256(root() + struct.pack("<4i", 1, 2, 3, 4)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8)).digest()[:16]
    assert chain(root(), token_bytes([1, 2, 3, 4, 5, 6, 7, 8, 9]), 4) == [first, second]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "model@2"),
        ("dtype", "float32"),
        ("block_tokens", 8),
        ("block_bytes", 8192),
        ("tenant", "u"),
        ("cache_salt", ""),
    ],
)
def test_each_part_of_the_namespace_separates(field: str, value: object) -> None:
    assert root(**{field: value}) != root()


def test_parts_do_not_run_into_each_other() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")]
    assert len({root(tenant=tenant, cache_salt=salt) for tenant, salt in pairs}) == 4
    assert root(block_tokens=1, block_bytes=11) != root(block_tokens=11, block_bytes=1)
    assert len({root(tenant="é"), root(tenant="e\u0301")}) == 2, "no normalisation: bytes are what counts"


def test_equal_prompts_share_keys_only_with_the_same_salt() -> None:
    tokens = token_bytes(range(8))
    assert chain(root(cache_salt="x"), tokens, 4) == chain(root(cache_salt="x"), tokens, 4)
    assert not set(chain(root(cache_salt="x"), tokens, 4)) & set(chain(root(cache_salt="y"), tokens, 4))


@given(tokens_lists, st.integers(1, 6))
def test_only_whole_blocks_have_keys(tokens: list[int], block_tokens: int) -> None:
    keys = chain(root(), token_bytes(tokens), block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == BLOCK_KEY_BYTES for key in keys)


@given(tokens_lists, tokens_lists, st.integers(1, 6))
def test_keys_agree_exactly_as_far_as_the_blocks_do(a: list[int], b: list[int], block_tokens: int) -> None:
    common = 0
    while common < min(len(a), len(b)) // block_tokens:
        span = slice(common * block_tokens, (common + 1) * block_tokens)
        if a[span] != b[span]:
            break
        common += 1
    keys_a, keys_b = (chain(root(), token_bytes(tokens), block_tokens) for tokens in (a, b))
    assert keys_a[:common] == keys_b[:common]
    assert not set(keys_a[common:]) & set(keys_b[common:])


@given(tokens_lists, st.integers(1, 6), st.integers(0, 40))
def test_a_chain_can_be_continued(tokens: list[int], block_tokens: int, cut_blocks: int) -> None:
    whole = chain(root(), token_bytes(tokens), block_tokens)
    cut_blocks = min(cut_blocks, len(whole))
    previous = whole[cut_blocks - 1] if cut_blocks else root()
    assert chain(previous, token_bytes(tokens[cut_blocks * block_tokens :]), block_tokens) == whole[cut_blocks:]


def test_tokens_are_little_endian_int32() -> None:
    assert token_bytes([1, 2**31 - 1, -1]) == b"\x01\x00\x00\x00\xff\xff\xff\x7f\xff\xff\xff\xff"
    with pytest.raises(OverflowError):
        token_bytes([2**31])


def test_keys_travel_as_one_frame() -> None:
    keys = chain(root(), token_bytes(range(12)), 4)
    assert list(split_keys(join_keys(keys))) == keys
    assert list(split_keys(b"")) == []
    with pytest.raises(ValueError, match="17 bytes"):
        split_keys(b"x" * 17)
