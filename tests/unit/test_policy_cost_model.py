import pytest

from mooncake_mesh.policy.cost_model import LinearCost, instance_prefill_s, instance_queue_s, instance_step_s
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


def test_a_measured_prefill_speed_beats_the_model() -> None:
    assert instance_prefill_s(instance(), COST, 100, 50) == COST.prefill_s(100, 50)
    assert instance_prefill_s(instance(prefill_tokens_per_s=200.0), COST, 100, 50) == 0.5


def test_the_queue_is_the_prefill_of_all_its_tokens() -> None:
    assert instance_queue_s(instance(), COST) == 0.0
    assert instance_queue_s(instance(queued_tokens=100), COST) == COST.prefill_s(100, 0)
    assert instance_queue_s(instance(queued_tokens=100, prefill_tokens_per_s=50.0), COST) == 2.0


def test_a_step_is_predicted_with_the_newcomer_in_it() -> None:
    busy = {"running_jobs": 4, "running_tokens": 400}
    modelled = COST.decode_step_s(5, 500)
    assert instance_step_s(instance(**busy), COST, 100) == modelled
    slow = instance_step_s(instance(**busy, step_s=2 * COST.decode_step_s(4, 400)), COST, 100)
    assert slow == pytest.approx(2 * modelled)


def test_an_idle_instance_has_no_step_to_go_by() -> None:
    assert instance_step_s(instance(step_s=9.0), COST, 100) == COST.decode_step_s(1, 100)
