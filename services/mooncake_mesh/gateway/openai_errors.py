"""The one answer to every error: status, headers and OpenAI's error body.

429 says that capacity exists but is contended, 503 that nobody can serve now; both carry Retry-After and name their
reason in ``x-mooncake-reject-reason``. What is not the caller's business is replaced by the request's id.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Final

from mooncake_mesh.errors import (
    Aborted,
    CallTimeout,
    DeadlineExceeded,
    Draining,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    PeerUnreachable,
    Rejected,
    RemoteFailure,
)
from mooncake_mesh.gateway.context_cache import CacheNotFound, CachingOff

REJECT_REASON_HEADER: Final = "x-mooncake-reject-reason"
_RETRY_AFTER_S: Final = 1.0
_CALLERS_MISTAKES: Final = frozenset({"context_length_exceeded", "invalid_request"})


class BodyTooLarge(InvalidRequest):
    """The request body is longer than this server reads."""

    code = "request_too_large"


class UnknownPath(InvalidRequest):
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"


class NotImplementedHere(InvalidRequest):
    """An endpoint of OpenAI's that this server does not have."""

    code = "not_implemented"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An error as a client sees it."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def problem_of(error: BaseException, *, request_id: str) -> Problem:
    """How *error* is told to a client."""
    message = str(error)
    match error:
        case InvalidRequest():
            status, kind = _REFUSALS.get(type(error), (400, "invalid_request_error"))
            again = {"x-should-retry": "false"} if status == 501 else {}  # OpenAI's packages try again after a 5xx
            return Problem(status=status, type=kind, code=error.code, message=message, param=error.param, headers=again)
        case InvalidApiKey():
            headers = {"www-authenticate": "Bearer"}
            kind = "authentication_error"
            return Problem(status=401, type=kind, code=error.code, message=message, headers=headers)
        case Rejected():
            status, kind = (503, "server_error") if error.unavailable else (429, "rate_limit_error")
            headers = _come_back(error.retry_after_s, error.reason)
            text = f"the request was refused: {error.reason}"
            return Problem(status=status, type=kind, code=error.code, message=text, headers=headers)
        case RemoteFailure() if error.code in _CALLERS_MISTAKES:
            param = error.failure.path or None
            return Problem(status=400, type="invalid_request_error", code=error.code, message=message, param=param)
        case Draining():
            text = "this server is shutting down"
            headers = _come_back(_RETRY_AFTER_S, error.code)
            return Problem(status=503, type="server_error", code=error.code, message=text, headers=headers)
        case PeerUnreachable() | CallTimeout():
            return _unavailable(error.code)
        case RemoteFailure() if error.retryable:
            return _unavailable(error.code)
        case DeadlineExceeded():
            return Problem(status=504, type="server_error", code=error.code, message=message or "the deadline passed")
        case Aborted():
            return Problem(
                status=500, type="server_error", code=error.code, message=message or "the request was aborted"
            )
        case _:
            text = f"internal error; request id {request_id}"
            return Problem(status=500, type="server_error", code="internal_error", message=text)


_REFUSALS: Final[dict[type, tuple[int, str]]] = {
    ModelNotFound: (404, "not_found_error"),
    UnknownPath: (404, "not_found_error"),
    MethodNotAllowed: (405, "invalid_request_error"),
    CacheNotFound: (404, "not_found_error"),
    CachingOff: (501, "invalid_request_error"),
    NotImplementedHere: (501, "invalid_request_error"),
    BodyTooLarge: (413, "invalid_request_error"),
}


def _unavailable(code: str) -> Problem:
    text = "a part of the mesh does not answer"
    return Problem(status=503, type="server_error", code=code, message=text, headers=_come_back(_RETRY_AFTER_S, code))


def _come_back(after_s: float, reason: str) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(after_s))), REJECT_REASON_HEADER: _header_text(reason)}


def _header_text(text: str) -> str:
    return "".join(char if 0x20 <= ord(char) < 0x7F else "?" for char in text[:128])
