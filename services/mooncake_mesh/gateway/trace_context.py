"""What a client calls its request, for the logs: ``x-request-id`` and W3C's ``traceparent``."""

import re
from collections.abc import Mapping
from typing import Final

_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def trace_labels(headers: Mapping[str, str]) -> dict[str, str]:
    """Names and values that every log line of the request is to have; none for a header that is absent or malformed."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None or found[1] == "ff" or not (int(found[2], 16) and int(found[3], 16)):
        return {}
    if found[1] == "00" and found[4]:
        return {}
    return {"trace_id": found[2], "parent_span_id": found[3]}
