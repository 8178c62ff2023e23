"""Block keys: equal on every process and machine, for ever, as long as RECIPE stays what it is.

``key_0 = H(root ‖ block_0)``, ``key_i = H(key_{i-1} ‖ block_i)``: equal keys mean equal whole prefixes. H is SHA-256
cut to 16 bytes (the index holds no tokens to compare, so 64 bits would not do); a block is its tokens as
little-endian int32. The root covers everything that makes two caches of the same tokens differ, each part
length-prefixed so that no two lists of parts can collide. Python's own ``hash`` differs per process and is never
used.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterator, Sequence
from operator import itemgetter
from struct import Struct
from typing import Final, cast

from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

RECIPE: Final = "mooncake-mesh/block/1"
_TOKEN_BYTES: Final = 4
_KEY: Final = Struct(f"{BLOCK_KEY_BYTES}s")


def key_root(
    *, fingerprint: str, dtype: str, block_tokens: int, block_bytes: int, tenant: str, cache_salt: str
) -> BlockKey:
    """Root of the chain: one namespace of keys. ``fingerprint`` names the model, its revision and its tokenizer."""
    digest = hashlib.sha256()
    for part in (RECIPE, fingerprint, dtype, str(block_tokens), str(block_bytes), tenant, cache_salt):
        data = part.encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return BlockKey(digest.digest()[:BLOCK_KEY_BYTES])


def token_bytes(tokens: Sequence[int]) -> bytes:
    """*tokens* as the wire and the keys have them: little-endian int32."""
    packed = array("i", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def chain(previous: BlockKey, tokens: bytes | memoryview, block_tokens: int) -> list[BlockKey]:
    """Keys of the whole blocks in *tokens* (int32 bytes); a partial last block has no key.

    *previous* is the key of the block before, or the root.
    """
    block_bytes = block_tokens * _TOKEN_BYTES
    view = memoryview(tokens)
    keys = []
    key = previous
    for start in range(0, len(view) - block_bytes + 1, block_bytes):
        digest = hashlib.sha256(key)
        digest.update(view[start : start + block_bytes])
        key = BlockKey(digest.digest()[:BLOCK_KEY_BYTES])
        keys.append(key)
    return keys


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as one payload frame."""
    return b"".join(keys)


def split_keys(data: bytes) -> Iterator[BlockKey]:
    """Inverse of :func:`join_keys`; raises ValueError unless *data* is a whole number of keys."""
    if len(data) % BLOCK_KEY_BYTES:
        raise ValueError(f"keys: {len(data)} bytes are no whole number of {BLOCK_KEY_BYTES}-byte keys")
    return cast("Iterator[BlockKey]", map(itemgetter(0), _KEY.iter_unpack(data)))
