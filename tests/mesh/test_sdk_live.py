"""The SDK against a mesh of real processes, and against HTTP."""

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq

from mooncake_mesh.client import (
    Aborted,
    Draining,
    InvalidRequest,
    ModelNotFound,
    MooncakeClient,
    PeerUnreachable,
    Rejected,
    SyncMooncakeClient,
    Timeouts,
    TooLong,
)
from tests.mesh import clients
from tests.mesh.harness import MODEL, Mesh

pytestmark = pytest.mark.mesh

GUIDE = Path(__file__).parents[2] / "docs" / "sdk.md"
HELLO = [{"role": "user", "content": "Hello"}]
SLOW = {"decode": ["--fake-decode-s-base=0.02"]}


@pytest.fixture(autouse=True, scope="module")
def _no_socket_is_left() -> Iterator[None]:
    """ZeroMQ's context ends only when every socket is closed, and takes its threads' descriptors with it."""
    yield
    zmq.Context.instance().term()


@pytest.fixture(scope="module")
def fake_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """For all tests of this module that do it no lasting harm; with context caches."""
    file = tmp_path_factory.mktemp("sdk") / "caches.sqlite"
    with Mesh(flags={"gateway": [f"--cache-db={file}"]}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[Mesh]:
    """Slow enough that a request is still running when something is done to it."""
    with Mesh(flags=SLOW) as mesh:
        yield mesh


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 50))


def test_models_and_health(fake_mesh: Mesh) -> None:
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        assert [model.id for model in client.models()] == [MODEL]
        health = client.health()
        assert (health.live, health.ready, health.reasons) == (True, True, ())


def test_a_stream_says_what_http_says(fake_mesh: Mesh) -> None:
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0}
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        text = client.generate("Once upon a time", **options).text
        assert text == clients.complete(fake_mesh.http, "Once upon a time", 24)
        assert text == clients.expected_text("Once upon a time", 24)
        stream = client.stream("Once upon a time", **options)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == text
        assert stream.answer is not None
        assert (stream.answer.text, stream.answer.usage) == (text, chunks[-1].usage)

        over_http = clients.post(
            fake_mesh.http, "/v1/chat/completions", {"model": MODEL, "messages": HELLO, **options}
        ).json()
        chat = client.chat(HELLO, **options)
        assert chat.text == over_http["choices"][0]["message"]["content"]
        assert "".join(chunk.text for chunk in client.stream_chat(HELLO, **options)) == chat.text
        assert chat.usage.prompt_tokens == over_http["usage"]["prompt_tokens"]


def test_a_prompt_that_is_known_is_not_computed_again(fake_mesh: Mesh) -> None:
    prompt = "A prompt of several blocks that nobody else in this module sends. " * 4
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        first = client.generate(prompt, max_tokens=2)
        again = client.generate(prompt, max_tokens=2)
        assert first.usage is not None
        assert again.usage is not None
        assert first.usage.cached_tokens == 0
        assert again.usage.cached_tokens >= 16


def test_two_choices_and_logprobs(fake_mesh: Mesh) -> None:
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        stream = client.stream_chat(HELLO, n=2, max_tokens=8, temperature=0, logprobs=True, top_logprobs=1)
        texts = {0: "", 1: ""}
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content
        assert stream.answer is not None
        assert {choice.index: choice.message.content for choice in stream.answer.choices} == texts
        assert {choice.finish_reason for choice in stream.answer.choices} == {"length"}
        logprobs = stream.answer.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs["content"]) == 8


def test_mistakes_are_typed_and_the_next_request_answers(fake_mesh: Mesh) -> None:
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        with pytest.raises(ModelNotFound) as unknown:
            client.chat(HELLO, model="nobody")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(TooLong):
            client.generate("x" * 200_000)
        with pytest.raises(InvalidRequest) as absurd:
            client.chat(HELLO, n=10_000)
        assert (type(absurd.value), absurd.value.param) == (InvalidRequest, "n")
        assert client.generate("fine", max_tokens=1).choices[0].finish_reason == "length"


def test_a_cancel_ends_the_reader_and_frees_everything(slow_mesh: Mesh) -> None:
    async def scenario() -> None:
        async with MooncakeClient(slow_mesh.sdk) as client:
            told = client.stream_chat(HELLO, max_tokens=2000)
            left = client.stream_chat(HELLO, max_tokens=2000)
            await anext(told)
            await anext(left)
            await told.cancel()
            with pytest.raises(Aborted):
                async for _ in told:
                    pass
            await left.aclose()
            whole = asyncio.ensure_future(client.chat(HELLO, max_tokens=2000))  # noqa: TID251
            await asyncio.sleep(0)
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
            await asyncio.to_thread(slow_mesh.wait_idle)

    run(scenario())


