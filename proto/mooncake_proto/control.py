"""Membership, health and errors: every process ↔ conductor, and the answers that any socket gives.

A process registers, then beats. The acknowledgement of a beat says whether the conductor still knows the incarnation;
if not (the conductor restarted), the process registers again. The conductor publishes ClusterState on its PUB socket,
on every change and once a second, so that everybody learns of deaths and restarts.
"""

import enum
from dataclasses import dataclass, field

from mooncake_proto.codec import message
from mooncake_proto.ids import Incarnation, InstanceId, MessageId, NodeId
from mooncake_proto.shapes import Natural


class Role(enum.Enum):
    """Kinds of process."""

    GATEWAY = "gateway"
    CONDUCTOR = "conductor"
    PREFILL = "prefill"
    DECODE = "decode"
    MESSENGER = "messenger"
    STAGE = "stage"


class WorkerRole(enum.Enum):
    """What an instance that can switch serves as, by turns."""

    PREFILL = "prefill"
    DECODE = "decode"


class Health(enum.Enum):
    """State of a member's lease: see mesh/peers.py."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What two instances must agree on before KV may travel between them."""

    name: str
    fingerprint: str
    dtype: str
    block_tokens: Natural
    block_bytes: Natural
    max_context_tokens: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the mesh. ``endpoint`` is its ROUTER; ``model`` is absent on gateways and messengers. ``kind``, of
    a worker, names the machines that are equally fast: those of one kind share a cost profile. It ``can_switch`` if it
    takes SwitchRole."""

    role: Role
    instance_id: InstanceId
    node_id: NodeId
    incarnation: Incarnation
    endpoint: str
    model: ModelCard | None = None
    kind: str = "default"
    can_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What an instance reports with each beat; fields that do not apply to a role stay 0.

    Messenger: ``tenants`` are the blocks in use of the tenants that have most. ``ssd_blocks`` of ``ssd_slots`` are held
    on SSD, which is read at ``ssd_bytes_per_s`` of late (0: not known); ``ssd_faults`` counts what it lost or refused.
    ``pages`` says what its arena is made of: hugetlb, transparent or small.

    Prefill: queued are the jobs that wait, running those that are fetched for, computed or sent; ``queued_tokens`` are
    all that is still to be computed. ``queued_prompts`` are the (uncached, cached) tokens of every job not computed
    yet, oldest first; the first has been computed for ``prefill_elapsed_s``. ``queued_priorities`` are theirs, where
    any has one.
    ``queued_waits_s`` is how long each of the last ones, which others may still overtake, has waited since its request
    came; None where nobody overtakes.
    ``recent_prefills`` are the (uncached, cached, seconds) of the last few of ``prefills`` computed ones, newest last.
    Decode: queued are the jobs whose KV is still to come, with their tokens; ``sequences`` are the (tokens, decoded
    tokens) of every running one; ``decoded_tokens`` is what a finished one had decoded here, on average of late.
    ``recent_steps`` are the (sequences, tokens of KV, seconds) of the last few of ``steps``, newest last; ``step_s`` is
    their moving average, ``max_batch`` how many sequences a step takes, and ``blocks_total`` how many blocks it can
    decode at a time, 0: all of its node's. ``queued_prompts`` are those it computes itself. ``preemptions`` times a
    sequence has made room for another one so far, and ``swapped_jobs`` wait for room to come back.
    Messenger: ``recent_copies`` are the (bytes, seconds) of the last few of ``copies`` prefixes that it had from other
    nodes, newest last.
    """

    queued_jobs: Natural = 0
    queued_tokens: Natural = 0
    running_jobs: Natural = 0
    running_tokens: Natural = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    blocks_total: Natural = 0
    blocks_free: Natural = 0
    blocks_cached: Natural = 0
    blocks_evictable: Natural = 0
    ssd_blocks: Natural = 0
    ssd_slots: Natural = 0
    ssd_faults: Natural = 0
    ssd_bytes_per_s: float = 0.0
    tenants: dict[str, Natural] = field(default_factory=dict)
    transferred_bytes: Natural = 0
    transports: str = ""
    pages: str = ""
    draining: bool = False
    queued_prompts: tuple[tuple[Natural, Natural], ...] = ()
    queued_priorities: tuple[int, ...] = ()
    queued_waits_s: tuple[float, ...] | None = None
    prefill_elapsed_s: float = 0.0
    prefills: Natural = 0
    recent_prefills: tuple[tuple[Natural, Natural, float], ...] = ()
    sequences: tuple[tuple[Natural, Natural], ...] = ()
    decoded_tokens: float = 0.0
    steps: Natural = 0
    max_batch: Natural = 0
    recent_steps: tuple[tuple[Natural, Natural, float], ...] = ()
    preemptions: Natural = 0
    swapped_jobs: Natural = 0
    copies: Natural = 0
    recent_copies: tuple[tuple[Natural, float], ...] = ()


@message("control.register")
@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Process → conductor. Answered by Registered, or by Failure when the member does not fit the mesh.

    ``load`` is as in a Heartbeat: whoever is not ready yet says so before anything is placed on it.
    """

    member: Member
    load: Load


@message("control.registered")
@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """``epoch`` is that of the conductor's term: see LeaderReport."""

    conductor: Incarnation
    heartbeat_s: float
    publish_endpoint: str
    epoch: Natural = 0


