"""From the code of a Failure to the class of the error that the caller gets."""

from typing import Final

from mooncake_mesh.errors import (
    Aborted,
    CallTimeout,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    MooncakeError,
    PeerUnreachable,
    Rejected,
    RemoteFailure,
    TooLong,
)
from mooncake_proto.control import Failure
from mooncake_proto.errors import MalformedMessage, UnknownKind, VersionMismatch

_RETRY_AFTER_S: Final = 1.0
_REJECTIONS: Final = frozenset({"rejected", "overloaded"})
_PLAIN: Final[dict[str, type[MooncakeError]]] = {
    error.code: error
    for error in (
        Aborted,
        CallTimeout,
        DeadlineExceeded,
        Draining,
        InternalError,
        InvalidApiKey,
        MalformedMessage,
        PeerUnreachable,
        UnknownKind,
        VersionMismatch,
    )
}
_CALLERS_MISTAKES: Final[dict[str, type[InvalidRequest]]] = {
    "context_cache_not_found": InvalidRequest,
    "context_cache_quota_exceeded": InvalidRequest,
    "context_cache_unusable": InvalidRequest,
    "context_caching_off": InvalidRequest,
    "context_length_exceeded": TooLong,
    "invalid_json": InvalidRequest,
    "invalid_request": InvalidRequest,
    "model_not_found": ModelNotFound,
    "request_too_large": InvalidRequest,
    "unsupported_parameter": InvalidRequest,
}


def error_of(failure: Failure) -> MooncakeError:
    """The typed error that *failure* tells of; its ``code`` is the failure's. RemoteFailure for a code unknown here."""
    code = failure.code
    if code in _REJECTIONS:
        retry_after_s = _RETRY_AFTER_S if failure.retry_after_s is None else failure.retry_after_s
        reason = failure.message if code == Rejected.code else code
        return Rejected(reason, unavailable=failure.unavailable, retry_after_s=retry_after_s)
    if code in _CALLERS_MISTAKES:
        mistake = _CALLERS_MISTAKES[code](failure.message, param=failure.path or None)
        mistake.code = code  # type: ignore[misc]  # "unsupported_parameter" says more than its class
        return mistake
    if code in _PLAIN:
        return _PLAIN[code](failure.message)
    return RemoteFailure(failure)
