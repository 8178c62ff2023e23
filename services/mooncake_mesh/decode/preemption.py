"""Who makes room when a sequence gets no block for its next token, and how its KV leaves the arena and returns. Pure.

What goes is the lowest class's youngest; what returns first is the highest class's oldest. Out of the arena, KV lies in
memory of the worker's own, byte for byte, within a budget: who is decoded on, continues with the very KV it had. Whole
blocks also stay in the pool under their keys, and those that are still there are not copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.kv.block_hash import chain, split_keys, token_bytes
from mooncake_proto.ids import BlockKey


def first_to_go(sequences: Sequence[DecodeSequence]) -> DecodeSequence:
    """Of *sequences*, which must not be empty, the one that makes room."""
    return max(sequences, key=_rank)


def first_back(sequences: Sequence[DecodeSequence]) -> DecodeSequence | None:
    """Of *sequences* the one that gets room again before the others."""
    return min(sequences, key=_rank, default=None)


def _rank(sequence: DecodeSequence) -> tuple[int, int]:
    return sequence.job.priority, sequence.admission


def swap_keys(sequence: DecodeSequence, block_tokens: int) -> list[BlockKey]:
    """Keys of all blocks of *sequence* that are whole."""
    known = list(split_keys(sequence.job.keys))
    tokens = sequence.tokens[len(known) * block_tokens : sequence.position]
    last = known[-1] if known else BlockKey(sequence.job.key_root)
    return [*known, *chain(last, token_bytes(tokens.tolist()), block_tokens)]


@dataclass(slots=True, kw_only=True)
class SwapBudget:
    """Memory for KV outside the arena: at most ``most_bytes`` of it are taken at a time."""

    most_bytes: int
    taken_bytes: int = 0

    def take(self, n_bytes: int) -> bool:
        """Whether there was room for *n_bytes*, which are taken then."""
        if self.taken_bytes + n_bytes > self.most_bytes:
            return False
        self.taken_bytes += n_bytes
        return True

    def give_back(self, n_bytes: int) -> None:
        self.taken_bytes -= n_bytes