@message("control.heartbeat")
@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Process → conductor. Answered by HeartbeatAck."""

    instance_id: InstanceId
    incarnation: Incarnation
    load: Load


@message("control.heartbeat_ack")
@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAck:
    """``known`` is false when the conductor does not hold this incarnation: register again."""

    conductor: Incarnation
    known: bool


@message("control.goodbye")
@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Process → conductor, one-way: an orderly stop."""

    instance_id: InstanceId
    incarnation: Incarnation


@message("control.switch_role")
@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRole:
    """One-way, conductor → worker: take nothing new, finish what you have, then register in ``role``, with another
    incarnation. An order to another incarnation means nothing, nor does one of another ``epoch`` than that of the
    conductor the worker follows: who has lost its lead may not know yet.

    Why: ``prefill_demand`` and ``decode_demand``, in instances, are asked of ``prefill`` and ``decode`` of them.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    role: WorkerRole
    prefill_demand: float
    decode_demand: float
    prefill: Natural
    decode: Natural
    epoch: Natural = 0


@message("control.drain")
@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Operator → worker: take nothing new and finish what you have. Answered Ok at once; a second one changes nothing.

    The worker stays a member, and its node goes on serving the KV it holds. Another incarnation than ``incarnation``
    refuses.
    """

    incarnation: Incarnation


@message("control.stop")
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Operator → worker or messenger: end in an orderly way, as after SIGTERM. Answered Ok before.

    Another incarnation than ``incarnation`` refuses.
    """

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """``takes_work``: the conductor would place a request on this worker now."""

    member: Member
    health: Health
    load: Load
    takes_work: bool
    last_beat_s: float


@message("control.cluster_state")
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """Conductor → everybody, on its PUB socket. ``revision`` grows with every change of membership."""

    conductor: Incarnation
    revision: Natural
    members: tuple[MemberState, ...]


@message("control.status_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatusQuery:
    """Anybody → conductor. Answered by StatusReport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateQuality:
    """How well the conductor's cost model predicts an instance, or ``copies`` between nodes, from ``samples`` times.

    ``factor`` is observed over modelled time, which corrects the model from then on; ``error`` is the mean relative
    error of the corrected predictions of late.
    """

    instance_id: InstanceId
    factor: float
    error: float
    samples: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Quantiles of the last requests that have it, 0 without any, and the objective; None: it differs by request."""

    p50_s: float
    p90_s: float
    p99_s: float
    objective_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """How one class of requests has fared since the conductor started; see policy/slo.py.

    ``good`` ones were answered whole within both objectives; ``good_per_s`` counts those of the last minute.
    ``tokens`` are those of prompts and answers. ``wasted_tokens`` were computed at prefill for requests that were not
    good. ``refusals`` counts by reason.
    """

    name: str
    requests: Natural
    finished: Natural
    refused: Natural
    failed: Natural
    cancelled: Natural
    good: Natural
    good_per_s: float
    tokens: Natural
    good_tokens: Natural
    wasted_tokens: Natural
    ttft: Latency
    tbt: Latency
    refusals: dict[str, Natural]


@message("control.status_report")
@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """``healthy``: a gateway, and at least one prefill and one decode instance with an alive messenger on its node."""

    cluster: ClusterState
    healthy: bool
    reasons: tuple[str, ...]
    indexed_blocks: dict[str, Natural]
    placed_total: Natural
    rejected_total: Natural
    uptime_s: float
    estimates: tuple[EstimateQuality, ...] = ()
    classes: tuple[ClassReport, ...] = ()


@message("control.leader_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderQuery:
    """Anybody → any conductor. Answered by LeaderReport."""


@message("control.leader_report")
@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderReport:
    """What a conductor of a mesh with several knows of who leads.

    ``leads``: this one does, in the term ``epoch``, which grows with each change; 0 of one that is the only one by its
    configuration. ``leader`` is, for people, who else does, and ``trouble`` why it cannot know; "" otherwise.
    """

    instance_id: InstanceId
    leads: bool
    epoch: Natural
    leader: str
    trouble: str


@message("control.ping")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Anybody → any ROUTER. Answered by Pong."""


@message("control.pong")
@dataclass(frozen=True, slots=True, kw_only=True)
class Pong:
    role: Role
    instance_id: InstanceId
    incarnation: Incarnation


@message("control.failure")
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error reply of every call. ``path`` names the bad field where there is one.

    ``unavailable``, of a refusal: nobody could serve the request, as opposed to those who could being busy.
    """

    code: str
    message: str
    retryable: bool = False
    path: str = ""
    retry_after_s: float | None = None
    unavailable: bool = False


@message("control.ok")
@dataclass(frozen=True, slots=True, kw_only=True)
class Ok:
    """The empty answer of a call that has nothing to say."""


@message("control.cancel_call")
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelCall:
    """One-way: the caller no longer waits for the reply to its message ``target``."""

    target: MessageId
