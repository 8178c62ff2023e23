"""ZeroMQ clients ↔ gateway: the SDK's conversation.

A client sends Generate with a message id of its own and gets any number of GenerationDelta, then exactly one
GenerationEnd or Failure, all with that id in ``re``. The request itself is the JSON object that the HTTP
endpoint of the same name takes, so one validation serves both doors. Where the gateway asks for API keys, everything
but HealthQuery shows one in ``api_key`` and is answered by Failure (``invalid_api_key``) otherwise.
"""

import enum
from dataclasses import dataclass, field

from mooncake_proto.codec import message
from mooncake_proto.shapes import Natural


class Operation(enum.Enum):
    CHAT = "chat"
    COMPLETION = "completion"


@message("client.generate")
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """``request`` is a JSON object as POST /v1/chat/completions or /v1/completions takes it."""

    operation: Operation
    request: bytes
    api_key: str = field(default="", repr=False)


@message("client.cancel")
@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Cancel the Generate that was sent with message id ``target``. Answered by Ok; an unknown id is fine."""

    target: str
    api_key: str = field(default="", repr=False)


@message("client.delta")
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDelta:
    """One OpenAI stream chunk, as JSON."""

    chunk: bytes


@message("client.end")
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEnd:
    """The whole answer as the endpoint returns it without streaming, as JSON."""

    response: bytes


@message("client.models_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsQuery:
    """Answered by Models."""

    api_key: str = field(default="", repr=False)


@message("client.models")
@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The JSON body of GET /v1/models."""

    response: bytes


class CachingAction(enum.Enum):
    """A call of the context caching API, by what it does to caches and to tags."""

    CREATE = "create"
    LIST = "list"
    GET = "get"
    UPDATE = "update"
    DELETE = "delete"
    POINT_TAG = "point_tag"
    LIST_TAGS = "list_tags"
    GET_TAG = "get_tag"
    TAG_CONTENT = "tag_content"
    DELETE_TAG = "delete_tag"


@message("client.caching")
@dataclass(frozen=True, slots=True, kw_only=True)
class CachingCall:
    """A call of /v1/caching. ``name`` is the id or the tag in the path of such a call, ``query`` what a list is asked
    for, ``request`` the JSON object in its body; empty where there is none. Answered by CachingAnswer."""

    action: CachingAction
    request: bytes
    name: str = ""
    query: dict[str, str] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)


@message("client.caching_answer")
@dataclass(frozen=True, slots=True, kw_only=True)
class CachingAnswer:
    """The JSON body that the HTTP endpoint answers with."""

    response: bytes


@message("client.trace_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class TraceQuery:
    """What became of a request? ``request_id`` is the id of its answer. Answered by Traces."""

    request_id: str
    api_key: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """Something that happened ``at_s`` after the request had come; it had taken ``took_s``, where it took any time.

    ``where`` names instances, empty for the gateway itself.
    """

    at_s: float
    what: str
    took_s: float = 0.0
    where: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One choice of a request. ``started_at`` is its gateway's clock, in Unix seconds; the first steps are kept."""

    request_id: str
    started_at: float
    is_over: bool
    prompt_tokens: Natural
    generated_tokens: Natural
    steps: tuple[TraceStep, ...]


@message("client.traces")
@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Empty for a request that this gateway does not know any more, or that is somebody else's."""

    traces: tuple[RequestTrace, ...]


@message("client.health_query")
@dataclass(frozen=True, slots=True, kw_only=True)
class HealthQuery:
    """Answered by HealthReport."""


@message("client.health_report")
@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    live: bool
    ready: bool
    reasons: tuple[str, ...]
