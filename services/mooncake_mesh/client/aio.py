"""The asynchronous client."""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, Unpack

from mooncake_mesh.client.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Model,
    read_chat,
    read_chat_chunk,
    read_completion,
    read_models,
)
from mooncake_mesh.client.caching import Caching, CachingTransport
from mooncake_mesh.client.failures import error_of
from mooncake_mesh.client.options import ChatOptions, CompletionOptions, Message
from mooncake_mesh.client.timeouts import Timeouts
from mooncake_mesh.errors import Aborted, InvalidRequest, Rejected, RemoteFailure
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.reply_stream import ReplyStream
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.client import (
    CachingAction,
    CachingAnswer,
    CachingCall,
    Cancel,
    Generate,
    GenerationDelta,
    GenerationEnd,
    HealthQuery,
    HealthReport,
    Models,
    ModelsQuery,
    Operation,
    RequestTrace,
    TraceQuery,
    Traces,
)
from mooncake_proto.control import Ok
from mooncake_proto.errors import WireError

DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:7710"
"""Where a gateway listens for SDK clients unless told otherwise."""

API_KEY_VARIABLE: Final = "MOONCAKE_API_KEY"
MAX_UNREAD_CHUNKS: Final = 4096
_NO_MODEL_RETRY_AFTER_S: Final = 1.0

Prompt = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
"""A text or token ids, or several of either."""

C = TypeVar("C")
A = TypeVar("A")
R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class _Progress(Generic[A]):
    """How far an answer is; shared by the stream and its reader, which must not hold each other alive."""

    message_id: str = ""
    is_cancelled: bool = False
    answer: A | None = None

    def stop_if_cancelled(self) -> None:
        """Raises Aborted. For what was cancelled before the gateway knew of it."""
        if self.is_cancelled:
            raise Aborted("the request was cancelled")


class AnswerStream(Generic[C, A]):
    """Chunks of one answer, in order, as they come; an asynchronous iterator and context manager.

    The request is sent when the first chunk is asked for. Closing the stream (``aclose()``, leaving its ``async with``
    block, dropping it) before the end cancels the request everywhere. ``answer`` is the whole answer after the last
    chunk. Errors come out of the iteration, and the stream is over then. Up to MAX_UNREAD_CHUNKS wait for a slow
    reader; more end the stream with SlowReader.
    """

    def __init__(
        self, chunks: AsyncGenerator[C, None], progress: "_Progress[A]", say_cancel: "Callable[[str], Any]"
    ) -> None:
        self._chunks = chunks
        self._progress = progress
        self._say_cancel = say_cancel

    @property
    def answer(self) -> A | None:
        """The whole answer, once the stream has ended well."""
        return self._progress.answer

    async def cancel(self) -> None:
        """Cancel the request from any task; whoever iterates gets Aborted. Nothing happens when it is over."""
        self._progress.is_cancelled = True
        if self._progress.message_id:
            await self._say_cancel(self._progress.message_id)

    async def aclose(self) -> None:
        await self._chunks.aclose()

    def __aiter__(self) -> AsyncIterator[C]:
        return self

    async def __anext__(self) -> C:
        return await anext(self._chunks)

    async def __aenter__(self) -> "AnswerStream[C, A]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint(Generic[C, A]):
    """One of the two operations: how its chunks and its whole answer are read."""

    operation: Operation
    read_chunk: Callable[[bytes], C]
    read_answer: Callable[[bytes], A]


_CHAT: Final = _Endpoint(operation=Operation.CHAT, read_chunk=read_chat_chunk, read_answer=read_chat)
_COMPLETION: Final = _Endpoint(operation=Operation.COMPLETION, read_chunk=read_completion, read_answer=read_completion)


