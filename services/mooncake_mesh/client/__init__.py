"""The ZeroMQ SDK: a client for asynchronous programs and one for all others.

::

    from mooncake_mesh.client import SyncMooncakeClient

    with SyncMooncakeClient() as client:
        for chunk in client.stream_chat([{"role": "user", "content": "What is a KVCache?"}]):
            print(chunk.text, end="", flush=True)

Answers are values with the names of the openai package; errors are those of mooncake_mesh.errors, repeated here.
"""

from mooncake_mesh.client.aio import DEFAULT_ENDPOINT, AnswerStream, MooncakeClient
from mooncake_mesh.client.answers import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessage,
    Completion,
    CompletionChoice,
    Delta,
    Model,
    ToolCall,
    Usage,
)
from mooncake_mesh.client.caching_answers import CacheError, CacheTag, ContextCache
from mooncake_mesh.client.sync import SyncAnswerStream, SyncMooncakeClient
from mooncake_mesh.client.timeouts import Timeouts
from mooncake_mesh.errors import (
    Aborted,
    CallTimeout,
    DeadlineExceeded,
    Draining,
    InvalidApiKey,
    InvalidRequest,
    KeyRefused,
    MeshError,
    ModelNotFound,
    MooncakeError,
    PeerUnreachable,
    Rejected,
    RemoteFailure,
    RequestError,
    SlowReader,
    TooLong,
)
from mooncake_proto.client import HealthReport, RequestTrace, TraceStep
from mooncake_proto.errors import WireError

__all__ = [
    "DEFAULT_ENDPOINT",
    "Aborted",
    "AnswerStream",
    "CacheError",
    "CacheTag",
    "CallTimeout",
    "ChatChoice",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatMessage",
    "Completion",
    "CompletionChoice",
    "ContextCache",
    "DeadlineExceeded",
    "Delta",
    "Draining",
    "HealthReport",
    "InvalidApiKey",
    "InvalidRequest",
    "KeyRefused",
    "MeshError",
    "Model",
    "ModelNotFound",
    "MooncakeClient",
    "MooncakeError",
    "PeerUnreachable",
    "Rejected",
    "RemoteFailure",
    "RequestError",
    "RequestTrace",
    "SlowReader",
    "SyncAnswerStream",
    "SyncMooncakeClient",
    "Timeouts",
    "TooLong",
    "ToolCall",
    "TraceStep",
    "Usage",
    "WireError",
]
