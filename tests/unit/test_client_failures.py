"""What a Failure becomes in the caller's hands."""

import pytest

from mooncake_mesh import errors
from mooncake_mesh.client.failures import error_of
from mooncake_mesh.errors import InvalidRequest, MooncakeError, Rejected, RemoteFailure, failure_of
from mooncake_mesh.gateway.context_cache import CacheNotFound, CacheQuotaExceeded, CacheUnusable, CachingOff
from mooncake_mesh.gateway.json_fields import InvalidJson, UnsupportedParameter
from mooncake_proto.control import Failure
from mooncake_proto.errors import UnknownKind, VersionMismatch

TOLD_AS_THEY_ARE = [
    errors.Aborted("m"),
    errors.CallTimeout("m"),
    errors.DeadlineExceeded("m"),
    errors.Draining("m"),
    errors.InternalError("m"),
    errors.PeerUnreachable("m"),
    UnknownKind("m"),
    VersionMismatch("m"),
    errors.InvalidRequest("m", param="top_p"),
    errors.ModelNotFound("m", param="model"),
    errors.TooLong("m", param="prompt"),
    errors.Rejected("busy", unavailable=False, retry_after_s=0.0),
    errors.Rejected("nobody", unavailable=True, retry_after_s=3.0),
]


@pytest.mark.parametrize("error", TOLD_AS_THEY_ARE, ids=lambda error: type(error).__name__)
def test_what_the_gateway_raised_is_what_the_caller_gets(error: MooncakeError) -> None:
    told = error_of(failure_of(error))
    assert type(told) is type(error)
    assert (str(told), told.code, told.retryable) == (str(error), error.code, error.retryable)
    assert vars(told) | {"code": 0} == vars(error) | {"code": 0}


@pytest.mark.parametrize(
    "error",
    [
        InvalidJson("m"),
        UnsupportedParameter("m", param="tools"),
        CacheNotFound("m", param="cache_id"),
        CacheQuotaExceeded("m"),
        CacheUnusable("m"),
        CachingOff(),
    ],
)
def test_the_gateways_own_kinds_of_mistake_keep_their_code(error: InvalidRequest) -> None:
    told = error_of(failure_of(error))
    assert type(told) is InvalidRequest
    assert (told.code, told.param, str(told)) == (error.code, error.param, str(error))
    assert InvalidRequest.code == "invalid_request", "the class is left alone"


def test_an_overloaded_gateway_is_a_rejection() -> None:
    told = error_of(Failure(code="overloaded", message="too many calls in progress", retryable=True))
    assert isinstance(told, Rejected)
    assert (told.reason, told.unavailable, told.retry_after_s) == ("overloaded", False, 1.0)


def test_a_code_of_a_newer_gateway_is_still_an_error() -> None:
    told = error_of(Failure(code="brand_new", message="m", retryable=True))
    assert isinstance(told, RemoteFailure)
    assert (told.code, told.retryable, str(told)) == ("brand_new", True, "m")