class MooncakeClient:
    """A connection to one gateway, for any number of requests at a time. Use it inside a running event loop::

        async with MooncakeClient("tcp://127.0.0.1:7710") as client:
            async for chunk in client.stream_chat([{"role": "user", "content": "Hello"}], max_tokens=64):
                print(chunk.text, end="", flush=True)

    Options are those of OpenAI's endpoints. Without *model* the one that the gateway serves is asked. A gateway that
    dies fails what was open with PeerUnreachable, at once; later calls reach its next life.

    *api_key* is the variable MOONCAKE_API_KEY unless given. *keys* is the folder that ``mooncake keys issue`` made for
    this client, for a gateway with keys on another machine (docs/security.md); ConfigError where it is not in order.

    ``caching`` has the calls of the context caching API.

    Raises (from every call): PeerUnreachable (KeyRefused: see *keys*), CallTimeout, InvalidApiKey; from requests also
    Rejected (``retry_after_s`` says when to come back), Draining, InvalidRequest (``param`` names the field) with
    ModelNotFound and TooLong, DeadlineExceeded, Aborted, SlowReader; WireError for a gateway of another version;
    MeshError for an address ZeroMQ does not take. All are MooncakeError and have ``code`` and ``retryable``.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        keys: "str | os.PathLike[str] | None" = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts()
        self._api_key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
        self._served: str | None = None
        mesh_keys = None if keys is None else key_folder.load(Path(keys))
        self._rpc = RpcClient(endpoint, on_lost=self._forget_model, keys=mesh_keys)
        self.caching: Final = Caching(CachingTransport(call=self._call_caching, served_model=self._served_model))

    async def __aenter__(self) -> "MooncakeClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; what is open fails with PeerUnreachable."""
        self._rpc.close()

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """The whole answer to a conversation. Cancelling the task that waits cancels the request everywhere."""
        return await self._whole(_CHAT, {"messages": messages, "model": model, **options}, timeouts)

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[ChatOptions],
    ) -> AnswerStream[ChatCompletionChunk, ChatCompletion]:
        """The answer to a conversation as it comes."""
        return self._stream(_CHAT, {"messages": messages, "model": model, **options}, timeouts)

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """The whole completion of *prompt*, without a chat template. Cancelled as :meth:`chat`."""
        return await self._whole(_COMPLETION, {"prompt": prompt, "model": model, **options}, timeouts)

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[CompletionOptions],
    ) -> AnswerStream[Completion, Completion]:
        """The completion of *prompt* as it comes."""
        return self._stream(_COMPLETION, {"prompt": prompt, "model": model, **options}, timeouts)

    async def models(self) -> tuple[Model, ...]:
        """The models that are served."""
        return read_models((await self._ask(ModelsQuery(api_key=self._api_key), Models)).response)

    async def health(self) -> HealthReport:
        """Whether the gateway lives, and whether the mesh behind it takes requests; if not, why."""
        return await self._ask(HealthQuery(), HealthReport)

    async def trace(self, request_id: str) -> tuple[RequestTrace, ...]:
        """What became of the request whose answer has this ``id``, a trace for each choice; empty when the gateway that
        is asked does not know it any more."""
        query = TraceQuery(request_id=request_id, api_key=self._api_key)
        return (await self._ask(query, Traces)).traces

    async def _call_caching(self, action: CachingAction, name: str, query: Mapping[str, str], request: bytes) -> bytes:
        call = CachingCall(action=action, request=request, name=name, query=dict(query), api_key=self._api_key)
        return (await self._ask(call, CachingAnswer, timeout_s=self._timeouts.first_token_s)).response

    async def _ask(self, query: object, expect: type[R], *, timeout_s: float | None = None) -> R:
        """*timeout_s* is ``connect_s`` unless given."""
        connect_s = self._timeouts.connect_s
        try:
            return await self._rpc.call(query, expect, timeout_s=timeout_s or connect_s, connect_timeout_s=connect_s)
        except RemoteFailure as failure:
            raise error_of(failure.failure) from None

    def _stream(
        self, endpoint: "_Endpoint[C, A]", request: dict[str, Any], timeouts: Timeouts | None
    ) -> AnswerStream[C, A]:
        progress: _Progress[A] = _Progress()
        chunks = self._chunks(endpoint, request, timeouts or self._timeouts, progress)
        return AnswerStream(chunks, progress, self._say_cancel)

    async def _whole(self, endpoint: "_Endpoint[C, A]", request: dict[str, Any], timeouts: Timeouts | None) -> A:
        """Streamed underneath: so the silence of either side is noticed within a token."""
        progress: _Progress[A] = _Progress()
        unread: _Endpoint[None, A] = _Endpoint(
            operation=endpoint.operation, read_chunk=lambda _: None, read_answer=endpoint.read_answer
        )
        async for _ in self._chunks(unread, request, timeouts or self._timeouts, progress):
            pass
        assert progress.answer is not None
        return progress.answer

    async def _chunks(
        self, endpoint: "_Endpoint[C, A]", request: dict[str, Any], timeouts: Timeouts, progress: "_Progress[A]"
    ) -> AsyncGenerator[C, None]:
        deadline_s = asyncio.get_running_loop().time() + timeouts.total_s
        body = await self._generate(endpoint.operation, request)
        progress.stop_if_cancelled()
        async with self._rpc.stream(
            body,
            timeout_s=timeouts.total_s,
            connect_timeout_s=timeouts.connect_s,
            max_items=MAX_UNREAD_CHUNKS,
        ) as replies:
            progress.stop_if_cancelled()
            progress.message_id = replies.message_id
            patience_s = timeouts.first_token_s
            try:
                while True:
                    left_s = deadline_s - asyncio.get_running_loop().time()
                    reply = await _next(replies, timeout_s=min(patience_s, left_s))
                    patience_s = timeouts.between_tokens_s
                    if isinstance(reply, GenerationEnd):
                        replies.ended = True
                        progress.answer = endpoint.read_answer(reply.response)
                        return
                    yield endpoint.read_chunk(reply.chunk)
            finally:
                progress.message_id = ""

    async def _generate(self, operation: Operation, request: dict[str, Any]) -> Generate:
        """Fills in the model. Raises InvalidRequest for what JSON cannot say."""
        fields = {name: value for name, value in request.items() if value is not None}
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if "model" not in fields:
            fields["model"] = await self._served_model()
        try:
            body = json.dumps(fields, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the request is not JSON: {error}") from error
        return Generate(operation=operation, request=body, api_key=self._api_key)

    async def _served_model(self) -> str:
        if self._served is None:
            names = [model.id for model in await self.models()]
            if not names:
                raise Rejected("no_instances", unavailable=True, retry_after_s=_NO_MODEL_RETRY_AFTER_S)
            if len(names) > 1:
                raise InvalidRequest(f"name one of the models: {', '.join(names)}", param="model")
            self._served = names[0]
        return self._served

    async def _say_cancel(self, message_id: str) -> None:
        await self._ask(Cancel(target=message_id, api_key=self._api_key), Ok)

    def _forget_model(self) -> None:
        """The next gateway on this address may serve another one."""
        self._served = None


async def _next(replies: ReplyStream, *, timeout_s: float) -> GenerationDelta | GenerationEnd:
    try:
        reply = await replies.next(timeout_s=timeout_s)
    except RemoteFailure as failure:
        raise error_of(failure.failure) from None
    if not isinstance(reply, GenerationDelta | GenerationEnd):
        raise WireError(f"the gateway answered {type(reply).__name__} to Generate")
    return reply
