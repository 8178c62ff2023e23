"""What a pool answers with, and what it reports."""

import enum
from dataclasses import dataclass

from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange, KvTier


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A key that the pool began or ceased to hold, or that moved to ``tier``."""

    change: KvChange
    key: BlockKey
    tier: KvTier = KvTier.DRAM


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRoom:
    """Nothing was reserved: ``wanted_blocks`` exceed what the tenant can get."""

    wanted_blocks: int
    available_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """The block is shared now; the holder that sealed it keeps its reference."""

    block: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicate:
    """``other`` carries this key already; the block stays private to its holder."""

    block: BlockId
    other: BlockId


class Renewal(enum.Enum):
    """LAPSED: the holder has nothing any more, because it was released or its lease had ended."""

    RENEWED = "renewed"
    LAPSED = "lapsed"
