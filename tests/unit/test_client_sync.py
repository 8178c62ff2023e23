"""The synchronous client, with its gateway on another thread."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mooncake_mesh.client import SyncMooncakeClient, Timeouts
from mooncake_mesh.errors import Aborted, InvalidRequest, MeshError, PeerUnreachable
from tests.unit.client_doubles import Gateway, fail, gateway_thread, say, say_and_stall, talk_for_ever

HELLO = [{"role": "user", "content": "Hello"}]


def wait_until(gateway: Gateway, *, cancelled: int) -> None:
    deadline = threading.Event()
    for _ in range(10_000):
        if gateway.cancelled == cancelled:
            return
        deadline.wait(0.001)
    raise AssertionError(f"{gateway.cancelled} of {cancelled} requests cancelled")


def threads_of_clients() -> int:
    return sum(thread.name == "mooncake-client" for thread in threading.enumerate())


def test_every_call() -> None:
    with gateway_thread(Gateway(say("Hel", "lo"))) as endpoint, SyncMooncakeClient(endpoint) as client:
        assert client.models()[0].id == "m"
        assert client.health().reasons == ("no_decode",)
        assert client.chat(HELLO, max_tokens=3).text == "Hello"
        assert client.generate("x").text == "Hello"
        assert [chunk.text for chunk in client.stream("x")] == ["Hel", "lo", ""]
        stream = client.stream_chat(HELLO)
        assert [chunk.text for chunk in stream] == ["Hel", "lo", ""]
        assert stream.answer is not None
        assert stream.answer.text == "Hello"
        with pytest.raises(StopIteration):
            next(stream)
    assert threads_of_clients() == 0


def test_errors_are_typed_and_come_out_of_the_loop() -> None:
    with (
        gateway_thread(Gateway(fail(InvalidRequest("no", param="top_p")))) as endpoint,
        SyncMooncakeClient(endpoint) as client,
    ):
        with pytest.raises(InvalidRequest) as caught:
            client.chat(HELLO)
        assert caught.value.param == "top_p"
        stream = client.stream_chat(HELLO)
        assert next(stream).text == "half"
        with pytest.raises(InvalidRequest):
            next(stream)


def test_four_threads_share_a_client() -> None:
    texts = ["a", "long", "answer", "in", "many", "chunks"]
    with gateway_thread(Gateway(say(*texts))) as endpoint, SyncMooncakeClient(endpoint) as client:

        def work(_: int) -> list[str]:
            return [chunk.text for chunk in client.stream_chat(HELLO)]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(40))) == [[*texts, ""]] * 40


@pytest.mark.parametrize("how", ["close", "leave", "drop"])
def test_who_stops_reading_ends_the_request(how: str) -> None:
    gateway = Gateway(talk_for_ever)
    with gateway_thread(gateway) as endpoint, SyncMooncakeClient(endpoint) as client:
        if how == "close":
            stream = client.stream_chat(HELLO)
            next(stream)
            stream.close()
        elif how == "leave":
            with client.stream_chat(HELLO) as stream:
                next(stream)
        else:
            next(client.stream_chat(HELLO))
        wait_until(gateway, cancelled=1)


def test_a_keyboard_interrupt_ends_the_request() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started without one
    gateway = Gateway(say_and_stall())
    with gateway_thread(gateway) as endpoint, SyncMooncakeClient(endpoint) as client:

        def interrupt() -> None:
            while not gateway.running:
                started.wait(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        started = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.chat(HELLO)
        wait_until(gateway, cancelled=1)


def test_an_interrupt_while_a_request_is_handed_over_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waking the loop lets other threads run, and the gateway may have the request before the caller goes on."""
    gateway = Gateway(say_and_stall())
    hand_over = asyncio.run_coroutine_threadsafe

    def interrupted(work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> NoReturn:
        hand_over(work, loop)
        started = threading.Event()
        while not gateway.running:
            started.wait(0.001)
        raise KeyboardInterrupt

    with gateway_thread(gateway) as endpoint, SyncMooncakeClient(endpoint) as client:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                client.chat(HELLO)
        wait_until(gateway, cancelled=1)


def test_cancel_from_another_thread_before_the_start() -> None:
    with gateway_thread(Gateway()) as endpoint, SyncMooncakeClient(endpoint) as client:
        stream = client.stream_chat(HELLO)
        stream.cancel()
        with pytest.raises(Aborted):
            next(stream)


def test_closing_fails_what_is_open_and_may_be_repeated() -> None:
    gateway = Gateway(say_and_stall())
    with gateway_thread(gateway) as endpoint, ThreadPoolExecutor(1) as pool:
        client = SyncMooncakeClient(endpoint)
        waiting = pool.submit(client.chat, HELLO)
        started = threading.Event()
        while not gateway.running:
            started.wait(0.001)
        client.close()
        client.close()
        with pytest.raises(PeerUnreachable):
            waiting.result(10)
        with pytest.raises(PeerUnreachable, match="closed"):
            client.models()
        stream = client.stream_chat(HELLO)
        with pytest.raises(PeerUnreachable, match="closed"):
            next(stream)
    assert threads_of_clients() == 0


def test_a_client_that_cannot_start_leaves_no_thread(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match="nonsense"):
        SyncMooncakeClient("nonsense")
    with SyncMooncakeClient(f"ipc://{tmp_path}/nobody", timeouts=Timeouts(connect_s=0.02)) as client:  # noqa: SIM117
        with pytest.raises(PeerUnreachable):
            client.health()
    assert threads_of_clients() == 0


def test_a_program_that_forgets_to_close_still_ends() -> None:
    script = "from mooncake_mesh.client import SyncMooncakeClient; client = SyncMooncakeClient('tcp://127.0.0.1:9')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30)
