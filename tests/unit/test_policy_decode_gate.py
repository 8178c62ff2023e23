"""The decision to begin decoding, as tables of what is decoded and what waits."""

from dataclasses import replace
from typing import Any, cast

import pytest

from mooncake_mesh.config_scheduling import AdmissionKind, LoadMeasure
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.decisions import Refused
from mooncake_mesh.policy.decode_gate import Batch, Candidate, LinearStep, Verdict, gate_for, joining, overdue, verdicts
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives
from mooncake_proto.ids import InstanceId, NodeId
from mooncake_proto.serving import DecodeGate, GateKind

GATE = DecodeGate(
    kind=GateKind.CHECK,
    tbt_s=0.1,
    step_base_s=0.0,
    step_sequence_s=0.0,
    step_token_s=0.001,  # 100 tokens of KV take all of the objective, 97 the planned share of it
    room_tokens=1000,
    decode_s=20.0,
)
HOLD = replace(GATE, kind=GateKind.HOLD)
EMPTY = Batch(jobs=0, tokens=0, max_jobs=8)


def waiting(*tokens: int, gate: DecodeGate = GATE, left_s: float | None = 10.0) -> list[Candidate]:
    return [Candidate(tokens=n, gate=gate, left_s=left_s) for n in tokens]


def told(batch: Batch, candidates: list[Candidate]) -> list[str]:
    return [v.reason if isinstance(v, Refused) else v.value for v in verdicts(batch, candidates)]


def batch(tokens: int, jobs: int = 2) -> Batch:
    return Batch(jobs=jobs, tokens=tokens, max_jobs=8)


@pytest.mark.parametrize("gate", [GATE, HOLD])
def test_an_empty_batch_takes_whoever_is_first(gate: DecodeGate) -> None:
    assert told(EMPTY, waiting(5000, gate=gate)) == ["granted"]


@pytest.mark.parametrize(("tokens", "verdict"), [(60, "granted"), (61, "tbt_objective_at_decode")])
def test_check_refuses_what_makes_a_step_too_long(tokens: int, verdict: str) -> None:
    assert told(batch(40), waiting(tokens)) == [verdict]


def test_check_refuses_what_does_not_fit_and_says_when_enough_will_be_gone() -> None:
    gate = replace(GATE, step_token_s=0.0)
    assert verdicts(batch(900), waiting(350, gate=gate)) == [
        Refused(reason="tbt_objective_at_decode", unavailable=False, retry_after_s=20.0 * 250 / 1250)
    ]


def test_the_ones_granted_count_for_those_behind_them_and_the_refused_do_not() -> None:
    assert told(batch(40), waiting(50, 20, 10)) == ["granted", "tbt_objective_at_decode", "granted"]


@pytest.mark.parametrize("left_s", [10.0, None])
def test_a_full_batch_makes_wait_before_the_first_token_or_after_it(left_s: float | None) -> None:
    assert told(batch(8, jobs=8), waiting(1, gate=HOLD, left_s=left_s)) == ["held"]
    assert told(batch(8, jobs=8), waiting(1, left_s=left_s)) == ["granted"]
    assert joining(batch(8, jobs=8), waiting(1)) == 0


def test_who_passed_the_check_joins_as_there_is_room_to_grow_and_nobody_is_passed() -> None:
    assert told(batch(900), waiting(100, gate=replace(GATE, step_token_s=0.0))) == ["granted"]
    assert joining(batch(900), waiting(80)) == 1
    assert joining(batch(900), waiting(81)) == 0
    assert joining(batch(900), waiting(30, 60, 1)) == 1
    assert joining(EMPTY, waiting(5000)) == 1


def test_a_size_neutral_check_does_not_count_the_request() -> None:
    gate = replace(GATE, kind=GateKind.CHECK_SIZE_NEUTRAL)
    assert told(batch(100), waiting(500, gate=gate)) == ["granted"]
    assert told(batch(101), waiting(1, gate=gate)) == ["tbt_objective_at_decode"]
    assert told(batch(40), waiting(70, 1, gate=gate)) == ["granted", "tbt_objective_at_decode"]


def test_who_is_held_when_its_first_token_is_due_is_refused() -> None:
    assert told(batch(8, jobs=8), waiting(1, gate=HOLD, left_s=0.0)) == ["ttft_objective_at_decode"]
    late = overdue(-0.1)
    assert late is not None
    assert late.reason == "ttft_objective_at_decode"
    assert overdue(0.1) is None
    assert overdue(None) is None


