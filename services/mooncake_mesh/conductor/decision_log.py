"""The last decisions, kept as what they were made from and put into words only when somebody asks. Pure.

A placement pays for one small object. Everything a decision saw is immutable, so it can be computed again: each
candidate's estimate is what the placement policy says when it has that instance alone to choose from.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.config_scheduling import PlacementKind
from mooncake_mesh.policy.cost_model import CostModel, instance_step_s
from mooncake_mesh.policy.decisions import Placed, Refused
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.prefill_choice import PREFILL_POLICIES, Estimates
from mooncake_mesh.policy.queue_order import seen_by
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.decisions import Decision, DecisionsQuery, DecisionsReport, DecodeCandidate, PrefillCandidate
from mooncake_proto.ids import Incarnation, InstanceId, JobId
from mooncake_proto.serving import Schedule

MAX_DECISIONS: Final = 100
MAX_CANDIDATES: Final = 6
"""Of each pool, in a report."""

_NOBODY: Final = ClusterView(prefill=(), decode=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """``shape`` is None where no instance served the model: there was nothing to choose from."""

    number: int
    at_s: float
    job_id: JobId
    model: str
    tenant: str
    priority: int
    prompt_tokens: int
    refused_by: tuple[InstanceId, ...]
    shape: RequestShape | None
    view: ClusterView
    cost: CostModel
    result: Placed | Refused


class DecisionLog:
    """Mutated only by :meth:`note`; holds ``MAX_DECISIONS``, without the requests' keys."""

    def __init__(self, scheduling: Scheduling, objectives: Objectives) -> None:
        self._scheduling = scheduling
        self._objectives = objectives
        self._noted: deque[_Noted] = deque(maxlen=MAX_DECISIONS)
        self._total = 0

    def note(
        self,
        request: Schedule,
        result: Placed | Refused,
        cost: CostModel,
        now_s: float,
        shape: RequestShape | None = None,
        view: ClusterView = _NOBODY,
    ) -> None:
        """Remember what became of *request* and what that was decided from."""
        self._total += 1
        noted = _Noted(
            number=self._total,
            at_s=now_s,
            job_id=request.job_id,
            model=request.model,
            tenant=request.tenant,
            priority=request.priority,
            prompt_tokens=request.prompt_tokens,
            refused_by=request.refused_by,
            shape=shape,
            view=view,
            cost=cost,
            result=result,
        )
        self._noted.append(noted)

    def report(self, query: DecisionsQuery, conductor: Incarnation, now_s: float) -> DecisionsReport:
        """What the asker does not know yet, in words."""
        after = query.after if query.after <= self._total else 0
        wanted = [noted for noted in self._noted if noted.number > after]
        return DecisionsReport(conductor=conductor, decisions=tuple(self._decision(noted, now_s) for noted in wanted))

    def _decision(self, noted: _Noted, now_s: float) -> Decision:
        result, shape = noted.result, noted.shape
        placed = result if isinstance(result, Placed) else None
        prefill = self._prefill(noted)
        decode = _decode(noted)
        block_tokens = shape.block_tokens if shape is not None else 0
        return Decision(
            number=noted.number,
            age_s=max(0.0, now_s - noted.at_s),
            job_id=noted.job_id,
            model=noted.model,
            tenant=noted.tenant,
            priority=noted.priority,
            prompt_tokens=noted.prompt_tokens,
            prefill=placed.prefill if placed else "",
            decode=placed.decode if placed else "",
            reason=result.reason if isinstance(result, Refused) else "",
            why=self._placed_why(placed, noted, prefill) if placed else self._refused_why(result, prefill, decode),
            cached_tokens=_cached_blocks(placed) * block_tokens,
            copy_from=placed.fetch_node if placed else None,
            read_tokens=placed.read_blocks * block_tokens if placed else 0,
            ttft_est_s=placed.ttft_est_s if placed else 0.0,
            tbt_est_s=placed.tbt_est_s if placed else 0.0,
            n_prefill=len(prefill),
            n_decode=len(decode),
            prefill_candidates=tuple(prefill[:MAX_CANDIDATES]),
            decode_candidates=tuple(decode[:MAX_CANDIDATES]),
        )

    def _prefill(self, noted: _Noted) -> list[PrefillCandidate]:
        """The chosen one first, then by expected time to the first token."""
        if noted.shape is None:
            return []
        shape, view = noted.shape, seen_by(noted.priority, noted.view)
        estimates = Estimates(shape, view, noted.cost)
        chosen = noted.result.prefill if isinstance(noted.result, Placed) else ""
        candidates = [self._candidate(instance, shape, view, estimates) for instance in view.prefill]
        return sorted(candidates, key=lambda one: (one.instance_id != chosen, one.ttft_s, one.instance_id))

    def _candidate(
        self, instance: InstanceView, shape: RequestShape, view: ClusterView, estimates: Estimates
    ) -> PrefillCandidate:
        choose = PREFILL_POLICIES[self._scheduling.placement]
        way = choose(shape, (instance,), view, estimates, self._scheduling.threshold)
        return PrefillCandidate(
            instance_id=instance.instance_id,
            node_id=instance.node_id,
            queue_s=estimates.queue_s(instance, max(way.local_blocks, way.fetch_blocks)) - way.delay_s,
            ttft_s=way.ttft_s,
            prefix_blocks=max(way.local_blocks, way.fetch_blocks),
            copy_from=way.fetch_node,
            has_room=_has_room(instance, shape),
        )

    def _placed_why(self, placed: Placed, noted: _Noted, prefill: Sequence[PrefillCandidate]) -> str:
        assert noted.shape is not None, "only what has a shape is placed"
        others = [one for one in prefill if one.instance_id != placed.prefill]
        match self._scheduling.placement:
            case _ if not others:
                chosen = "the only prefill instance"
            case PlacementKind.RANDOM:
                chosen = f"drawn at random of {len(prefill)}"
            case PlacementKind.LOAD_BALANCE:
                chosen = f"fewest accepted prompts of {len(prefill)}"
            case _:
                chosen = _against(placed, min(others, key=lambda one: (one.ttft_s, one.instance_id)))
        tokens = _cached_blocks(placed) * noted.shape.block_tokens
        if not tokens:
            return f"{chosen}; nothing of the prompt is cached for it"
        origin = "are on its node" if placed.fetch_node is None else f"come from {placed.fetch_node}"
        return f"{chosen}; {tokens} of {noted.prompt_tokens} tokens {origin}"

    def _refused_why(
        self,
        result: Placed | Refused,
        prefill: Sequence[PrefillCandidate],
        decode: Sequence[DecodeCandidate],
    ) -> str:
        assert isinstance(result, Refused)
        objectives = self._objectives
        match result.reason:
            case "ttft_objective" if prefill and objectives.ttft_s is not None:
                soonest = f"soonest first token in {prefill[0].ttft_s:.2f} s on {prefill[0].instance_id}"
                return f"{soonest}, the objective is {objectives.ttft_s:g} s"
            case "tbt_objective" if decode and objectives.tbt_s is not None and decode[0].step_s > objectives.tbt_s:
                quickest = f"shortest decode step {1000 * decode[0].step_s:.0f} ms on {decode[0].instance_id}"
                return f"{quickest}, the objective is {1000 * objectives.tbt_s:g} ms"
            case reason:
                return _REFUSALS.get(reason, reason.replace("_", " "))


