"""What a conductor decided of late and why: whoever wants to show it ↔ conductor."""

from dataclasses import dataclass

from mooncake_proto.codec import message
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.shapes import Natural, Positive


@message("decisions.query")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsQuery:
    """Anybody → conductor. Answered by DecisionsReport with what was decided after number ``after``; with everything
    that is still known where there is no such number (the conductor restarted)."""

    after: Natural = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCandidate:
    """The best way there was over one prefill instance.

    ``queue_s`` is the time until it had computed what it had accepted, ``ttft_s`` the expected time to the first token.
    The first ``prefix_blocks`` of the prompt would not be computed; they would be copied from ``copy_from``, or where
    that is None are on the instance's own node. ``has_room``: the blocks were there at that moment.
    """

    instance_id: InstanceId
    node_id: NodeId
    queue_s: float
    ttft_s: float
    prefix_blocks: Natural
    copy_from: NodeId | None
    has_room: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCandidate:
    """One decode instance; ``step_s`` is how long its steps were expected to take with the request."""

    instance_id: InstanceId
    node_id: NodeId
    step_s: float
    running_jobs: Natural
    waiting_jobs: Natural
    has_room: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One request, placed on ``prefill`` and ``decode``, or refused for ``reason`` with both of them empty.

    ``number`` counts decisions from 1. ``why`` says in words what tipped it. Candidates are the best few of
    ``n_prefill`` and ``n_decode`` instances, best first. Of the prompt ``cached_tokens`` need not be computed; the last
    ``read_tokens`` of them are on SSD.
    """

    number: Positive
    age_s: float
    job_id: JobId
    model: str
    tenant: str
    priority: int
    prompt_tokens: Positive
    prefill: str
    decode: str
    reason: str
    why: str
    cached_tokens: Natural
    copy_from: NodeId | None
    read_tokens: Natural
    ttft_est_s: float
    tbt_est_s: float
    n_prefill: Natural
    n_decode: Natural
    prefill_candidates: tuple[PrefillCandidate, ...]
    decode_candidates: tuple[DecodeCandidate, ...]


@message("decisions.report")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionsReport:
    """Conductor → who asked. Oldest first."""

    conductor: Incarnation
    decisions: tuple[Decision, ...]
