"""The four strategies against overload, as tables of what decodes, what is computed and what comes."""

from dataclasses import replace
from typing import Any

import pytest

from mooncake_mesh.config_scheduling import AdmissionKind, LoadMeasure
from mooncake_mesh.policy.admission import Admission, admission_refusal, decode_refusal, elsewhere, wip_limit
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.decisions import Placed, Refused
from mooncake_mesh.policy.forecast import decoding_at, kv_capacity_tokens, kv_in_progress_tokens, kv_limit_tokens
from mooncake_mesh.policy.request_class import BATCH_PRIORITY
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, QueuedPrompt, RequestShape
from mooncake_proto.ids import InstanceId, NodeId

COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.001,
    cached_token_s=0.0,
    step_base_s=0.0,
    step_sequence_s=0.0,
    step_context_token_s=1e-5,  # a step of 0.1 s at 10,000 tokens
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e9,
)
ROOM = 100  # tokens per decode instance: 10 blocks of 10
LOOSE = Objectives(ttft_s=5.0, tbt_s=0.1)
REQUEST = RequestShape(prompt_tokens=20, max_new_tokens=10, block_tokens=10, block_bytes=1, prefix_blocks={})
PLACED = Placed(
    prefill=InstanceId("p0"),
    decode=InstanceId("d0"),
    local_prefix_blocks=0,
    fetch_node=None,
    fetch_prefix_blocks=0,
    ttft_est_s=2.0,
    tbt_est_s=0.01,
)


