"""How much a tenant may ask for: token buckets; pure.

A bucket holds a minute's worth when it is full and fills evenly. Requests and prompts are paid before any work is done;
what a request generates is only known at its end, so that is paid then and may leave the bucket in debt, which the
tenant's next requests wait for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.errors import Rejected

_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """None: no limit. Tokens are those of prompts and those generated."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        for limit in (self.requests_per_minute, self.tokens_per_minute):
            if limit is not None and limit < 1:
                raise ValueError(f"a limit is at least 1, not {limit}")


class TokenBucket:
    """Full at first. Times are seconds of one clock that never goes back."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def take(self, cost: float, now_s: float) -> float:
        """Pay *cost* and return 0, or pay nothing and return the seconds after which it could be paid.

        A cost beyond what the bucket holds is due when it is full, and leaves it in debt.
        """
        self._fill(now_s)
        missing = min(cost, float(self.per_minute)) - self._level
        if missing > 0:
            return missing * _MINUTE_S / self.per_minute
        self._level -= cost
        return 0.0

    def charge(self, cost: float, now_s: float) -> None:
        """Pay *cost*, on credit if need be."""
        self._fill(now_s)
        self._level -= cost

    def _fill(self, now_s: float) -> None:
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / _MINUTE_S)
        self._at_s = now_s


class TenantRates:
    """The buckets of all tenants. *limits_of* says what a tenant may, now; a changed limit starts a new bucket."""

    def __init__(self, limits_of: Callable[[str], TenantLimits]) -> None:
        self._limits_of = limits_of
        self._requests: dict[str, TokenBucket] = {}
        self._tokens: dict[str, TokenBucket] = {}

    def take_request(self, tenant: str, now_s: float) -> None:
        """Count one request. Raises Rejected when the tenant has had its share."""
        limit = self._limits_of(tenant).requests_per_minute
        _take(self._requests, tenant, limit, 1, now_s, "tenant_requests_per_minute")

    def take_tokens(self, tenant: str, n_tokens: int, now_s: float) -> None:
        """Count the tokens of a prompt. Raises Rejected when the tenant has had its share."""
        limit = self._limits_of(tenant).tokens_per_minute
        _take(self._tokens, tenant, limit, n_tokens, now_s, "tenant_tokens_per_minute")

    def charge_tokens(self, tenant: str, n_tokens: int, now_s: float) -> None:
        """Count tokens that were generated; a negative number gives back what a refused prompt has paid."""
        limit = self._limits_of(tenant).tokens_per_minute
        if limit is not None:
            _bucket(self._tokens, tenant, limit, now_s).charge(n_tokens, now_s)


def no_limits(_: str) -> TenantLimits:
    """For a gateway without API keys."""
    return TenantLimits()


def _take(
    buckets: dict[str, TokenBucket], tenant: str, limit: int | None, cost: int, now_s: float, reason: str
) -> None:
    if limit is None:
        return
    wait_s = _bucket(buckets, tenant, limit, now_s).take(cost, now_s)
    if wait_s > 0:
        raise Rejected(reason, unavailable=False, retry_after_s=wait_s)


def _bucket(buckets: dict[str, TokenBucket], tenant: str, limit: int, now_s: float) -> TokenBucket:
    bucket = buckets.get(tenant)
    if bucket is None or bucket.per_minute != limit:
        bucket = buckets[tenant] = TokenBucket(limit, now_s)
    return bucket
