"""Distributed traces of this gateway's requests: the seam to OpenTelemetry, which is there only where it is wanted.

OpenTelemetry's own variables say where to (docs/monitoring.md); without them nothing of it is imported.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, Protocol

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.gateway.openai_responses import Usage
from mooncake_mesh.gateway.request_story import RequestStory
from mooncake_proto.client import Operation
from mooncake_proto.ids import RequestId

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL: Final = "http/protobuf"
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


class RequestSpan(Protocol):
    """One client's request under way."""

    def answered(self, model: str, usage: Usage, finish_reasons: Sequence[str]) -> None:
        """What there was of an answer, at the end, also of one that failed. A choice that did not finish has no
        reason."""


class Tracing(Protocol):
    def request(
        self, operation: Operation, request_id: RequestId, headers: Mapping[str, str]
    ) -> AbstractContextManager[RequestSpan]:
        """One request, from entering the context to leaving it; an exception that passes is its error.

        *headers* may have a ``traceparent``: the request is then part of its caller's trace.
        """

    def choice_ended(self, story: RequestStory) -> None:
        """What became of one choice of a request that is under way."""

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""


class NoTracing:
    """Nobody wants traces."""

    def request(self, _: Operation, __: RequestId, ___: Mapping[str, str]) -> AbstractContextManager[RequestSpan]:
        return nullcontext(self)

    def answered(self, _: str, __: Usage, ___: Sequence[str]) -> None:
        """Nobody wants to know."""

    def choice_ended(self, _: RequestStory) -> None:
        """Nobody wants to know."""

    def close(self) -> None:
        """Nothing is open."""


def load_tracing(instance_id: str, environ: Mapping[str, str] = os.environ) -> Tracing:
    """What OpenTelemetry's variables ask for. Raises ConfigError where that cannot be had."""
    variable = next((name for name in _ENDPOINTS if environ.get(name)), None)
    if variable is None or _is_off(environ):
        return NoTracing()
    protocol = next((name for name in _PROTOCOLS if environ.get(name)), None)
    if protocol is not None and environ[protocol] != _PROTOCOL:
        raise ConfigError(f"traces go by {_PROTOCOL} only, not by {environ[protocol]}", path=protocol)
    try:
        from mooncake_mesh.gateway.otel import OtelTracing, exporting
    except ImportError as error:
        message = f"OpenTelemetry is not installed ({error}): pip install 'mooncake-mesh[otel]'"
        raise ConfigError(message, path=variable) from error
    return OtelTracing(exporting(instance_id))


def _is_off(environ: Mapping[str, str]) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
