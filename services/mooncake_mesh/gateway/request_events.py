"""What may happen to a request at the gateway, and what its core may command: the vocabulary of gateway/core.py.

Events are past tense, commands imperative. Messages from workers (FirstToken, DecodeGranted, TokenEntry, JobFailed)
are events as they are.
"""

from dataclasses import dataclass, replace

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.gateway.api import TokenEvent
from mooncake_proto.ids import InstanceId, JobId
from mooncake_proto.serving import (
    DecodeGranted,
    DecodeJob,
    FirstToken,
    JobFailed,
    Placement,
    PrefillJob,
    Schedule,
    TokenEntry,
    WorkerRef,
)

# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request enters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlaced:
    """The conductor said no, or could not be asked."""

    job_id: JobId
    error: MooncakeError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsAccepted:
    job_id: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    instance_id: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """Time has passed; comes about once a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobForgotten:
    """A worker that was asked after a job does not have it (any more)."""

    job_id: JobId
    instance_id: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeft:
    """Nobody reads any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    pass


RequestEvent = (
    Started
    | Placed
    | NotPlaced
    | JobsAccepted
    | FirstToken
    | DecodeGranted
    | TokenEntry
    | JobFailed
    | WorkerLost
    | Looked
    | JobForgotten
    | CallerLeft
    | DeadlinePassed
)


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlacement:
    schedule: Schedule
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJobs:
    """``decode`` is None when one token is all that is wanted, ``prefill`` when the decode instance does it all."""

    placement: Placement
    prefill: PrefillJob | None
    decode: DecodeJob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAt:
    """Free everything of the job there."""

    job_id: JobId
    workers: tuple[WorkerRef, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAfterJob:
    """Whether the workers still have the job; each that has not is a JobForgotten."""

    job_id: JobId
    workers: tuple[WorkerRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    event: TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The one terminal message of a request that does not finish."""

    error: MooncakeError


RequestCommand = AskPlacement | StartJobs | CancelAt | AskAfterJob | Emit | Fail


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_event(entry: FirstToken | TokenEntry) -> TokenEvent:
    """What the doors are told of a drawn token."""
    return TokenEvent(token=entry.token, logprob=entry.logprob, finish=entry.finish)


def first_event(first: FirstToken) -> TokenEvent:
    """What they are told of a request's first one: how its prompt fared, too."""
    return replace(
        token_event(first), cached_tokens=first.cached_tokens, queue_s=first.queue_s, prefill_s=first.prefill_s
    )