def test_a_client_that_is_gone_frees_everything(slow_mesh: Mesh) -> None:
    client = SyncMooncakeClient(slow_mesh.sdk)
    stream = client.stream_chat(HELLO, max_tokens=2000)
    next(stream)
    client.close()
    slow_mesh.wait_idle()
    with pytest.raises(PeerUnreachable):
        next(stream)


def test_four_threads_share_a_client(fake_mesh: Mesh) -> None:
    with SyncMooncakeClient(fake_mesh.sdk) as client, ThreadPoolExecutor(4) as pool:

        def ask(number: int) -> bool:
            prompt = f"Thread question {number}"
            chunks = client.stream(prompt, max_tokens=16, temperature=0)
            return "".join(chunk.text for chunk in chunks) == clients.expected_text(prompt, 16)

        assert all(pool.map(ask, range(32)))
    assert not [thread for thread in threading.enumerate() if thread.name == "mooncake-client"]


def test_a_gateway_that_is_killed_ends_its_streams_and_its_next_life_answers(own_mesh: Mesh) -> None:
    async def scenario() -> None:
        async with MooncakeClient(own_mesh.sdk, timeouts=Timeouts(connect_s=20)) as client:
            stream = client.stream_chat(HELLO, max_tokens=60_000)
            await anext(stream)
            own_mesh.kill("gateway0")
            with pytest.raises(PeerUnreachable):
                async for _ in stream:
                    pass
            own_mesh.start("gateway0")
            await asyncio.to_thread(own_mesh.wait_healthy)
            assert (await client.generate("fine", max_tokens=2)).usage is not None

    run(scenario())


def test_a_gateway_that_stops_in_order_finishes_its_streams_and_takes_no_more(slow_mesh: Mesh) -> None:
    with SyncMooncakeClient(slow_mesh.sdk) as client:
        stream = client.stream("x", max_tokens=300, ignore_eos=True)  # it has to last until the refusal
        next(stream)
        slow_mesh.terminate("gateway0")

        def refused() -> bool | None:
            try:
                client.generate("x", model=MODEL, max_tokens=1)
            except Draining:
                return True
            return None

        assert slow_mesh.wait(refused, what="a refusal")
        assert list(stream)[-1].usage is not None
        assert stream.answer is not None
        assert stream.answer.choices[0].finish_reason == "length"
        assert slow_mesh.exit_code("gateway0") == 0
    slow_mesh.start("gateway0")
    slow_mesh.wait_healthy()


def test_a_mesh_without_decoders_says_when_to_come_back(own_mesh: Mesh) -> None:
    with SyncMooncakeClient(own_mesh.sdk) as client:
        own_mesh.terminate("decode0")
        own_mesh.exit_code("decode0")

        def refused() -> Rejected | None:
            try:
                client.generate("x", model=MODEL, max_tokens=1)
            except Rejected as rejected:
                return rejected
            return None

        rejected = own_mesh.wait(refused, what="a refusal")
        assert rejected.unavailable
        assert rejected.retry_after_s > 0
        own_mesh.start("decode0")
        own_mesh.wait_healthy()
        assert client.generate("x", max_tokens=1).usage is not None


def test_the_guide_does_what_it_says(fake_mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    """Every Python block of docs/sdk.md is a program."""
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        program = block.replace("tcp://127.0.0.1:7710", fake_mesh.sdk)
        assert fake_mesh.sdk in program, "a block that names no endpoint would ask another mesh"
        exec(compile(program, str(GUIDE), "exec"), {"__name__": "guide"})
        assert capsys.readouterr().out.strip(), f"says nothing:\n{block}"


def test_a_request_is_traced_by_the_id_of_its_answer(fake_mesh: Mesh) -> None:
    with SyncMooncakeClient(fake_mesh.sdk) as client:
        answer = client.generate("What becomes of me?", max_tokens=6, n=2)
        traces = client.trace(answer.id)
        assert [trace.request_id for trace in traces] == [f"{answer.id.removeprefix('cmpl-')}-{k}" for k in (0, 1)]
        for trace in traces:
            assert (trace.is_over, trace.generated_tokens) == (True, 6)
            whats = [step.what for step in trace.steps]
            assert whats[:2] == ["received", "placed"]
            assert whats[-1] == "finished"
            assert {"queued", "prefill", "decode"} <= set(whats)
        assert client.trace("cmpl-nobody") == ()
