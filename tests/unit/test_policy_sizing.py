"""The ratio of prefill to decode instances from the moments of the traffic."""

import pytest

from mooncake_mesh.policy.sizing import TrafficMoments, decode_instances, decode_share

CAPACITY = 1_280_000


@pytest.mark.parametrize(
    ("prefill_s", "kv_token_s", "expected"),
    [
        (1.06, 2.47e5, 3),  # the conversation trace on 8×A800 nodes
        (1.06, 4 * 2.47e5, 8),
        (10.6, 2.47e5, 1),
        (0.0, 2.47e5, 15),
        (0.0, 0.0, 1),
    ],
)
def test_decode_instances_follow_what_the_requests_ask_of_each_pool(
    prefill_s: float, kv_token_s: float, expected: int
) -> None:
    moments = TrafficMoments(prefill_s=prefill_s, kv_token_s=kv_token_s)
    assert decode_instances(moments, instances=16, kv_capacity_tokens=CAPACITY) == expected


def test_the_share_is_that_of_the_busy_time() -> None:
    assert decode_share(TrafficMoments(prefill_s=3.0, kv_token_s=2.0), 2) == pytest.approx(0.25)


def test_what_cannot_be_sized_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_s"):
        TrafficMoments(prefill_s=-1.0, kv_token_s=0.0)
    with pytest.raises(ValueError, match="instances"):
        decode_instances(TrafficMoments(prefill_s=1.0, kv_token_s=1.0), instances=1, kv_capacity_tokens=1)
