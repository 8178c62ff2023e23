"""Token buckets under any sequence of costs and pauses."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.gateway.rate_limits import TokenBucket

PER_MINUTE = st.integers(1, 10_000)
STEPS = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 1)), max_size=30)
"""Pauses, and costs as a part of what the bucket holds."""


@given(per_minute=PER_MINUTE, steps=STEPS)
def test_nobody_gets_more_than_a_minute_s_worth_ahead(per_minute: int, steps: list[tuple[float, float]]) -> None:
    bucket, now_s, paid = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for pause_s, part in steps:
        now_s += pause_s
        cost = part * per_minute
        if bucket.take(cost, now_s) == 0:
            paid += cost
        assert paid <= per_minute * (1 + now_s / 60) * (1 + 1e-9) + 1e-6


@given(per_minute=PER_MINUTE, steps=STEPS, debt=st.floats(0, 100_000))
def test_who_waits_as_told_is_served(per_minute: int, steps: list[tuple[float, float]], debt: float) -> None:
    bucket, now_s = TokenBucket(per_minute, 0.0), 0.0
    bucket.charge(debt, now_s)
    for pause_s, part in steps:
        now_s += pause_s
        cost = 2 * part * per_minute
        wait_s = bucket.take(cost, now_s)
        assert wait_s >= 0
        if wait_s:
            now_s += wait_s + 1e-6
            assert bucket.take(cost, now_s) <= 1e-3
