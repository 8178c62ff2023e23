"""Which block goes next: the sealed blocks that nobody references, in the order in which they are given up.

The policy orders those of all tenants. A tenant that may have only so many blocks has an order of its own besides,
least recently used first: it pays for what exceeds its quota itself. Soft-pinned blocks come after all others.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from mooncake_mesh.kv.eviction_contract import BlockHistory, EvictionPolicy
from mooncake_mesh.kv.soft_pins import SoftPins
from mooncake_proto.ids import BlockId, BlockKey


class Victims:
    """Candidates for eviction. As for a policy, ``use`` comes before the insertions of a chain."""

    def __init__(self, policy: EvictionPolicy) -> None:
        """*policy* must be empty."""
        self._policy = policy
        self._own: dict[str, OrderedDict[BlockId, None]] = {}
        self._tenant_of: dict[BlockId, str] = {}  # of limited tenants' candidates
        self._pins = SoftPins()
        self._wanted = self._pins.pinned
        self._pinned: OrderedDict[BlockId, BlockHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._policy) + len(self._pinned)

    def of(self, tenant: str) -> int:
        """How many candidates a limited *tenant* has."""
        return len(self._own.get(tenant, ()))

    def coldest(self, n: int) -> list[BlockId]:
        """The next *n* victims, or all there are, in order; soft-pinned ones are not among them."""
        return list(islice(self._policy.order(), n))

    def order(self) -> Iterator[BlockId]:
        """All of them, next victim first. Nothing may change meanwhile."""
        yield from self._policy.order()
        yield from self._pinned

    # --- coming and going ---------------------------------------------------------------------------------------------

    def use(self, chain: Sequence[BlockKey]) -> None:
        self._policy.use(chain)

    def insert(self, block: BlockId, history: BlockHistory, limited_tenant: str | None) -> None:
        """*block* is referenced no more. *limited_tenant* names its tenant where that has a quota."""
        if limited_tenant is not None:
            self._tenant_of[block] = limited_tenant
            self._own.setdefault(limited_tenant, OrderedDict())[block] = None
        if block in self._wanted:
            self._pinned[block] = history
        else:
            self._policy.insert(block, history)

    def remove(self, block: BlockId) -> None:
        """*block* is referenced again, or was freed."""
        if self._tenant_of:
            self._leave_own(block)
        if block in self._pinned:
            del self._pinned[block]
        else:
            self._policy.remove(block)

    def take(self) -> BlockId:
        """Remove and return the next victim. There must be one."""
        block = self._policy.evict() if len(self._policy) else self._pinned.popitem(last=False)[0]
        self._leave_own(block)
        return block

    def take_of(self, tenant: str) -> BlockId:
        """Remove and return the next victim among those of a limited *tenant*, of which there must be one."""
        own = self._own[tenant]
        block = next((block for block in own if block not in self._pinned), next(iter(own)))
        self.remove(block)
        return block

    # --- soft pins ----------------------------------------------------------------------------------------------------

    def pin(
        self,
        pinner: str,
        blocks: Sequence[BlockId],
        candidates: Iterable[tuple[BlockId, BlockHistory]],
        until_s: float,
    ) -> None:
        """Pin *blocks*; *candidates* are those of them that are here."""
        for block, history in candidates:
            if block not in self._pinned:
                self._policy.remove(block)
                self._pinned[block] = history
        self._pins.pin(pinner, blocks, until_s)

    def unpin(self, pinner: str) -> None:
        self._unpinned(self._pins.unpin(pinner))

    def expire(self, now_s: float) -> None:
        """End the pins whose time is over."""
        self._unpinned(self._pins.expire(now_s))

    def forget(self, block: BlockId) -> None:
        """*block* is free now: nobody pins it any more."""
        if block in self._wanted:
            self._pins.forget(block)

    def _unpinned(self, blocks: Sequence[BlockId]) -> None:
        """As if they had been used just now: a policy takes nothing in otherwise."""
        back = [(block, self._pinned.pop(block)) for block in blocks if block in self._pinned]
        self._policy.use([history.key for _, history in back])
        for block, history in reversed(back):
            self._policy.insert(block, history)

    def _leave_own(self, block: BlockId) -> None:
        tenant = self._tenant_of.pop(block, None)
        if tenant is not None:
            own = self._own[tenant]
            del own[block]
            if not own:
                del self._own[tenant]
