"""Whose blocks are whose: usage of each tenant, and how much of a pool it may use.

A block counts for the tenant whose request got it, from then until it is free again: while it is written, shared,
evictable or drained. So it does where others use it too, which keys prevent unless tenants share their cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantQuotas:
    """Most blocks of a pool that a tenant may have: its own number, or ``default_blocks``. None is no limit."""

    default_blocks: int | None = None
    blocks: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tenant, limit in (("the default", self.default_blocks), *self.blocks.items()):
            if limit is not None and limit < 1:
                raise ValueError(f"quota of {tenant}: must be at least one block, got {limit}")

    def of(self, tenant: str) -> int | None:
        return self.blocks.get(tenant, self.default_blocks)


NO_QUOTAS = TenantQuotas()


class TenantAccounts:
    """Blocks in use by each tenant. O(1); a tenant without blocks is not remembered."""

    def __init__(self, quotas: TenantQuotas) -> None:
        self._quotas = quotas
        self._used: dict[str, int] = {}

    def used(self, tenant: str) -> int:
        return self._used.get(tenant, 0)

    def usage(self) -> dict[str, int]:
        """Blocks of every tenant that has any (a copy)."""
        return dict(self._used)

    @property
    def has_quotas(self) -> bool:
        """Whether anybody may have a quota at all."""
        return self._quotas.default_blocks is not None or bool(self._quotas.blocks)

    def is_limited(self, tenant: str) -> bool:
        return self._quotas.of(tenant) is not None

    def room(self, tenant: str) -> int | None:
        """How many more blocks *tenant* may have; None for any number."""
        quota = self._quotas.of(tenant)
        return None if quota is None else quota - self.used(tenant)

    def charge(self, tenant: str, n_blocks: int) -> None:
        if n_blocks:
            self._used[tenant] = self._used.get(tenant, 0) + n_blocks

    def discharge(self, tenant: str) -> None:
        left = self._used[tenant] - 1
        if left:
            self._used[tenant] = left
        else:
            del self._used[tenant]
