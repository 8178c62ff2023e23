"""The life of one choice of one request, pure. The gateway owns it: its prompt, the tokens drawn so far, its end.

::

    PLACING → STARTING → PREFILLING → DECODING → FINISHED
       ↑ └────────┴───────────┴───────────┤  └──→ FAILED | CANCELLED   (from every stage)
       └──── workers lost, or room lost ──┘

A job is one attempt on one pair of instances. When its workers are lost, the request is placed again with the prompt
and the tokens drawn so far; the sampler counts on from there, so the text goes on with the very tokens it would have
had. Tokens carry their position: what comes twice, late or from an earlier job changes nothing, and what overtakes
waits for its turn.

Where the placement has a gate, nothing is shown of a request before the decode worker has granted that it goes on: a
first token waits here. Refused there, the request is placed elsewhere if somebody can take it, and ends otherwise.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final, assert_never

from mooncake_mesh.errors import (
    Aborted,
    DeadlineExceeded,
    DecodeRefused,
    InvalidRequest,
    InvalidTransition,
    MooncakeError,
    Rejected,
    TooLate,
)
from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.job_errors import JobError, refusal_of
from mooncake_mesh.gateway.jobs import start_jobs
from mooncake_mesh.gateway.request_events import (
    AskAfterJob,
    AskPlacement,
    CallerLeft,
    CancelAt,
    DeadlinePassed,
    Emit,
    Fail,
    JobForgotten,
    JobsAccepted,
    Looked,
    NotPlaced,
    Placed,
    RequestCommand,
    RequestEvent,
    Started,
    WorkerLost,
    first_event,
    token_event,
)
from mooncake_mesh.gateway.request_stages import LIVE, MOVES, RUNNING, RequestStage
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_proto.ids import BlockKey, InstanceId, JobId
from mooncake_proto.serving import (
    DecodeGranted,
    FirstToken,
    GateKind,
    JobFailed,
    Placement,
    Schedule,
    TokenEntry,
    WorkerRef,
)

CONDUCTOR_UNREACHABLE: Final = "conductor_unreachable"
"""The reason of a refusal that the gateway gives itself when the conductor cannot be asked."""
_CONDUCTOR_PATIENCE_S: Final = 15.0
_READY_WITHIN_S: Final = 2.0
"""How long a request waits for a conductor that cannot be asked (longer than a restart takes), and for instances that
are known and take no work yet."""
_SILENCE_S: Final = 4.0
"""How long nothing may be heard of a job before its workers are asked whether they still have it; then twice that …"""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_ROOM_CODES: Final = frozenset({"no_free_blocks", "rejected", "overloaded", "draining"})
"""Failures that say "not now" about a healthy instance: it need not be avoided, and they do not count as losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySpace:
    """What keys and transfers of this model need: the chain's root and the tokens of a block."""

    root: BlockKey
    block_tokens: int


