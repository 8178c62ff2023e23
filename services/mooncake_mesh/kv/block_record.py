"""What the pool keeps of each block."""

import enum
from dataclasses import dataclass, field

from mooncake_mesh.kv.eviction_contract import BlockHistory
from mooncake_proto.ids import BlockKey


class BlockState(enum.Enum):
    """See the diagram at the top of :mod:`~mooncake_mesh.kv.block_pool`."""

    FREE = "free"
    RESERVED = "reserved"
    SEALED = "sealed"
    DRAINING = "draining"

    may_become: tuple["BlockState", ...]
    """Where it can go from here. A tuple of its own, since looking an enum up in a set or a dict costs a call."""


BlockState.FREE.may_become = (BlockState.RESERVED,)
BlockState.RESERVED.may_become = (BlockState.SEALED, BlockState.DRAINING, BlockState.FREE)
BlockState.DRAINING.may_become = (BlockState.FREE,)
BlockState.SEALED.may_become = (BlockState.FREE,)


@dataclass(slots=True)
class BlockRecord:
    """``tenant`` is whom it was reserved for last."""

    state: BlockState = BlockState.FREE
    generation: int = 0
    references: int = 0
    writers: int = 0
    key: BlockKey | None = None
    tenant: str = ""
    history: BlockHistory = field(default_factory=BlockHistory)

    @property
    def is_quiet(self) -> bool:
        """Reserved, and nobody writes it now."""
        return self.state is BlockState.RESERVED and not self.writers