@pytest.mark.parametrize(("tokens", "verdict"), [(57, "granted"), (58, "held")])
def test_hold_grants_what_keeps_a_step_below_its_share_of_the_objective(tokens: int, verdict: str) -> None:
    assert told(batch(40), waiting(tokens, gate=HOLD)) == [verdict]


def test_who_is_held_is_not_overtaken_by_a_smaller_one() -> None:
    assert told(batch(40), waiting(58, 1, gate=HOLD)) == ["held", "held"]


def test_hold_refuses_what_would_wait_too_long() -> None:
    """194 tokens are twice what fits: half of them have to go, which takes half of 20 s."""
    [verdict] = verdicts(batch(97), waiting(97, gate=HOLD, left_s=9.0))
    retry_after_s = cast(float, pytest.approx(1.0))
    assert verdict == Refused(reason="ttft_objective_at_decode", unavailable=False, retry_after_s=retry_after_s)
    assert told(batch(97), waiting(97, gate=HOLD, left_s=10.1)) == ["held"]


def test_a_cost_model_at_hand_replaces_what_the_gate_says() -> None:
    slower = LinearStep(base_s=0.0, sequence_s=0.0, token_s=0.01)
    assert verdicts(batch(40), waiting(10, gate=HOLD, left_s=None), slower) == [Verdict.HELD]


COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.001,
    cached_token_s=0.0,
    step_base_s=0.01,
    step_sequence_s=0.002,
    step_context_token_s=1e-5,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e9,
)
INSTANCE = InstanceView(
    instance_id=InstanceId("d"), node_id=NodeId("n"), blocks_total=100, blocks_available=100, factor=2.0
)
CLUSTER = ClusterView(prefill=(), decode=(INSTANCE,), decode_s=7.0)


OBJECTIVES = Objectives(ttft_s=5.0, tbt_s=0.1)


def gate_of(
    instance: InstanceView,
    *,
    kind: AdmissionKind = AdmissionKind.EARLY,
    objectives: Objectives = OBJECTIVES,
    prompt_tokens: int = 100,
    measure: LoadMeasure = LoadMeasure.WITH_REQUEST,
) -> DecodeGate | None:
    admission = Admission(kind=kind, measure=measure)
    return gate_for(instance, CLUSTER, COST, objectives, admission, prompt_tokens=prompt_tokens, block_tokens=16)


@pytest.mark.parametrize("kind", list(AdmissionKind))
def test_a_gate_tells_the_corrected_step_time_of_its_instance(kind: AdmissionKind) -> None:
    gate = gate_of(INSTANCE, kind=kind)
    assert gate is not None
    neutral = gate_of(INSTANCE, kind=kind, measure=LoadMeasure.SIZE_NEUTRAL)
    assert neutral is not None
    assert neutral.kind is (GateKind.HOLD if kind is AdmissionKind.HOLD else GateKind.CHECK_SIZE_NEUTRAL)
    assert gate.kind is (GateKind.HOLD if kind is AdmissionKind.HOLD else GateKind.CHECK)
    assert (gate.tbt_s, gate.room_tokens, gate.decode_s) == (0.1, 1600, 7.0)
    assert LinearStep.of(gate).decode_step_s(3, 1000) == pytest.approx(2 * COST.decode_step_s(3, 1000))


def test_without_an_objective_for_steps_there_is_no_gate() -> None:
    assert gate_of(INSTANCE, objectives=Objectives(ttft_s=5.0)) is None


@pytest.mark.parametrize(
    ("changed", "prompt_tokens", "is_asked"),
    [
        ({}, 700, False),
        ({}, 900, True),  # over half of the blocks
        ({"waiting_tokens": 700}, 200, True),
        ({"running_jobs": 7, "running_tokens": 100}, 100, False),  # a step of 28 ms, where 50 are half of the objective
        ({"running_jobs": 7, "running_tokens": 100, "factor": 2.0}, 100, True),
        ({"running_jobs": 4, "waiting_jobs": 4, "max_batch": 16}, 100, True),  # more than half of the batch
        ({"max_batch": 0}, 100, True),  # not known
    ],
)
def test_a_half_loaded_instance_is_asked_and_an_idle_one_is_not(
    changed: dict[str, Any], prompt_tokens: int, is_asked: bool
) -> None:
    """Load counts what waits there already and how much slower than the model the instance is."""
    instance = replace(INSTANCE, **{"factor": 1.0, "max_batch": 64, **changed})
    assert (gate_of(instance, prompt_tokens=prompt_tokens) is not None) is is_asked
