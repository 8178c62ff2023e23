"""Whether a pool's books agree with each other. For tests."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from mooncake_mesh.errors import InvariantViolated
from mooncake_mesh.kv.block_record import BlockRecord, BlockState
from mooncake_proto.ids import BlockId, BlockKey

_UNOWNED: Final = frozenset({BlockState.FREE, BlockState.DRAINING})
_WRITABLE: Final = frozenset({BlockState.RESERVED, BlockState.DRAINING})


def audit(
    blocks: Sequence[BlockRecord],
    *,
    free: Sequence[BlockId],
    sealed: Mapping[BlockKey, BlockId],
    held: Mapping[str, Collection[BlockId]],
    leased: Sequence[str],
    victims: Sequence[BlockId],
    tenants: Mapping[str, int],
) -> None:
    """Raise InvariantViolated with what does not agree. O(pool)."""
    counts = Counter(record.state for record in blocks)
    in_use = Counter(record.tenant for record in blocks if record.state is not BlockState.FREE)
    references = Counter(block for mine in held.values() for block in mine)
    _require(len(set(free)) == len(free) == counts[BlockState.FREE], "free list and states differ")
    _require(len(sealed) == counts[BlockState.SEALED], "key map and states differ")
    _require(len(set(victims)) == len(victims), "a block is evictable twice")
    _require(in_use == Counter(tenants), "usage of tenants and states differ")
    _require(all(held.values()), "a holder without blocks")
    _require(all(holder in held for holder in leased), "a lease without a holder")
    evictable, unused = set(victims), set(free)
    for number, record in enumerate(blocks):
        block = BlockId(number)
        _require(record.references == references[block], f"{_name(block, record)}: references")
        _require((block in unused) == (record.state is BlockState.FREE), f"{_name(block, record)}: free list")
        _audit_block(block, record, is_evictable=block in evictable)
        is_found = record.key is None or sealed.get(record.key) == block
        _require(is_found, f"{_name(block, record)}: key map")


def _audit_block(block: BlockId, record: BlockRecord, *, is_evictable: bool) -> None:
    name, state = _name(block, record), record.state
    is_sealed = state is BlockState.SEALED
    _require(is_evictable == (is_sealed and not record.references), f"{name}: evictable")
    _require((record.key is not None) == is_sealed, f"{name}: key")
    _require(state is not BlockState.RESERVED or record.references == 1, f"{name}: one owner")
    _require(state in _UNOWNED or record.references > 0 or is_sealed, f"{name}: owner")
    _require(state not in _UNOWNED or record.references == 0, f"{name}: owned")
    _require(state is not BlockState.DRAINING or record.writers > 0, f"{name}: nothing drains")
    _require(state in _WRITABLE or record.writers == 0, f"{name}: written")


def _name(block: BlockId, record: BlockRecord) -> str:
    return f"block {block} ({record.state.value})"


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantViolated(what)
