"""The asynchronous client against a gateway that follows a script."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh import client as sdk
from mooncake_mesh.client import (
    ChatChunkChoice,
    Delta,
    Model,
    MooncakeClient,
    Timeouts,
    Usage,
    aio,
)
from mooncake_mesh.errors import (
    Aborted,
    CallTimeout,
    InvalidRequest,
    MeshError,
    PeerUnreachable,
    Rejected,
    SlowReader,
)
from mooncake_mesh.mesh.rpc import Caller
from mooncake_proto.client import GenerationEnd, HealthReport, Operation
from mooncake_proto.control import Ok
from mooncake_proto.errors import MalformedMessage, WireError
from tests.unit.client_doubles import Gateway, chat_chunk, fail, gateway_at, say, say_and_stall, send, talk_for_ever
from tests.unit.mesh_doubles import Run, on_both_loops, soon, until

pytestmark = on_both_loops

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_chat_as_it_comes_and_as_a_whole(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(say("Hel", "lo"))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            stream = client.stream_chat(HELLO, max_tokens=4, temperature=None)
            chunks = [chunk async for chunk in stream]
            assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
            assert chunks[0].choices == (ChatChunkChoice(index=0, delta=Delta(content="Hel")),)
            assert [chunk.usage for chunk in chunks[:2]] == [None, None]
            assert chunks[2].usage == Usage(prompt_tokens=30, completion_tokens=2, total_tokens=32, cached_tokens=16)
            answer = await client.chat(HELLO, max_tokens=4)
            assert stream.answer == answer
            assert (answer.text, answer.choices[0].finish_reason, answer.usage.cached_tokens) == ("Hello", "stop", 16)
            assert gateway.requests[0] == gateway.requests[1]
            assert gateway.requests[0] == {
                "operation": Operation.CHAT,
                "model": "m",
                "messages": HELLO,
                "max_tokens": 4,
                "stream": True,
                "stream_options": {"include_usage": True},
            }

    run(scenario())


def test_a_completion_as_it_comes_and_as_a_whole(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(say("a", "b"))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            stream = client.stream([1, 2, 3], model="m", seed=7)
            assert [chunk.text async for chunk in stream] == ["a", "b", ""]
            assert (await client.generate("x", model="other")).text == "ab"
            assert stream.answer is not None
            assert [request["operation"] for request in gateway.requests] == [Operation.COMPLETION] * 2
            assert (gateway.requests[0]["prompt"], gateway.requests[0]["seed"]) == ([1, 2, 3], 7)
            assert (gateway.requests[1]["model"], gateway.model_queries) == ("other", 0)

    run(scenario())


def test_models_and_health(run: Run[None]) -> None:
    async def scenario() -> None:
        async with gateway_at(Gateway()) as endpoint, MooncakeClient(endpoint) as client:
            assert await client.models() == (Model(id="m", created=17, owned_by="mooncake", max_model_len=512),)
            assert await client.health() == HealthReport(live=True, ready=False, reasons=("no_decode",))

    run(scenario())


def test_the_model_that_is_served_is_asked_for_once_in_each_life_of_the_gateway(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        address = f"ipc://{tmp_path}/sdk"
        async with MooncakeClient(address) as client:
            for model in ("old", "new"):
                gateway = Gateway(models=(model,))
                async with gateway_at(gateway, address):
                    await client.generate("x")
                    await client.generate("y")
                    assert [request["model"] for request in gateway.requests] == [model, model]
                    assert gateway.model_queries == 1
                await until(lambda: not client._rpc.is_connected)

    run(scenario())


def test_no_model_and_several(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(models=())
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            with pytest.raises(Rejected) as rejected:
                await client.chat(HELLO)
            assert (rejected.value.reason, rejected.value.unavailable) == ("no_instances", True)
            gateway.models = ["a", "b"]
            with pytest.raises(InvalidRequest, match="name one of the models: a, b") as invalid:
                await client.chat(HELLO)
            assert invalid.value.param == "model"

    run(scenario())


@pytest.mark.parametrize("bad", [float("nan"), {1, 2}, b"x"], ids=repr)
def test_what_json_cannot_say_is_refused_here(run: Run[None], bad: Any) -> None:
    async def scenario() -> None:
        gateway = Gateway()
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            with pytest.raises(InvalidRequest, match="not JSON"):
                await client.generate(bad)
            assert gateway.requests == []

    run(scenario())


# --- exactly one outcome ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole", "streamed"])
def test_a_failure_after_some_text_is_typed_and_final(run: Run[None], how: str) -> None:
    async def scenario() -> None:
        gateway = Gateway(fail(Rejected("decode_overloaded", unavailable=True, retry_after_s=2.5)))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            texts: list[str] = []
            with pytest.raises(Rejected) as caught:  # noqa: PT012
                if how == "whole":
                    await client.chat(HELLO)
                else:
                    stream = client.stream_chat(HELLO)
                    async for chunk in stream:
                        texts.append(chunk.text)  # noqa: PERF401
            error = caught.value
            assert (error.reason, error.unavailable, error.retry_after_s) == ("decode_overloaded", True, 2.5)
            if how == "streamed":
                assert texts == ["half"]
                assert stream.answer is None
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)

    run(scenario())


@pytest.mark.parametrize("chunk", [{}, {"id": 1}, []], ids=repr)
def test_an_answer_that_makes_no_sense_is_a_wire_error(run: Run[None], chunk: Any) -> None:
    async def nonsense(_: Gateway, caller: Any) -> Ok:
        send(caller, chunk)
        return Ok()

    async def scenario() -> None:
        gateway = Gateway(nonsense)
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            with pytest.raises(MalformedMessage, match="not as expected"):
                await anext(client.stream_chat(HELLO))
            with pytest.raises(WireError, match="answered Ok to Generate"):
                await client.chat(HELLO)
            gateway.script = _end_badly
            with pytest.raises(MalformedMessage):
                await client.chat(HELLO)

    run(scenario())


async def _end_badly(_: Gateway, __: Any) -> GenerationEnd:
    return GenerationEnd(response=b"{")


def test_a_gateway_that_dies_ends_every_stream_at_once(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(say_and_stall("half"))
        async with asyncio.TaskGroup() as tasks:
            async with gateway_at(gateway) as endpoint:
                client = MooncakeClient(endpoint)
                stream = client.stream_chat(HELLO)
                assert (await anext(stream)).text == "half"
                whole = tasks.create_task(_outcome(client.chat(HELLO)))
                await until(lambda: gateway.running == 2)
            with pytest.raises(PeerUnreachable):
                await soon(anext(stream))
            assert isinstance(await soon(whole), PeerUnreachable)
            client.close()

    run(scenario())


async def _outcome(call: Any) -> object:
    try:
        return await call
    except sdk.MooncakeError as error:
        return error


def test_nobody_there_is_told_within_the_time_to_connect(run: Run[None], tmp_path: Path) -> None:
    async def scenario() -> None:
        timeouts = Timeouts(connect_s=0.02)
        async with MooncakeClient(f"ipc://{tmp_path}/nobody", timeouts=timeouts) as client:
            for call in (client.models(), client.health(), client.chat(HELLO), client.chat(HELLO, model="m")):
                with pytest.raises(PeerUnreachable):
                    await soon(call)

    run(scenario())


def test_an_address_that_is_none_is_refused(run: Run[None]) -> None:
    async def scenario() -> None:
        with pytest.raises(MeshError, match="nonsense"):
            MooncakeClient("nonsense")

    run(scenario())


@pytest.mark.parametrize(
    ("said", "timeouts"),
    [
        ((), Timeouts(first_token_s=0.05)),
        (("half",), Timeouts(between_tokens_s=0.05)),
        (("half",), Timeouts(total_s=0.2)),
    ],
    ids=["first", "between", "total"],
)
def test_silence_is_a_timeout_and_ends_the_request(run: Run[None], said: tuple[str, ...], timeouts: Timeouts) -> None:
    async def scenario() -> None:
        gateway = Gateway(say_and_stall(*said))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            while not gateway.requests:  # on a machine that stands still one may be over before it begins there
                with pytest.raises(CallTimeout):
                    await client.chat(HELLO, timeouts=timeouts)
            await until(lambda: gateway.cancelled == len(gateway.requests))

    run(scenario())


@pytest.mark.parametrize("name", ["connect_s", "first_token_s", "between_tokens_s", "total_s"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_timeouts_are_positive_and_finite(run: Run[None], name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        Timeouts(**{name: seconds})


# --- who stops reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["aclose", "leave", "drop", "cancel the task"])
def test_who_stops_reading_ends_the_request(run: Run[None], how: str) -> None:
    async def scenario() -> None:
        gateway = Gateway(talk_for_ever)
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            if how == "aclose":
                stream = client.stream_chat(HELLO)
                await anext(stream)
                await stream.aclose()
                await stream.aclose()
            elif how == "leave":
                async with client.stream_chat(HELLO) as stream:
                    await anext(stream)
            elif how == "drop":
                async for _ in client.stream_chat(HELLO):
                    break
                gc.collect()
            else:
                async with asyncio.TaskGroup() as tasks:
                    whole = tasks.create_task(client.chat(HELLO))
                    await until(lambda: gateway.running)
                    whole.cancel()
            await until(lambda: gateway.cancelled == 1)
            assert gateway.running == 0

    run(scenario())


def test_an_explicit_cancel_names_its_request_while_it_runs(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(say_and_stall("half"))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            early = client.stream_chat(HELLO)
            await early.cancel()
            with pytest.raises(Aborted):
                await anext(early)
            assert (gateway.cancels, gateway.requests) == ([], [])
            running = client.stream_chat(HELLO)
            await anext(running)
            await running.cancel()
            assert len(gateway.cancels) == 1
            await running.aclose()
            await running.cancel()
            assert len(gateway.cancels) == 1, "it is over"

    run(scenario())


def test_a_reader_that_falls_far_behind_is_told(run: Run[None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "MAX_UNREAD_CHUNKS", 8)

    async def scenario() -> None:
        has_read = asyncio.Event()

        async def script(gateway: Gateway, caller: Caller) -> None:
            send(caller, chat_chunk("first"))
            await has_read.wait()
            await talk_for_ever(gateway, caller)

        gateway = Gateway(script)
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            stream = client.stream_chat(HELLO)
            await anext(stream)
            has_read.set()
            await until(lambda: gateway.cancelled == 1)
            with pytest.raises(SlowReader):
                await anext(stream)

    run(scenario())


def test_many_requests_share_a_connection(run: Run[None]) -> None:
    async def scenario() -> None:
        gateway = Gateway(say(*"a long answer in many chunks"))
        async with gateway_at(gateway) as endpoint, MooncakeClient(endpoint) as client:
            answers = await asyncio.gather(*(client.chat(HELLO) for _ in range(32)))
            assert {answer.text for answer in answers} == {"a long answer in many chunks"}

    run(scenario())
