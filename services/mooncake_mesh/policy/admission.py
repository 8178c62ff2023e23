"""Whether a request that has been placed is let in: the four strategies against overload.

All of them refuse what is not expected to get its first token within the objective. They differ in when and how they
look at decoding:

``baseline``    not at arrival: the decode instance finds out when the KV is there, and what was computed by then is
                lost. (It looks again under all of them: :mod:`~mooncake_mesh.policy.decode_gate`.)
``early``       at arrival, at the load as it is now. Load that is still being computed is overlooked, so prefill and
                decode take turns at being full.
``predictive``  at arrival, at the mean load expected for the moment of the first token, if every request is decoded
                equally long.
``hold``        at arrival, at all KV in progress in the cluster against what can be decoded at a time. Some more may be
                in progress than fits, for it takes time to be computed: the more the longer that takes.

Times of a refusal come from the same forecasts.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from mooncake_mesh.config_scheduling import AdmissionKind, LoadMeasure
from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.decisions import Placed, Refused, contended
from mooncake_mesh.policy.forecast import (
    BatchForecast,
    decoding_at,
    decoding_now,
    freed_after_s,
    kv_capacity_tokens,
    kv_in_progress_tokens,
)
from mooncake_mesh.policy.request_class import is_batch
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.ids import InstanceId

TBT_SHARE: Final = 0.97
"""Part of the TBT objective that planned steps may take."""

BATCH_LOAD: Final = 0.7
"""Load of a decode instance up to which it takes batch work: the rest is for those who have objectives."""

_WIP_BASE: Final = 1.1
_WIP_PER_TTFT: Final = 1.5
"""KV in progress over capacity: how much is let in when computing takes no time, and how much more by the ratio of
TTFT to decode time. Tuned by simulation on the papers' traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """``decode_s``: how long requests are taken to be decoded, None for what was observed, ``assumed_decode_s`` until
    something was. ``wip_limit``: for ``hold``, KV in progress over capacity; None adapts it to the observed times."""

    kind: AdmissionKind = AdmissionKind.EARLY
    decode_s: float | None = None
    assumed_decode_s: float = 30.0
    wip_limit: float | None = None
    measure: LoadMeasure = LoadMeasure.WITH_REQUEST

    def decode_time_s(self, cluster: ClusterView) -> float:
        return self.decode_s or cluster.decode_s or self.assumed_decode_s


def admission_refusal(
    request: RequestShape,
    placed: Placed,
    cluster: ClusterView,
    cost: CostModel,
    objectives: Objectives,
    admission: Admission,
) -> Refused | None:
    """Why *request*, which would run as *placed*, is not let in; None when it is."""
    if is_batch(request.priority):
        return _batch_refusal(request, placed, cluster, cost, objectives)
    if objectives.ttft_s is not None and placed.ttft_est_s > objectives.ttft_s:
        return contended("ttft_objective", after_s=placed.ttft_est_s - objectives.ttft_s)
    decode_s = admission.decode_time_s(cluster)
    match admission.kind:
        case AdmissionKind.BASELINE:
            return None
        case AdmissionKind.EARLY:
            if admission.measure is LoadMeasure.SIZE_NEUTRAL:
                load = _mean_load(map(decoding_now, cluster.decode), request, cost, objectives)
                return _overloaded("tbt_objective", load, decode_s)
            return early_refusal(request, cluster, cost, objectives, decode_s)
        case AdmissionKind.PREDICTIVE:
            load = _predicted_load(request, placed.ttft_est_s, cluster, cost, objectives, admission)
            return _overloaded("tbt_objective_predicted", load, decode_s)
        case AdmissionKind.HOLD:
            return _hold_refusal(request, cluster, admission, decode_s)


def _batch_refusal(
    request: RequestShape, placed: Placed, cluster: ClusterView, cost: CostModel, objectives: Objectives
) -> Refused | None:
    """Batch work fills what is idle: its prompt waits for nobody, and decoding stays well below its limits."""
    prefill = next(instance for instance in cluster.prefill if instance.instance_id == placed.prefill)
    queue_s = prefill.busy_until_s - cluster.now_s
    if prefill.queue and queue_s > 0:
        return contended("batch_waits_for_idle_prefill", after_s=queue_s)
    decode = next(instance for instance in cluster.decode if instance.instance_id == placed.decode)
    load = (
        decoding_now(decode)
        .with_added(1 + decode.waiting_jobs, request.prompt_tokens + decode.waiting_tokens)
        .load(cost, block_tokens=request.block_tokens, tbt_s=objectives.tbt_s)
    )
    return contended("batch_waits_for_idle_decode") if decode.running_jobs and load > BATCH_LOAD else None


def early_refusal(
    request: RequestShape, cluster: ClusterView, cost: CostModel, objectives: Objectives, decode_s: float
) -> Refused | None:
    """Refused when no decode instance could take *request* as loaded as each is now; until the first one can."""
    refusals = []
    for instance in cluster.decode:
        refused = decode_refusal(request, instance, cost, objectives, decode_s)
        if refused is None:
            return None
        refusals.append(refused)
    return min(refusals, key=lambda refused: refused.retry_after_s)


def decode_refusal(
    request: RequestShape, instance: InstanceView, cost: CostModel, objectives: Objectives, decode_s: float
) -> Refused | None:
    """Is there room for *request* on *instance* now, and time in a step?"""
    load = (
        decoding_now(instance)
        .with_added(1, request.prompt_tokens)
        .load(cost, block_tokens=request.block_tokens, tbt_s=objectives.tbt_s)
    )
    return _overloaded("tbt_objective", load, decode_s)


def elsewhere(
    request: RequestShape,
    cluster: ClusterView,
    refused_by: Collection[InstanceId],
    cost: CostModel,
    objectives: Objectives,
    decode_s: float,
) -> ClusterView | Refused:
    """*cluster* for a request that some decode instances had no place for when its KV was there: of the others, only
    those that could take it now with all that is on its way to them, as another refusal would cost another prefill."""
    able = [
        instance
        for instance in cluster.decode
        if instance.instance_id not in refused_by
        and decode_refusal(request, _with_waiting(instance), cost, objectives, decode_s) is None
    ]
    return replace(cluster, decode=able) if able else contended("tbt_objective")


def wip_limit(cluster: ClusterView, admission: Admission) -> float:
    """KV in progress over capacity that ``hold`` allows."""
    if admission.wip_limit is not None:
        return admission.wip_limit
    return _WIP_BASE + _WIP_PER_TTFT * cluster.ttft_s / admission.decode_time_s(cluster)


def _predicted_load(
    request: RequestShape,
    after_s: float,
    cluster: ClusterView,
    cost: CostModel,
    objectives: Objectives,
    admission: Admission,
) -> float:
    batches = decoding_at(cluster, after_s, admission.decode_time_s(cluster))
    if admission.measure is LoadMeasure.WITH_REQUEST:
        share = 1.0 / len(batches)
        batches = [batch.with_added(share, request.prompt_tokens * share) for batch in batches]
    return _mean_load(batches, request, cost, objectives)


def _mean_load(
    batches: Iterable[BatchForecast], request: RequestShape, cost: CostModel, objectives: Objectives
) -> float:
    loads = [batch.load(cost, block_tokens=request.block_tokens, tbt_s=objectives.tbt_s) for batch in batches]
    return sum(loads) / len(loads)


def _hold_refusal(request: RequestShape, cluster: ClusterView, admission: Admission, decode_s: float) -> Refused | None:
    """A request that is alone may be larger than the limit: it would never be let in otherwise."""
    in_progress = kv_in_progress_tokens(cluster)
    allowed = wip_limit(cluster, admission) * kv_capacity_tokens(cluster.decode, request.block_tokens)
    excess = in_progress + request.prompt_tokens - allowed
    if excess <= 0 or in_progress == 0:
        return None
    return contended("kv_in_progress", after_s=freed_after_s(excess, in_progress, decode_s))


def _overloaded(reason: str, load: float, decode_s: float) -> Refused | None:
    return None if load <= 1.0 else contended(reason, after_s=freed_after_s(load - 1.0, load, decode_s))


def _with_waiting(instance: InstanceView) -> InstanceView:
    """As if all that waits there were decoded already."""
    return replace(
        instance,
        running_jobs=instance.running_jobs + instance.waiting_jobs,
        running_tokens=instance.running_tokens + instance.waiting_tokens,
    )
