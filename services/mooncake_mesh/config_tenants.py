"""Quotas of tenants as a configuration says them: ``acme=25, beta=12.5, *=10``, percent of the arena's blocks.

``*`` is everybody who is not named; without it they have no limit.
"""

from mooncake_mesh.kv.tenants import TenantQuotas

_EVERYBODY = "*"


def tenant_shares(text: str) -> dict[str, float]:
    """Percent of the arena by tenant. Raises ValueError with what is allowed."""
    shares: dict[str, float] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        tenant, equals, percent = (part.strip() for part in item.rpartition("="))
        if not equals or not tenant or tenant in shares:
            raise ValueError(f"expected TENANT=PERCENT, separated by commas, each tenant once, got {item!r}")
        try:
            share = float(percent)
        except ValueError:
            share = 0.0
        if not 0.0 < share <= 100.0:
            raise ValueError(f"share of {tenant}: must be above 0 and at most 100 percent, got {percent!r}")
        shares[tenant] = share
    return shares


def tenant_quotas(text: str, n_blocks: int) -> TenantQuotas:
    """The quotas in an arena of *n_blocks*; a share comes to one block at least."""
    blocks = {tenant: max(1, int(n_blocks * share / 100.0)) for tenant, share in tenant_shares(text).items()}
    default = blocks.pop(_EVERYBODY, None)
    return TenantQuotas(default_blocks=default, blocks=blocks)
