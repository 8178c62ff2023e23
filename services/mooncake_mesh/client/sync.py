"""The synchronous client: the asynchronous one on a thread of its own."""

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Generic, TypeVar, Unpack

from mooncake_mesh.client.aio import DEFAULT_ENDPOINT, AnswerStream, MooncakeClient, Prompt
from mooncake_mesh.client.answers import ChatCompletion, ChatCompletionChunk, Completion, Model
from mooncake_mesh.client.client_loop import ClientLoop
from mooncake_mesh.client.options import ChatOptions, CompletionOptions, Message
from mooncake_mesh.client.sync_caching import SyncCaching
from mooncake_mesh.client.timeouts import Timeouts
from mooncake_proto.client import HealthReport, RequestTrace

C = TypeVar("C")
A = TypeVar("A")


class SyncAnswerStream(Generic[C, A]):
    """As AnswerStream, for plain loops and ``with`` blocks. One thread at a time; ``cancel()`` from any."""

    def __init__(self, loop: ClientLoop, stream: AnswerStream[C, A]) -> None:
        self._loop = loop
        self._stream = stream

    @property
    def answer(self) -> A | None:
        """The whole answer, once the stream has ended well."""
        return self._stream.answer

    def cancel(self) -> None:
        """Cancel the request; whoever iterates gets Aborted. Nothing happens when it is over."""
        self._loop.run(self._stream.cancel())

    def close(self) -> None:
        """Stop reading: cancels the request if it still runs."""
        self._loop.run(self._stream.aclose())

    def __iter__(self) -> Iterator[C]:
        return self

    def __next__(self) -> C:
        reading = _next_or_none(self._stream)
        chunk = self._loop.run(reading)
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> "SyncAnswerStream[C, A]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next_or_none(stream: AnswerStream[C, A]) -> C | None:
    """StopIteration cannot travel through a future."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return None


class SyncMooncakeClient:
    """MooncakeClient for programs without an event loop, safe to use from several threads::

        with SyncMooncakeClient("tcp://127.0.0.1:7710") as client:
            print(client.chat([{"role": "user", "content": "Hello"}], max_tokens=64).text)
            for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="", flush=True)

    Same calls, options and errors; ``close()`` ends its thread and fails what is open with PeerUnreachable.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeouts: Timeouts | None = None,
        api_key: str | None = None,
        keys: "str | os.PathLike[str] | None" = None,
    ) -> None:
        self._loop = ClientLoop(lambda: MooncakeClient(endpoint, timeouts=timeouts, api_key=api_key, keys=keys))
        self.caching: Final = SyncCaching(self._loop)

    def __enter__(self) -> "SyncMooncakeClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread. Any number of times."""
        self._loop.close()

    def chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[ChatOptions],
    ) -> ChatCompletion:
        """The whole answer to a conversation. KeyboardInterrupt cancels the request everywhere."""
        return self._loop.run(self._client.chat(messages, model=model, timeouts=timeouts, **options))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[ChatOptions],
    ) -> SyncAnswerStream[ChatCompletionChunk, ChatCompletion]:
        """The answer to a conversation as it comes."""
        stream = self._client.stream_chat(messages, model=model, timeouts=timeouts, **options)
        return SyncAnswerStream(self._loop, stream)

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """The whole completion of *prompt*, without a chat template. Cancelled as :meth:`chat`."""
        return self._loop.run(self._client.generate(prompt, model=model, timeouts=timeouts, **options))

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        timeouts: Timeouts | None = None,
        **options: Unpack[CompletionOptions],
    ) -> SyncAnswerStream[Completion, Completion]:
        """The completion of *prompt* as it comes."""
        stream = self._client.stream(prompt, model=model, timeouts=timeouts, **options)
        return SyncAnswerStream(self._loop, stream)

    def models(self) -> tuple[Model, ...]:
        """The models that are served."""
        return self._loop.run(self._client.models())

    def health(self) -> HealthReport:
        """Whether the gateway lives, and whether the mesh behind it takes requests; if not, why."""
        return self._loop.run(self._client.health())

    def trace(self, request_id: str) -> tuple[RequestTrace, ...]:
        """What became of the request whose answer has this ``id``."""
        return self._loop.run(self._client.trace(request_id))

    @property
    def _client(self) -> MooncakeClient:
        return self._loop.client
