"""When a sequence needs more blocks, and how many it asks for at a time. Pure."""

from typing import Final

from mooncake_mesh.decode.sequences import ACTIVE, DecodeSequence

GROW_AHEAD_TOKENS: Final = 8
"""Who has room for at least so many tokens more is not short of it."""

_GROW_BLOCKS: Final = 4


def room_tokens(sequence: DecodeSequence, block_tokens: int) -> int:
    """Further steps that fit into the blocks there are."""
    return len(sequence.blocks) * block_tokens - sequence.position


def is_short(sequence: DecodeSequence, block_tokens: int) -> bool:
    """Whether it is decoded, and will need more blocks soon."""
    if sequence.stage not in ACTIVE or sequence.stop is not None or not sequence.is_granted:
        return False
    return room_tokens(sequence, block_tokens) <= min(GROW_AHEAD_TOKENS, sequence.left_tokens - 1)


def wanted_blocks(sequence: DecodeSequence, block_tokens: int) -> int:
    """How many more it asks for: no more than it may fill."""
    return min(_GROW_BLOCKS, -(-(sequence.left_tokens - room_tokens(sequence, block_tokens)) // block_tokens))


def blocks_back(sequence: DecodeSequence, block_tokens: int) -> int:
    """With how many blocks it comes back that has given all away: some to go on in, but no more than it may fill."""
    most = -(-(sequence.position + sequence.left_tokens) // block_tokens)
    return min(most, -(-sequence.position // block_tokens) + _GROW_BLOCKS)
