"""A gateway that follows a script, for tests of the SDK: in this loop, or on a thread for the synchronous client."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from mooncake_mesh.mesh.rpc import Caller, Handler
from mooncake_proto.client import (
    Cancel,
    Generate,
    GenerationDelta,
    GenerationEnd,
    HealthQuery,
    HealthReport,
    Models,
    ModelsQuery,
    Operation,
)
from mooncake_proto.control import Ok
from tests.unit.mesh_doubles import ANY_PORT, reply_when_there_is_room, serving

HEAD: Final = {"id": "chatcmpl-1", "created": 17, "model": "m"}
USAGE: Final = {
    "prompt_tokens": 30,
    "completion_tokens": 2,
    "total_tokens": 32,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def chat_chunk(text: str, *, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {
        **HEAD,
        "choices": [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}],
    }


def completion_chunk(text: str, *, finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": finish}]}


def usage_chunk() -> dict[str, Any]:
    return {**HEAD, "choices": [], "usage": USAGE}


def whole_chat(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {**HEAD, "choices": [choice], "usage": USAGE}


def whole_completion(text: str) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": 0, "text": text, "finish_reason": "stop"}], "usage": USAGE}


Script = Callable[["Gateway", Caller], Awaitable[object]]


class Gateway:
    """Answers each request with *script*; ``requests`` are those that came, as JSON objects.

    ``more`` handles messages of other kinds.
    """

    def __init__(self, script: Script | None = None, *, models: tuple[str, ...] = ("m",)) -> None:
        self.script = script or say("Hel", "lo")
        self.models = list(models)
        self.more: dict[type, Handler] = {}
        self.model_queries = 0
        self.requests: list[dict[str, Any]] = []
        self.running = 0
        self.cancelled = 0
        self.cancels: list[str] = []

    def handlers(self) -> dict[type, Handler]:
        return {
            Generate: self._generate,
            Cancel: self._cancel,
            ModelsQuery: self._models,
            HealthQuery: lambda _, __: HealthReport(live=True, ready=False, reasons=("no_decode",)),
            **self.more,
        }

    async def _generate(self, request: Generate, caller: Caller) -> object:
        self.requests.append({"operation": request.operation, **json.loads(request.request)})
        self.running += 1
        try:
            return await self.script(self, caller)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    def _cancel(self, cancel: Cancel, _: Caller) -> Ok:
        self.cancels.append(cancel.target)
        return Ok()

    def _models(self, _: ModelsQuery, __: Caller) -> Models:
        self.model_queries += 1
        data = [{"id": name, "created": 17, "owned_by": "mooncake", "max_model_len": 512} for name in self.models]
        return Models(response=json.dumps({"object": "list", "data": data}).encode())


def say(*texts: str) -> Script:
    """A good answer in as many chunks."""

    async def script(gateway: Gateway, caller: Caller) -> GenerationEnd:
        is_chat = gateway.requests[-1]["operation"] is Operation.CHAT
        for text in texts:
            send(caller, chat_chunk(text) if is_chat else completion_chunk(text))
            await asyncio.sleep(0)
        send(caller, usage_chunk())
        whole = whole_chat("".join(texts)) if is_chat else whole_completion("".join(texts))
        return GenerationEnd(response=json.dumps(whole).encode())

    return script


def say_and_stall(*texts: str) -> Script:
    """Some chunks and then nothing, for ever."""

    async def script(_: Gateway, caller: Caller) -> None:
        for text in texts:
            send(caller, chat_chunk(text))
        await asyncio.get_running_loop().create_future()

    return script


async def talk_for_ever(_: Gateway, caller: Caller) -> None:
    """More chunks than anybody reads."""
    chunk = _delta(chat_chunk("x"))
    while True:
        await reply_when_there_is_room(caller, chunk)
        await asyncio.sleep(0)


def fail(error: Exception) -> Script:
    async def script(_: Gateway, caller: Caller) -> None:
        send(caller, chat_chunk("half"))
        raise error

    return script


def send(caller: Caller, chunk: dict[str, Any]) -> None:
    caller.reply(_delta(chunk))


def _delta(chunk: dict[str, Any]) -> GenerationDelta:
    return GenerationDelta(chunk=json.dumps(chunk).encode())


@asynccontextmanager
async def gateway_at(gateway: Gateway, bind: str = ANY_PORT) -> AsyncIterator[str]:
    """Serve *gateway* in this loop; its endpoint."""
    async with serving(gateway.handlers(), bind) as server:
        yield server.endpoint


@contextmanager
def gateway_thread(gateway: Gateway) -> Iterator[str]:
    """Serve *gateway* on a thread; its endpoint."""
    ready = threading.Event()
    found: list[Any] = []

    async def serve() -> None:
        stop = asyncio.Event()
        async with gateway_at(gateway) as endpoint:
            found.extend([endpoint, asyncio.get_running_loop(), stop])
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="gateway")
    thread.start()
    assert ready.wait(10)
    endpoint, loop, stop = found
    try:
        yield endpoint
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