def _decode(noted: _Noted) -> list[DecodeCandidate]:
    """The chosen one first, then by expected step."""
    shape = noted.shape
    if shape is None:
        return []
    chosen = noted.result.decode if isinstance(noted.result, Placed) else ""
    candidates = [
        DecodeCandidate(
            instance_id=instance.instance_id,
            node_id=instance.node_id,
            step_s=instance_step_s(instance, noted.cost, shape.prompt_tokens),
            running_jobs=instance.running_jobs,
            waiting_jobs=instance.waiting_jobs,
            has_room=_has_room(instance, shape),
        )
        for instance in noted.view.decode
        if instance.instance_id not in noted.refused_by
    ]
    return sorted(candidates, key=lambda one: (one.instance_id != chosen, one.step_s, one.instance_id))


def _against(placed: Placed, other: PrefillCandidate) -> str:
    gain_s = other.ttft_s - placed.ttft_est_s
    times = f"{_time(placed.ttft_est_s)} against {_time(other.ttft_s)}"
    if gain_s > 0:
        return f"first token sooner than on {other.instance_id} ({times})"
    if not other.has_room:
        return f"{other.instance_id} has no room ({times})"
    return f"as soon as on {other.instance_id}, drawn ({times})"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _cached_blocks(placed: Placed | None) -> int:
    return max(placed.local_prefix_blocks, placed.fetch_prefix_blocks) if placed else 0


def _has_room(instance: InstanceView, shape: RequestShape) -> bool:
    return instance.blocks_available >= shape.blocks_for(shape.prompt_tokens)


_REFUSALS: Final = {
    "no_worker": "no instance serves this model",
    "no_prefill_instance": "no prefill instance takes work",
    "no_decode_instance": "no decode instance takes work",
    "prefill_not_ready": "prefill instances are there, and none takes work yet",
    "decode_not_ready": "decode instances are there, and none takes work yet",
    "prefill_pool_too_small": "the prompt has more blocks than any prefill node",
    "decode_pool_too_small": "the prompt and its answer have more blocks than any decode node",
    "prefill_pool_full": "no prefill node has the blocks free now",
    "decode_pool_full": "no decode node has the blocks free now",
    "tbt_objective": "no decode instance has time in its steps, or room, for it now",
    "tbt_objective_predicted": "decoding is expected to miss its objective by the time of the first token",
    "kv_in_progress": "as much KV is in progress as can be decoded in time",
    "batch_waits_for_idle_prefill": "batch work waits until a prefill queue is empty",
    "batch_waits_for_idle_decode": "batch work waits until decoding is well below its limit",
}