class RequestCore:
    """Mutated only by :meth:`handle`, which keeps no clock and does no I/O."""

    def __init__(
        self, request: TokenRequest, keys: KeySpace, *, stream_endpoint: str, max_replacements: int, started_s: float
    ) -> None:
        self.stage = RequestStage.PLACING
        self.placement: Placement | None = None
        self._request = request
        self._keys = keys
        self._stream_endpoint = stream_endpoint
        self._max_replacements = max_replacements
        self._started_s = started_s
        self._drawn: list[int] = []
        self._early: dict[int, TokenEntry | FirstToken] = {}
        self._attempt = 0
        self._jobs_at: tuple[WorkerRef, ...] = ()
        self._has_decoded = False
        self._is_accepted = False
        self._is_gated = False
        self._refusal: Rejected | None = None
        self._refused_by: set[InstanceId] = set()
        self._conductor_lost_s: float | None = None
        self._heard_s, self._silence_s = started_s, _SILENCE_S
        self._has_first_token = False
        self._losses = 0
        self._pauses = 0
        self._avoid: Counter[InstanceId] = Counter()
        self._history: list[str] = []
        self.job_id = self._job_id()
        """The job of the current attempt."""
        self.computed_tokens = 0
        """Prompt tokens that prefill instances computed for this request, over all its jobs."""

    @property
    def is_over(self) -> bool:
        return self.stage not in LIVE

    def handle(self, event: RequestEvent, now_s: float) -> list[RequestCommand]:
        """What *event* leads to. An event for a request that is over, or of an earlier job, leads to nothing."""
        if self.is_over:
            return []
        match event:
            case Started():
                return [self._ask(after_s=0.0)]
            case Placed(placement=placement):
                return self._start(placement, now_s)
            case NotPlaced(job_id=job_id, error=error):
                is_due = job_id == self.job_id and self.stage is RequestStage.PLACING
                return self._not_placed(error, now_s) if is_due else []
            case JobsAccepted(job_id=job_id):
                if job_id == self.job_id:
                    self._is_accepted = True
                    self._heard(now_s)
                    if self.stage is RequestStage.STARTING:
                        self._move(RequestStage.PREFILLING)
                return []
            case FirstToken() | TokenEntry():
                return self._token(event, now_s) if self._is_of_running_job(event) else []
            case DecodeGranted():
                return self._granted(now_s) if self._is_of_running_job(event) else []
            case JobFailed():
                return self._job_failed(event) if self._is_of_running_job(event) else []
            case WorkerLost(instance_id=instance_id):
                return self._worker_lost(instance_id)
            case Looked():
                return self._looked(now_s)
            case JobForgotten():
                return self._forgotten(event) if event.job_id == self.job_id else []
            case CallerLeft():
                self._move(RequestStage.CANCELLED)
                return self._cancel("the caller left")
            case DeadlinePassed():
                error = DeadlineExceeded(f"the request did not finish within {self._request.deadline_s:g} s")
                return self._fail(error)
            case _:
                assert_never(event)

    def _is_of_running_job(self, event: FirstToken | TokenEntry | DecodeGranted | JobFailed) -> bool:
        return event.job_id == self.job_id and self.stage is not RequestStage.PLACING

    # --- placing ------------------------------------------------------------------------------------------------------

    def _ask(self, *, after_s: float) -> AskPlacement:
        tokens = self._tokens()
        return AskPlacement(
            after_s=after_s,
            schedule=Schedule(
                job_id=self.job_id,
                model=self._request.model,
                prompt_tokens=len(tokens) // _TOKEN_BYTES,
                max_new_tokens=self._request.stopping.max_new_tokens - len(self._drawn),
                keys=self._chain(tokens),
                avoid=tuple(sorted(self._avoid)),
                refused_by=() if self._drawn else tuple(sorted(self._refused_by)),
                priority=self._request.priority,
                tenant=self._request.tenant,
            ),
        )

    def _start(self, placement: Placement, now_s: float) -> list[RequestCommand]:
        if placement.job_id != self.job_id or self.stage is not RequestStage.PLACING:
            return []
        self._move(RequestStage.STARTING)
        self.placement = placement
        self._conductor_lost_s = None
        self._is_accepted = self._has_decoded = self._has_first_token = False
        is_single = self._request.stopping.max_new_tokens - len(self._drawn) <= 1
        gate = None if is_single or self._drawn else placement.gate
        self._is_gated = gate is not None
        tokens = self._tokens()
        start = start_jobs(
            self._request,
            placement,
            tokens=tokens,
            keys=self._chain(tokens),
            key_root=self._keys.root,
            drawn_tokens=len(self._drawn),
            stream_endpoint=self._stream_endpoint,
            gate=gate,
            elapsed_s=now_s - self._started_s,
        )
        apart = (placement.prefill,) if is_single else (placement.prefill, placement.decode)
        self._jobs_at = apart if placement.inline_step is None else (placement.decode,)
        return [start]

    def _not_placed(self, error: MooncakeError, now_s: float) -> list[RequestCommand]:
        """A request that has never run, or that a decode worker had no place for, is refused; any other that has run
        waits for its turn, if it can ever come. All wait for a conductor or for instances that are just starting."""
        reason = error.reason if isinstance(error, Rejected) else ""
        is_starting = reason.endswith("_not_ready") and now_s - self._started_s < _READY_WITHIN_S
        if is_starting or self._is_conductor_away(error, now_s):
            return [self._ask(after_s=self._pause_s())]
        if self._attempt == 0 or reason.endswith("_too_small"):
            return self._fail(error)
        if self._refusal is not None and not self._drawn:
            return self._fail(self._refusal)
        pause_s = self._pause_s()
        if isinstance(error, Rejected):
            pause_s = max(pause_s, min(error.retry_after_s, _LONGEST_PAUSE_S))
        return [self._ask(after_s=pause_s)]

    def _is_conductor_away(self, error: MooncakeError, now_s: float) -> bool:
        """One that comes back has to hear of its members first, so "nobody is there" counts as being away still; that
        those who are there are too small does not."""
        if not isinstance(error, Rejected) or not error.unavailable or error.reason.endswith("_too_small"):
            return False
        if error.reason == CONDUCTOR_UNREACHABLE and self._conductor_lost_s is None:
            self._conductor_lost_s = now_s
        return self._conductor_lost_s is not None and now_s - self._conductor_lost_s < _CONDUCTOR_PATIENCE_S

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _token(self, entry: FirstToken | TokenEntry, now_s: float) -> list[RequestCommand]:
        self._has_first_token = self._has_first_token or isinstance(entry, FirstToken)
        if entry.position < len(self._drawn):
            return []
        if entry.position == len(self._drawn):
            self._heard(now_s)
        if isinstance(entry, FirstToken) and entry.position not in self._early:
            self.computed_tokens += max(0, len(self._request.prompt) + len(self._drawn) - entry.cached_tokens)
        self._early[entry.position] = entry
        if isinstance(entry, TokenEntry) or entry.finish is not None:
            self._is_gated = False  # it is decoded, or needs no decoding
        return self._show()

    def _granted(self, now_s: float) -> list[RequestCommand]:
        """What was held has all of its KV: what becomes of the prefill worker does not matter any more."""
        self._heard(now_s)
        self._is_gated, gate = False, self.placement.gate if self.placement is not None else None
        self._has_decoded |= gate is not None and gate.kind is GateKind.HOLD
        return self._show()

    def _show(self) -> list[RequestCommand]:
        """Emit what is due."""
        commands: list[RequestCommand] = []
        while not (self.is_over or self._is_gated) and (due := self._early.pop(len(self._drawn), None)) is not None:
            commands += self._emit(due)
        return commands

    def _emit(self, entry: FirstToken | TokenEntry) -> list[RequestCommand]:
        is_first = isinstance(entry, FirstToken)
        self._has_decoded = self._has_decoded or not is_first
        event = first_event(entry) if isinstance(entry, FirstToken) and not self._drawn else token_event(entry)
        self._drawn.append(entry.token)
        self._pauses = 0
        if entry.finish is None:
            if is_first and self.stage is not RequestStage.DECODING:
                self._move(RequestStage.DECODING)
            return [Emit(event=event)]
        self._move(RequestStage.FINISHED)
        waiting = self._jobs_at[1:] if is_first else ()  # the decode job waits for a prompt that needs no decoding
        return [Emit(event=event), *self._cancel_at(waiting, "finished")]

    # --- losses -------------------------------------------------------------------------------------------------------

    def _job_failed(self, failed: JobFailed) -> list[RequestCommand]:
        if failed.code == DecodeRefused.code:
            return self._refused_at_decode(failed)
        if failed.code == TooLate.code and not self._drawn:
            return self._fail(refusal_of(failed))
        error = JobError(failed)
        if not failed.retryable:
            return self._fail(InvalidRequest(str(error)) if error.code == InvalidRequest.code else error)
        return self._place_again(failed.instance_id, error)

    def _worker_lost(self, instance_id: InstanceId) -> list[RequestCommand]:
        placement = self.placement
        if placement is None or self.stage is RequestStage.PLACING:
            return []
        lost_decode = instance_id == placement.decode.instance_id and placement.decode in self._jobs_at
        # The first token says nothing about the KV; the first token that was decoded says that all of it has landed.
        lost_prefill = instance_id == placement.prefill.instance_id and not self._has_decoded
        if not lost_decode and not lost_prefill:
            return []
        return self._place_again(instance_id, Aborted(f"{instance_id} was lost"))

    def _heard(self, now_s: float) -> None:
        self._heard_s, self._silence_s = now_s, _SILENCE_S

    def _looked(self, now_s: float) -> list[RequestCommand]:
        """What was sent as a connection broke may be lost, whatever it said: do not wait for it until the deadline."""
        if (
            self.stage not in (RequestStage.PREFILLING, RequestStage.DECODING)
            or now_s < self._heard_s + self._silence_s
        ):
            return []
        self._heard_s, self._silence_s = now_s, 2 * self._silence_s
        if self._early and not self._is_gated:  # later tokens are here
            return self._word_lost()
        return [AskAfterJob(job_id=self.job_id, workers=self._jobs_at)]

    def _forgotten(self, event: JobForgotten) -> list[RequestCommand]:
        """A worker has said all it had to say: prefill with the first token, decode with the last one."""
        is_decode = self.placement is not None and event.instance_id == self.placement.decode.instance_id
        return self._word_lost() if self.stage in RUNNING and (is_decode or not self._has_first_token) else []

    def _word_lost(self) -> list[RequestCommand]:
        """Nobody's fault, so nobody is avoided; but it counts."""
        self._losses += 1
        if self._losses > self._max_replacements:
            return self._fail(Aborted("word of the job was lost again and again"))
        return self._ask_again(after_s=0.0)

    def _place_again(self, culprit: InstanceId, error: MooncakeError) -> list[RequestCommand]:
        """Start over elsewhere. Losses are counted, want of room is not, and neither is an instance that is known to be
        lost and placed on again: until its lease ends the conductor believes in it, so a pause is what helps.
        """
        is_room = error.code in _ROOM_CODES
        is_known_loss = culprit in self._avoid and not self._is_accepted
        if not is_room:
            self._losses += not is_known_loss
            self._avoid[culprit] += 1
        if self._losses > self._max_replacements:
            return self._fail(error)
        return self._ask_again(after_s=self._pause_s() if is_room or is_known_loss else 0.0)

    def _refused_at_decode(self, failed: JobFailed) -> list[RequestCommand]:
        """No loss: the worker is well. The conductor is asked who else could take it now."""
        self._refusal = refusal_of(failed)
        self._refused_by.add(failed.instance_id)
        return self._ask_again(after_s=self._pause_s() if self._drawn else 0.0)

    def _ask_again(self, *, after_s: float) -> list[RequestCommand]:
        cancels = self._cancel("placed again")
        self._move(RequestStage.PLACING)
        self.placement = None
        self._jobs_at = ()
        self._attempt += 1
        self.job_id = self._job_id()
        self._early.clear()
        return [*cancels, self._ask(after_s=after_s)]

    def _pause_s(self) -> float:
        self._pauses += 1
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * (1 << min(self._pauses - 1, 10)))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _fail(self, error: MooncakeError) -> list[RequestCommand]:
        commands = self._cancel(error.code)
        self._move(RequestStage.FAILED)
        return [*commands, Fail(error=error)]

    def _cancel(self, reason: str) -> list[RequestCommand]:
        return self._cancel_at(self._jobs_at, reason)

    def _cancel_at(self, workers: tuple[WorkerRef, ...], reason: str) -> list[RequestCommand]:
        return [CancelAt(job_id=self.job_id, workers=workers, reason=reason)] if workers else []

    # --- inside -------------------------------------------------------------------------------------------------------

    def _tokens(self) -> bytes:
        return token_bytes([*self._request.prompt, *self._drawn])

    def _chain(self, tokens: bytes) -> bytes:
        return join_keys(chain(self._keys.root, tokens, self._keys.block_tokens))

    def _job_id(self) -> JobId:
        return JobId(f"{self._request.request_id}.{self._attempt}")

    def _move(self, stage: RequestStage) -> None:
        if (self.stage, stage) not in MOVES:
            raise InvalidTransition(
                f"request {self._request.request_id}", old=self.stage.value, new=stage.value, history=self._history
            )
        self._history.append(self.stage.value)
        self.stage = stage


_TOKEN_BYTES: Final = 4
