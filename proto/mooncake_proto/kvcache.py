"""Which node holds which block: messenger → conductor.

Events of one messenger incarnation are numbered from 1 without gaps. The conductor answers each batch with the number
it expects next; on a gap, or for a new incarnation, it asks for a snapshot (``resync``). What it holds is a hint for
placement, never a promise.
"""

import enum
from dataclasses import dataclass

from mooncake_proto.codec import message
from mooncake_proto.ids import Incarnation, NodeId
from mooncake_proto.shapes import HexKey, Natural, PackedKeys


class KvChange(enum.Enum):
    STORED = "stored"
    REMOVED = "removed"


class KvTier(enum.Enum):
    """Where on its node a block is: the fastest place of those it is in."""

    DRAM = "dram"
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvent:
    """One change; ``key`` is the block key in hex. ``tier`` says where a stored block is now.

    A block that moves between the tiers is stored again.
    """

    change: KvChange
    key: HexKey
    tier: KvTier = KvTier.DRAM


@message("kvcache.events")
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Events numbered ``first_seq`` onwards. Answered by KvEventsAck."""

    node_id: NodeId
    incarnation: Incarnation
    first_seq: Natural
    events: tuple[KvEvent, ...]


@message("kvcache.snapshot")
@dataclass(frozen=True, slots=True, kw_only=True)
class KvSnapshot:
    """All keys held after event ``seq``. Replaces what the conductor knew of the node. Answered by KvEventsAck.

    The last ``ssd_keys`` of them are on SSD only.
    """

    node_id: NodeId
    incarnation: Incarnation
    seq: Natural
    keys: PackedKeys
    ssd_keys: Natural = 0


@message("kvcache.events_ack")
@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsAck:
    next_seq: Natural
    resync: bool