def decode(name: str, *sequences: tuple[int, int], waiting: int = 0, node: str = "", **fields: float) -> InstanceView:
    """*sequences*: (tokens, decoded tokens), at a second for each step."""
    base = {"blocks_total": ROOM // 10, "blocks_available": ROOM // 10, "step_s": 1.0}
    return InstanceView(
        instance_id=InstanceId(name),
        node_id=NodeId(node or f"n-{name}"),
        running_jobs=len(sequences),
        running_tokens=sum(tokens for tokens, _ in sequences),
        waiting_jobs=1 if waiting else 0,
        waiting_tokens=waiting,
        sequences=sequences,
        **(base | fields),  # type: ignore[arg-type]
    )


def prefill(*prompts: tuple[int, float]) -> InstanceView:
    """*prompts*: (tokens, seconds)."""
    queue = tuple(QueuedPrompt(tokens=tokens, prefill_s=prefill_s) for tokens, prefill_s in prompts)
    return InstanceView(
        instance_id=InstanceId("p0"),
        node_id=NodeId("n-p0"),
        blocks_total=1_000,
        blocks_available=1_000,
        busy_until_s=sum(prompt.prefill_s for prompt in queue),
        queue=queue,
    )


def cluster(*pool: InstanceView, queue: tuple[tuple[int, float], ...] = ()) -> ClusterView:
    return ClusterView(prefill=(prefill(*queue),), decode=pool)


def refusal(kind: AdmissionKind, view: ClusterView, *, placed: Placed = PLACED, **settings: Any) -> Refused | None:
    return admission_refusal(REQUEST, placed, view, COST, LOOSE, Admission(kind=kind, **settings))


@pytest.mark.parametrize("kind", list(AdmissionKind))
def test_every_strategy_keeps_to_the_ttft_objective_and_says_when_it_will_be_met(kind: AdmissionKind) -> None:
    late = replace(PLACED, ttft_est_s=12.5)
    assert refusal(kind, cluster(decode("d0")), placed=late) == Refused(
        reason="ttft_objective", unavailable=False, retry_after_s=7.5
    )
    assert refusal(kind, cluster(decode("d0"))) is None


FULL = decode("d0", (90, 1))


@pytest.mark.parametrize("kind", [AdmissionKind.EARLY, AdmissionKind.PREDICTIVE])
@pytest.mark.parametrize(
    ("pool", "is_refused"), [((90,), False), ((101,), True), ((90, 105), False), ((97, 105), True)]
)
def test_a_size_neutral_load_is_the_mean_without_the_request(
    kind: AdmissionKind, pool: tuple[int, ...], is_refused: bool
) -> None:
    view = cluster(*(decode(f"d{i}", (tokens, 1)) for i, tokens in enumerate(pool)))
    neutral = Admission(kind=kind, measure=LoadMeasure.SIZE_NEUTRAL)
    assert (admission_refusal(REQUEST, PLACED, view, COST, LOOSE, neutral) is not None) is is_refused


@pytest.mark.parametrize(
    ("view", "refused"),
    [
        (cluster(FULL), {"early": "tbt_objective", "predictive": "tbt_objective_predicted"}),
        # the other instance has room
        (cluster(FULL, decode("d1")), {}),
        # the sequence that fills it will be over when the prompt is computed; nothing else knows that
        (cluster(decode("d0", (90, 29))), {"early": "tbt_objective"}),
        # what is computed now will fill it by then: only a forecast sees that
        (cluster(decode("d0", waiting=90), queue=((90, 1.0),)), {"predictive": "tbt_objective_predicted"}),
        # but not what will be computed later than this request
        (cluster(decode("d0", waiting=90), queue=((90, 3.0),)), {}),
        # all that is in progress is too much: 95 + 20 > 1.1 × 100
        (
            cluster(decode("d0", (50, 1), waiting=45), queue=((45, 3.0),)),
            {"hold": "kv_in_progress"},
        ),
    ],
)
def test_what_each_strategy_sees(view: ClusterView, refused: dict[str, str]) -> None:
    got = {
        kind.value: outcome.reason
        for kind in AdmissionKind
        if (outcome := refusal(kind, view, decode_s=30.0, wip_limit=1.1)) is not None
    }
    assert got == refused


def test_baseline_looks_at_decoding_when_the_kv_is_there() -> None:
    assert decode_refusal(REQUEST, decode("d0", (80, 1)), COST, LOOSE, 30.0) is None
    refused = decode_refusal(REQUEST, decode("d0", (85, 1)), COST, LOOSE, 30.0)
    assert refused is not None
    assert (refused.reason, refused.unavailable) == ("tbt_objective", False)
    assert refused.retry_after_s == pytest.approx(30.0 * 0.05 / 1.05)


def test_a_step_that_would_get_too_long_is_load_as_well() -> None:
    roomy = decode("d0", (9_990, 1), blocks_total=10_000)
    assert decode_refusal(REQUEST, roomy, COST, LOOSE, 30.0) is not None
    assert decode_refusal(REQUEST, roomy, COST, Objectives(), 30.0) is None
    assert decode_refusal(REQUEST, replace(roomy, running_tokens=4_000, factor=3.0), COST, LOOSE, 30.0) is not None


def test_the_forecast_takes_the_old_away_and_spreads_the_new() -> None:
    view = cluster(decode("d0", (40, 9), (30, 2)), decode("d1"), queue=((12, 1.0), (6, 1.0), (50, 9.0)))
    batches = decoding_at(view, 3.0, 10.0)
    assert [(batch.jobs, batch.tokens) for batch in batches] == [(1 + 1, 30 + 9), (1, 9)]


def test_prompts_that_will_have_come_and_gone_are_not_counted() -> None:
    view = cluster(decode("d0"), queue=((12, 1.0),))
    assert [batch.tokens for batch in decoding_at(view, 4.0, 2.0)] == [0]


def test_kv_that_is_on_its_way_counts_as_there() -> None:
    view = cluster(decode("d0", waiting=70), queue=((50, 9.0),))
    assert [batch.tokens for batch in decoding_at(view, 1.0, 10.0)] == [20]


def test_kv_in_progress_counts_a_prompt_once_wherever_it_is_reported() -> None:
    assert kv_in_progress_tokens(cluster(decode("d0", (10, 1), waiting=30), queue=((30, 1.0),))) == 40
    assert kv_in_progress_tokens(cluster(decode("d0", (10, 1)), queue=((30, 1.0),))) == 40


def test_capacity_counts_the_blocks_of_a_node_once_and_stops_where_steps_get_too_long() -> None:
    both = (decode("d0", node="n"), decode("d1", node="n"))
    assert kv_capacity_tokens(both, 10) == ROOM
    assert kv_capacity_tokens((*both, decode("d2", kv_limit_tokens=30)), 10) == ROOM + 30
    assert kv_limit_tokens(COST, factor=1.0, tbt_s=0.1, room_tokens=5_000, tokens_per_job=100) == 5_000
    limit = kv_limit_tokens(COST, factor=2.0, tbt_s=0.1, room_tokens=50_000, tokens_per_job=100)
    assert 4_900 <= limit <= 5_000
    few = kv_limit_tokens(COST, factor=100.0, tbt_s=0.1, room_tokens=50_000_000, tokens_per_job=100)
    assert 98 <= few <= 100, "as exact where the blocks hold far more"


def test_hold_lets_more_in_the_longer_computing_takes() -> None:
    view = cluster(decode("d0"))
    assert wip_limit(view, Admission(kind=AdmissionKind.HOLD)) == pytest.approx(1.1)
    slow = replace(view, ttft_s=4.0, decode_s=20.0)
    assert wip_limit(slow, Admission(kind=AdmissionKind.HOLD)) == pytest.approx(1.1 + 1.5 * 0.2)
    assert wip_limit(slow, Admission(kind=AdmissionKind.HOLD, wip_limit=2.0)) == 2.0


def test_hold_says_when_enough_will_have_gone_and_lets_a_lone_request_in() -> None:
    refused = refusal(AdmissionKind.HOLD, cluster(decode("d0", (95, 1))), decode_s=50.0, wip_limit=1.1)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(50.0 * (95 + 20 - 110) / 95)
    small = decode("d0", blocks_total=1)
    assert refusal(AdmissionKind.HOLD, cluster(small), wip_limit=1.0) is None


@pytest.mark.parametrize("kind", list(AdmissionKind))
def test_batch_work_only_fills_what_is_idle(kind: AdmissionKind) -> None:
    def batch(view: ClusterView) -> str:
        request = replace(REQUEST, priority=BATCH_PRIORITY)
        refused = admission_refusal(request, replace(PLACED, ttft_est_s=99.0), view, COST, LOOSE, Admission(kind=kind))
        return "" if refused is None else refused.reason

    assert batch(cluster(decode("d0"))) == "", "no objective of its own"
    assert batch(cluster(decode("d0", (50, 1)))) == "", "50 and 20 of 100 tokens"
    assert batch(cluster(decode("d0", (51, 1)))) == "batch_waits_for_idle_decode"
    assert batch(cluster(decode("d0", (20, 1), waiting=31))) == "batch_waits_for_idle_decode"
    assert batch(cluster(decode("d0"), queue=((10, 1.0),))) == "batch_waits_for_idle_prefill"


def test_who_was_refused_at_decode_goes_where_there_is_room_with_all_that_is_on_its_way_there() -> None:
    pool = (decode("d0"), decode("d1", (40, 1), waiting=50), decode("d2", (40, 1), waiting=40))
    found = elsewhere(REQUEST, cluster(*pool), [InstanceId("d0")], COST, LOOSE, 30.0)
    assert isinstance(found, ClusterView)
    assert [instance.instance_id for instance in found.decode] == ["d2"]
    nobody = elsewhere(REQUEST, cluster(*pool[:2]), [InstanceId("d0")], COST, LOOSE, 30.0)
    assert isinstance(nobody, Refused)
    assert nobody.reason == "tbt_objective"
