"""The error tree. Each leaf has a stable ``code`` and says whether trying again can help (``retryable``).

::

    MooncakeError
    ├─ ConfigError                 dotted path of the bad key
    ├─ WireError                   VersionMismatch · MalformedMessage · UnknownKind   (mooncake_proto.errors)
    ├─ MeshError                   PeerUnreachable* · KeyRefused · CallTimeout* · Draining* · SlowReader · Refused ·
    │                              NotLeader* · RemoteFailure
    ├─ RequestError                InvalidRequest · ModelNotFound · TooLong · InvalidApiKey · Rejected* ·
    │                              DecodeRefused* · TooLate* · Aborted · DeadlineExceeded
    ├─ TransferError               SliceLost* · ChecksumMismatch* · NoFreeBlocks*
    ├─ ModelError                  UnsupportedModel
    └─ InternalError               InvalidTransition · InvariantViolated              (bugs)
                                                                                      * retryable
"""

from collections.abc import Sequence

from mooncake_proto.control import Failure
from mooncake_proto.errors import MooncakeError

__all__ = [
    "Aborted",
    "CallTimeout",
    "ChecksumMismatch",
    "ConfigError",
    "DeadlineExceeded",
    "DecodeRefused",
    "Draining",
    "InternalError",
    "InvalidApiKey",
    "InvalidRequest",
    "InvalidTransition",
    "InvariantViolated",
    "KeyRefused",
    "MeshError",
    "ModelError",
    "ModelNotFound",
    "MooncakeError",
    "NoFreeBlocks",
    "NotLeader",
    "PeerUnreachable",
    "Refused",
    "Rejected",
    "RemoteFailure",
    "RequestError",
    "SliceLost",
    "SlowReader",
    "TooLate",
    "TooLong",
    "TransferError",
    "UnsupportedModel",
    "failure_of",
]


class ConfigError(MooncakeError):
    """A configuration value is unknown or wrong; ``path`` is its dotted name."""

    code = "config_error"

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path


class MeshError(MooncakeError):
    """Talking to a peer failed."""

    code = "mesh_error"


class PeerUnreachable(MeshError):
    code = "peer_unreachable"
    retryable = True


class KeyRefused(PeerUnreachable):
    """The two ends of a connection do not accept each other's CURVE keys; its message says what may be wrong."""

    code = "key_refused"
    retryable = False


class CallTimeout(MeshError):
    code = "call_timeout"
    retryable = True


class SlowReader(MeshError):
    """Replies came faster than they were read, up to the bound; the peer was told to stop."""

    code = "slow_reader"


class Refused(MeshError):
    """We do not take what a peer asks for; ``code`` says why and no retry changes it."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code  # type: ignore[misc]


class Draining(MeshError):
    code = "draining"
    retryable = True


class NotLeader(MeshError):
    """Another conductor leads, or none does for now."""

    code = "not_leader"
    retryable = True


class RemoteFailure(MeshError):
    """A peer answered a call with Failure; ``code`` and ``retryable`` are the peer's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.code = failure.code  # type: ignore[misc]
        self.retryable = failure.retryable  # type: ignore[misc]
        self.failure = failure


class RequestError(MooncakeError):
    """One request cannot be served as asked."""

    code = "request_error"


class InvalidRequest(RequestError):
    """The caller's mistake; ``param`` names the field."""

    code = "invalid_request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(InvalidRequest):
    code = "model_not_found"


class TooLong(InvalidRequest):
    code = "context_length_exceeded"


class InvalidApiKey(RequestError):
    """The caller showed no API key that this gateway knows."""

    code = "invalid_api_key"


class Rejected(RequestError):
    """Refused before anything was shown. ``unavailable``: nobody could serve it (503), otherwise contended (429)."""

    code = "rejected"
    retryable = True

    def __init__(self, reason: str, *, unavailable: bool, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unavailable = unavailable
        self.retry_after_s = retry_after_s


class DecodeRefused(Rejected):
    """A decode instance has no place for a computed prompt: another one may have (429 otherwise)."""

    code = "decode_refused"

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        super().__init__(reason, unavailable=False, retry_after_s=retry_after_s)


class TooLate(Rejected):
    """It is not a prompt's turn in time for its first token: it is refused rather than computed in vain."""

    code = "too_late"

    def __init__(self, reason: str, *, retry_after_s: float) -> None:
        super().__init__(reason, unavailable=False, retry_after_s=retry_after_s)


class Aborted(RequestError):
    """The request was cancelled or its workers were lost beyond repair."""

    code = "aborted"


class DeadlineExceeded(RequestError):
    code = "deadline_exceeded"


class TransferError(MooncakeError):
    """KV did not arrive."""

    code = "transfer_error"
    retryable = True


class SliceLost(TransferError):
    code = "slice_lost"


class ChecksumMismatch(TransferError):
    code = "checksum_mismatch"


class NoFreeBlocks(TransferError):
    code = "no_free_blocks"


class ModelError(MooncakeError):
    """The model cannot be loaded."""

    code = "model_error"


class UnsupportedModel(ModelError):
    code = "unsupported_model"


class InternalError(MooncakeError):
    """A bug of ours."""

    code = "internal_error"


class InvariantViolated(InternalError):
    code = "invariant_violated"


class InvalidTransition(InternalError):
    """A state machine was asked for a move that its table does not hold; ``history`` tells how it got there."""

    code = "invalid_transition"

    def __init__(self, subject: str, *, old: str, new: str, history: Sequence[str] = ()) -> None:
        super().__init__(f"{subject}: {old} → {new} is no legal move; history: {' → '.join(history) or '(none)'}")
        self.old = old
        self.new = new
        self.history = tuple(history)


def failure_of(error: MooncakeError) -> Failure:
    """The error reply that tells a peer about *error*."""
    return Failure(
        code=error.code,
        message=str(error),
        retryable=error.retryable,
        path=getattr(error, "path", "") or getattr(error, "param", "") or "",
        retry_after_s=getattr(error, "retry_after_s", None),
        unavailable=getattr(error, "unavailable", False),
    )
