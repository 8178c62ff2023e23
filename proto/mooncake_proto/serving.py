"""One request: gateway ↔ conductor ↔ workers.

::

    gateway → conductor   Schedule            answered by Placement or Rejected
    gateway → decode      DecodeJob           answered by Ok or Failure
    gateway → prefill     PrefillJob          answered by Ok or Failure
    prefill → gateway     FirstToken          one-way, on the gateway's stream ROUTER
    prefill → decode      PrefillDone         answered by Ok
    decode  → gateway     DecodeGranted       one-way, where the job has a gate: its first token may be shown
    decode  → gateway     TokenBatch          one-way, one per decode iteration and gateway
    either  → gateway     JobFailed           one-way; the job is over at the sender
    gateway → either      CancelJob           answered by Ok once nothing of the job is left there
    gateway → conductor   Outcomes            one-way, a few times a second: how requests ended

Where a placement has the decode instance compute the prompt, there is no PrefillJob, and FirstToken is that instance's.

Token ids travel as little-endian int32, block keys as concatenated 16-byte hashes.
"""

import enum
from dataclasses import dataclass

from mooncake_proto.codec import message
from mooncake_proto.grammar import Grammar
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.shapes import Natural, PackedKey, PackedKeys, PackedTokens, Positive


class FinishReason(enum.Enum):
    """Why a choice ended, in OpenAI's words. ``cancelled`` never reaches an HTTP client."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn from its logits.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and the three penalties' neutral values switch
    a rule off. ``top_logprobs`` None reports no logprobs, 0 only that of the drawn token. ``logit_bias`` adds to the
    logits of tokens; with a ``grammar`` only what it allows can be drawn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Natural = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    top_logprobs: Natural | None = None
    logit_bias: tuple[tuple[Natural, float], ...] = ()
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When generation ends. ``stop_token_ids`` holds the end-of-sequence ids too, unless the caller ignores them."""

    max_new_tokens: Natural
    min_new_tokens: Natural = 0
    stop_token_ids: tuple[Natural, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural-log probability of a drawn token, and the most likely ones beside it."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRef:
    """Where a placed job goes. A worker refuses a job that names another incarnation than its own."""

    instance_id: InstanceId
    incarnation: Incarnation
    endpoint: str
    node_id: NodeId
    messenger_endpoint: str


class GateKind(enum.Enum):
    """What a decode worker does with a computed prompt that it has no place for: see policy/decode_gate.py."""

    CHECK = "check"
    CHECK_SIZE_NEUTRAL = "check_size_neutral"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGate:
    """By what a decode worker lets the decoding of a computed prompt begin, as far as the conductor knows.

    ``tbt_s`` is the objective for a step. A step is expected to take ``step_base_s`` and two further times for each
    sequence and each token of KV. ``room_tokens`` of KV fit the worker's node; ``decode_s`` is how long requests are
    decoded of late.
    """

    kind: GateKind
    tbt_s: float
    step_base_s: float
    step_sequence_s: float
    step_token_s: float
    room_tokens: Positive
    decode_s: float

    def __post_init__(self) -> None:
        if not self.tbt_s > 0:
            raise ValueError(f"tbt_s must be positive, got {self.tbt_s}")
        if min(self.step_base_s, self.step_sequence_s, self.step_token_s, self.decode_s) < 0:
            raise ValueError("a gate's times must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedStep:
    """How long the chunks of a prompt may be that a decode worker computes with its steps, as far as the conductor
    knows: ``most_tokens``, and so that a step takes at most ``limit_s``.

    A step takes ``base_s``, and further times for each sequence, each token of their KV, each token of the chunk, each
    token of the prompt before it, and each pair of tokens: there are (p + n)² - p² for n tokens behind p.
    """

    limit_s: float
    most_tokens: Positive
    base_s: float
    sequence_s: float
    context_token_s: float
    token_s: float
    before_token_s: float
    pair_s: float

    def __post_init__(self) -> None:
        if not self.limit_s > 0:
            raise ValueError(f"limit_s must be positive, got {self.limit_s}")
        times = (self.base_s, self.sequence_s, self.context_token_s, self.token_s, self.before_token_s, self.pair_s)
        if not min(times) >= 0:
            raise ValueError("the times of a step must not be negative")


@message("serving.schedule")
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``avoid`` names instances that just failed this request; ``refused_by`` the decode instances that had no place
    for it when its KV was there: it is placed only where there is one now. Lower ``priority`` is more urgent;
    ``tenant`` is whose it is."""

    job_id: JobId
    model: str
    prompt_tokens: Positive
    max_new_tokens: Positive
    keys: PackedKeys
    avoid: tuple[InstanceId, ...] = ()
    refused_by: tuple[InstanceId, ...] = ()
    priority: int = 0
    tenant: str = ""


@message("serving.placement")
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``fetch_from`` is the messenger endpoint of the node to copy the prefix from, empty for the local arena only.

    ``read_limit_blocks``: no prefix block beyond that many is worth reading from the node's SSD; None for no limit.
    All block counts are hints: who acts on them finds out what is really there. With a ``gate`` the decode worker has
    the last word, and nobody is shown the first token before. ``prefill_est_s`` is what computing will take once it is
    its turn, ``ttft_slo_s`` the objective from the request's arrival to its first token.

    With ``inline_step`` the decode instance computes the prompt, in chunks with its steps; ``prefill`` names it too
    then.
    """

    job_id: JobId
    prefill: WorkerRef
    decode: WorkerRef
    local_prefix_blocks: Natural
    fetch_from: str = ""
    fetch_prefix_blocks: Natural = 0
    ttft_est_s: float = 0.0
    tbt_est_s: float = 0.0
    gate: DecodeGate | None = None
    prefill_est_s: float = 0.0
    ttft_slo_s: float | None = None
    read_limit_blocks: Natural | None = None
    inline_step: MixedStep | None = None


@message("serving.rejected")
@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """``reason`` is machine-readable. ``unavailable``: nobody could serve (503); otherwise contended (429)."""

    job_id: JobId
    reason: str
    unavailable: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTurn:
    """What decides when a prompt is computed: see policy/queue_order.py.

    The request has ``waited_s`` since it arrived, its first token is due ``first_token_within_s`` from now (None: no
    objective), and its computation is expected to take ``service_s``. Lower ``priority`` is more urgent; equal ones are
    shared out between tenants, by ``fairness_id``.
    """

    service_s: float
    waited_s: float = 0.0
    first_token_within_s: float | None = None
    priority: int = 0
    fairness_id: str = ""


@message("serving.prefill_job")
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """Compute the KV of ``tokens``, stream it to the decode node, draw one token.

    ``drawn_tokens`` says how many of the last ``tokens`` were drawn by the model before a re-placement: the sampler's
    counter goes on from there. Without ``decode`` one token is all that is wanted. The two counts of prefix blocks say
    what the conductor expects to be on the node, and to be copied from ``fetch_from``; ``read_limit_blocks`` is as
    in Placement. The blocks count for ``tenant``.
    """

    job_id: JobId
    transfer_id: TransferId
    incarnation: Incarnation
    tokens: PackedTokens
    keys: PackedKeys
    sampling: Sampling
    stopping: Stopping
    drawn_tokens: Natural
    stream_endpoint: str
    decode: WorkerRef | None
    deadline_s: float
    fetch_from: str = ""
    fetch_prefix_blocks: Natural = 0
    local_prefix_blocks: Natural = 0
    turn: QueueTurn | None = None
    tenant: str = ""
    read_limit_blocks: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InlinePrefill:
    """A decode worker computes the prompt itself: a chunk with each step, as long as ``step`` allows.

    The other fields are as in PrefillJob.
    """

    step: MixedStep
    fetch_from: str = ""
    fetch_prefix_blocks: Natural = 0
    read_limit_blocks: Natural | None = None


@message("serving.decode_job")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """Expect the KV of ``tokens`` under ``transfer_id`` from the messenger at ``kv_from``, or compute it by
    ``inline_prefill``; then decode.

    ``key_root`` continues the chain of block keys. With a ``gate`` decoding begins when that lets it, which the
    gateway hears by DecodeGranted; ``first_token_within_s`` is what is left of the time to the first token. Lower
    ``priority`` is more urgent: where KV has no room, others go first.
    """

    job_id: JobId
    transfer_id: TransferId
    incarnation: Incarnation
    tokens: PackedTokens
    keys: PackedKeys
    key_root: PackedKey
    sampling: Sampling
    stopping: Stopping
    drawn_tokens: Natural
    stream_endpoint: str
    deadline_s: float
    gate: DecodeGate | None = None
    first_token_within_s: float | None = None
    tenant: str = ""
    inline_prefill: InlinePrefill | None = None
    priority: int = 0
    kv_from: str = ""


@message("serving.first_token")
@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """``position`` counts the tokens drawn before this one; ``cached_tokens`` had their KV in the pool already.

    Of ``queue_s`` the first ``acquired_s`` had passed when the messenger had room for the prompt and, in it, all KV of
    its prefix that it could get; that took ``acquire_s``. Both are 0 where nobody looked.
    """

    job_id: JobId
    position: Natural
    token: Natural
    cached_tokens: Natural
    prefill_s: float
    queue_s: float
    acquire_s: float = 0.0
    acquired_s: float = 0.0
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@message("serving.prefill_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The first token, for the decode worker. The KV itself is announced by the messenger."""

    job_id: JobId
    token: Natural


@message("serving.decode_granted")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGranted:
    """All KV of the job is here and its next token comes with the next step."""

    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """``position`` counts the tokens of the request drawn before this one, over all its jobs."""

    job_id: JobId
    position: Natural
    token: Natural
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


@message("serving.token_batch")
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    instance_id: InstanceId
    entries: tuple[TokenEntry, ...]


@message("serving.job_failed")
@dataclass(frozen=True, slots=True, kw_only=True)
class JobFailed:
    """``retry_after_s``, of a refusal: when its cause is expected to be over. The message is its reason then."""

    job_id: JobId
    instance_id: InstanceId
    code: str
    message: str
    retryable: bool
    retry_after_s: float | None = None


@message("serving.cancel_job")
@dataclass(frozen=True, slots=True, kw_only=True)
class CancelJob:
    job_id: JobId
    reason: str = ""


class Ending(enum.Enum):
    """How a request ended for its client. ``refused``: answered 429 or 503 before anything was shown."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One choice of one request, as its gateway saw it.

    ``ttft_s`` counts from its arrival in the mesh; ``tbt_s`` is the mean of the longest 10 % of its token intervals;
    None where there was no such token. ``cached_tokens`` were in the pool when its first token was drawn,
    ``computed_tokens`` were computed for it over all its jobs. ``reason`` is that of a refusal. ``prefill`` and
    ``decode`` name where it ran last, empty if it never did.
    """

    ending: Ending
    priority: int
    prompt_tokens: Natural
    cached_tokens: Natural
    computed_tokens: Natural
    generated_tokens: Natural
    ttft_s: float | None = None
    tbt_s: float | None = None
    reason: str = ""
    prefill: str = ""
    decode: str = ""


@message("serving.outcomes")
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    instance_id: InstanceId
    outcomes: tuple[Outcome, ...]
