import pytest

from mooncake_mesh.policy.cost_model import LinearCost, instance_step_s
from mooncake_mesh.policy.views import InstanceView
from mooncake_proto.ids import InstanceId, NodeId

COEFFICIENTS = {
    "prefill_base_s": 0.5,
    "prefill_token_s": 0.01,
    "cached_token_s": 0.001,
    "step_base_s": 0.02,
    "step_sequence_s": 0.001,
    "step_context_token_s": 0.0001,
    "transfer_base_s": 0.1,
    "transfer_bytes_per_s": 1000.0,
}
COST = LinearCost(**COEFFICIENTS)


def instance(**fields: float) -> InstanceView:
    base = {"instance_id": InstanceId("i"), "node_id": NodeId("n"), "blocks_total": 8, "blocks_available": 8}
    return InstanceView(**(base | fields))  # type: ignore[arg-type]


def test_each_prediction_is_linear() -> None:
    assert COST.prefill_s(100, 50) == pytest.approx(0.5 + 1.0 + 0.05)
    assert COST.decode_step_s(4, 200) == pytest.approx(0.02 + 0.004 + 0.02)
    assert COST.transfer_s(500) == pytest.approx(0.6)


@pytest.mark.parametrize("name", sorted(COEFFICIENTS))
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_coefficients_are_not_negative(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        LinearCost(**COEFFICIENTS | {name: value})


def test_a_link_has_some_speed() -> None:
    with pytest.raises(ValueError, match="transfer_bytes_per_s"):
        LinearCost(**COEFFICIENTS | {"transfer_bytes_per_s": 0.0})


def test_a_step_is_predicted_with_the_newcomer_and_all_that_wait_in_it() -> None:
    busy = {"running_jobs": 3, "running_tokens": 300, "waiting_jobs": 1, "waiting_tokens": 100}
    assert instance_step_s(instance(**busy), COST, 100) == COST.decode_step_s(5, 500)
    assert instance_step_s(instance(**busy, factor=2.0), COST, 100) == 2 * COST.decode_step_s(5, 500)
