"""What dies, stalls or leaves while requests run; the texts must be those of an undisturbed mesh."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import pytest

from bench.fault_mesh import LEASES, placements
from mooncake_mesh.engine.fake import FakeConfig
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh
from tests.mesh.together import decoded_together

pytestmark = pytest.mark.mesh

SLOW = {
    "prefill": ["--fake-prefill-s-per-token=0.004", "--chunk-tokens=64", "--log-level=debug"],
    "decode": ["--fake-decode-s-base=0.01"],
}
TOKENS = 120
LONG_PROMPT = "a prompt that takes a while to prefill, " * 24
"""Four seconds: a test that stands still for a while still finds it under way."""


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[Mesh]:
    with Mesh(flags=SLOW, prefill_nodes=(0, 0), decode_nodes=(1, 1)) as mesh:
        yield mesh


@pytest.fixture
def mesh(slow_mesh: Mesh) -> Mesh:
    """Two prefill and two decode instances that take their time, whole again after whatever the last test did."""
    return slow_mesh.mended()


@pytest.fixture(scope="module")
def slow_small_mesh() -> Iterator[Mesh]:
    with Mesh(flags=SLOW) as mesh:
        yield mesh


@pytest.fixture
def small_mesh(slow_small_mesh: Mesh) -> Mesh:
    """As ``mesh``, but only one of each: nobody can stand in."""
    return slow_small_mesh.mended()


def _stream(mesh: Mesh, prompt: str, max_tokens: int = TOKENS) -> Stream:
    return Stream(mesh.http, prompt, max_tokens)


def _more_than(answers: Sequence[clients.Answer], n: int) -> bool | None:
    return len(answers) > n or None


def _decoding(mesh: Mesh) -> str:
    """Where the newest stream, which has begun, is decoded."""
    return str(placements(mesh)[-1]["decode"])


def _computing(mesh: Mesh, known: int) -> str:
    """Wait until the prompt of the request after *known* ones is being computed, and say where."""
    placed = mesh.wait(lambda: next(iter(placements(mesh)[known:]), None), what="a placement")
    mesh.wait_log(placed["prefill"], "prompt_begun", job_id=placed["job_id"])
    return str(placed["prefill"])


def _other(name: str) -> str:
    return name[:-1] + {"0": "1", "1": "0"}[name[-1]]


# --- at rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conductor", "gateway0", "prefill0", "decode0", "messenger0", "messenger1"])
def test_a_killed_process_comes_back_and_the_next_request_answers(small_mesh: Mesh, name: str) -> None:
    mesh = small_mesh
    prompt = f"before {name} died there were a few whole blocks of this prompt in both arenas"
    assert clients.complete(mesh.http, prompt, 40) == clients.expected_text(prompt, 40)
    lives = {other: mesh.incarnation(other) for other in mesh.names if other != name}
    mesh.kill(name)
    mesh.start(name)
    mesh.wait_healthy()
    assert {other: mesh.incarnation(other) for other in mesh.names if other != name} == lives
    assert clients.complete(mesh.http, prompt, 40) == clients.expected_text(prompt, 40)


def test_blocks_of_a_messengers_former_life_are_forgotten(small_mesh: Mesh) -> None:
    mesh = small_mesh
    prompt = "whole blocks that will be gone with the arena they lie in " * 3
    clients.complete(mesh.http, prompt, 2)
    mesh.wait(lambda: mesh.status().indexed_blocks["node0"] or None, what="node0 to tell its blocks")
    for name in ("messenger0", "messenger1"):
        mesh.kill(name)
        mesh.start(name)
    report = mesh.wait_healthy()
    assert set(report.indexed_blocks.values()) == {0}
    answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, 20)).json()
    assert answer["choices"][0]["text"] == clients.expected_text(prompt, 20)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_restarted_conductor_learns_the_blocks_again(small_mesh: Mesh) -> None:
    mesh = small_mesh
    prompt = "blocks that outlive the conductor, which only heard of them " * 3
    clients.complete(mesh.http, prompt, 2)
    before = mesh.wait(lambda: mesh.status().indexed_blocks["node0"] or None, what="node0 to tell its blocks")
    mesh.kill("conductor")
    mesh.start("conductor")
    mesh.wait_healthy()
    mesh.wait(lambda: mesh.status().indexed_blocks["node0"] >= before or None, what="node0 to tell its blocks again")
    answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, 2)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


# --- in the middle of a stream ----------------------------------------------------------------------------------------


def test_a_stream_goes_on_at_the_spare_decode_instance(mesh: Mesh) -> None:
    with _stream(mesh, "decode dies") as stream:
        stream.wait_chunks(10)
        mesh.kill(_decoding(mesh))
        assert stream.result() == clients.expected_text("decode dies", TOKENS)
    mesh.wait_idle()


def test_a_request_goes_on_at_the_spare_prefill_instance(mesh: Mesh) -> None:
    known = len(placements(mesh))
    with _stream(mesh, "prefill dies: " + LONG_PROMPT) as stream:
        mesh.kill(_computing(mesh, known))
        assert stream.text == ""
        assert stream.result() == clients.expected_text("prefill dies: " + LONG_PROMPT, TOKENS)
    mesh.wait_idle()


def test_a_stream_does_not_need_its_prefill_instance_any_more(mesh: Mesh) -> None:
    with _stream(mesh, "prefill dies late") as stream:
        stream.wait_chunks(10)
        mesh.kill("prefill0")
        mesh.kill("prefill1")
        assert stream.result() == clients.expected_text("prefill dies late", TOKENS)


@pytest.mark.parametrize("name", ["decode0", "messenger1"])
def test_a_stream_without_a_spare_goes_on_after_the_restart(small_mesh: Mesh, name: str) -> None:
    mesh, prompt = small_mesh, f"{name} dies and comes back"
    with _stream(mesh, prompt) as stream:
        stream.wait_chunks(10)
        mesh.kill(name)
        mesh.start(name)
        assert stream.result() == clients.expected_text(prompt, TOKENS)
    mesh.wait_idle()


@pytest.mark.parametrize("name", ["prefill0", "messenger0", "messenger1"])
def test_a_request_in_prefill_without_a_spare_goes_on_after_the_restart(small_mesh: Mesh, name: str) -> None:
    mesh, prompt = small_mesh, f"{name} dies and comes back: " + LONG_PROMPT
    known = len(placements(mesh))
    with _stream(mesh, prompt, 20) as stream:
        _computing(mesh, known)
        mesh.kill(name)
        mesh.start(name)
        assert stream.result() == clients.expected_text(prompt, 20)
    mesh.wait_idle()


def test_running_streams_do_not_need_the_conductor(small_mesh: Mesh) -> None:
    mesh = small_mesh
    with _stream(mesh, "the conductor dies") as stream:
        stream.wait_chunks(5)
        landed = [event["job_id"] for event in mesh.logs("decode0") if event["event"] == "kv_landed"]
        mesh.kill("conductor")
        assert stream.result() == clients.expected_text("the conductor dies", TOKENS)
    after = [event["job_id"] for event in mesh.logs("decode0") if event["event"] == "kv_landed"]
    assert after == landed, "the request was placed again"


def test_requests_that_come_while_the_conductor_restarts_wait_for_it_and_its_members(small_mesh: Mesh) -> None:
    """A new conductor can be asked before the workers have registered: "nobody is there" would be no answer."""
    mesh, stop = small_mesh, threading.Event()
    answers: list[clients.Answer] = []

    def ask() -> None:
        while not stop.is_set():
            answers.append(
                clients.post(mesh.http, "/v1/completions", clients.completion_fields("asked again and again", 2))
            )

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(3):
            mesh.kill("conductor")
            mesh.start("conductor")
            before = len(answers)
            mesh.wait(partial(_more_than, answers, before + 1), what="an answer of the new conductor's")
    finally:
        stop.set()
        asking.join()
    assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers]


def test_the_work_of_a_killed_gateway_is_dropped(small_mesh: Mesh) -> None:
    mesh = small_mesh
    with _stream(mesh, "the gateway dies", 4000) as stream:
        stream.wait_chunks(5)
        mesh.kill("gateway0")
        stream.wait_over()
        assert stream.done_marks == 0
    mesh.wait_idle()


def test_two_losses_in_one_stream(mesh: Mesh) -> None:
    with _stream(mesh, "decode dies twice", 2 * TOKENS) as stream:
        stream.wait_chunks(10)
        first = _decoding(mesh)
        mesh.kill(first)
        at = stream.chunks
        stream.wait_chunks(at + 20)
        mesh.start(first)
        mesh.kill(_other(first))
        assert stream.result() == clients.expected_text("decode dies twice", 2 * TOKENS)
    mesh.start(_other(first))
    mesh.wait_healthy()
    mesh.wait_idle()


def test_a_stalled_decode_instance_goes_on(small_mesh: Mesh) -> None:
    """A stall that is shorter than a lease: nothing but time is lost."""
    mesh = small_mesh
    with _stream(mesh, "decode stalls") as stream:
        stream.wait_chunks(10)
        mesh.stop("decode0")
        mesh.wait(lambda: _health(mesh, "decode0") == "suspect" or None, what="decode0 to be suspected")
        mesh.cont("decode0")
        assert stream.result() == clients.expected_text("decode stalls", TOKENS)
    mesh.wait_idle()


def test_a_decode_instance_that_stalls_until_it_is_declared_dead(mesh: Mesh) -> None:
    """Its request goes on elsewhere; what it still says when it wakes up changes nothing."""
    mesh.restart("conductor", *LEASES)
    mesh.wait_healthy()
    n_tokens = 4 * TOKENS  # it has to last until the other one wakes up
    with _stream(mesh, "decode stalls for long", n_tokens) as stream:
        stream.wait_chunks(10)
        stalled = _decoding(mesh)
        mesh.stop(stalled)
        mesh.wait(lambda: _health(mesh, stalled) == "dead" or None, what=f"{stalled} to be declared dead")
        mesh.wait(lambda: _decoding(mesh) != stalled or None, what="the stream to be placed again")
        mesh.cont(stalled)
        assert stream.result() == clients.expected_text("decode stalls for long", n_tokens)
    mesh.restart("conductor")
    mesh.wait_healthy()
    mesh.wait_idle()


def _health(mesh: Mesh, name: str) -> str:
    return next(state.health.value for state in mesh.status().cluster.members if state.member.instance_id == name)


# --- callers that leave, and time that runs out -----------------------------------------------------------------------


def test_a_client_that_leaves_during_prefill_frees_everything(mesh: Mesh) -> None:
    known = len(placements(mesh))
    with _stream(mesh, "leaves early: " + LONG_PROMPT) as stream:
        _computing(mesh, known)
        stream.disconnect()
    assert stream.text == ""
    mesh.wait_idle()


def test_a_client_that_leaves_during_decoding_frees_everything(mesh: Mesh) -> None:
    with _stream(mesh, "leaves late", 4000) as stream:
        stream.wait_chunks(5)
        stream.disconnect()
    mesh.wait_idle()


def test_a_hundred_aborted_streams_leave_nothing(mesh: Mesh) -> None:
    free = {state.member.instance_id: state.load.blocks_total for state in mesh.status().cluster.members}
    streams = [_stream(mesh, f"storm {number}", 2000) for number in range(100)]
    for number, stream in enumerate(streams):
        stream.__enter__()
        if number % 5 == 4:  # some leave before their answer begins, some after
            streams[number - 2].disconnect()
    streams[50].wait_chunks(1)  # and those behind it still wait for their prefill
    for stream in streams:
        stream.disconnect()
    report = mesh.wait_idle()
    assert {state.member.instance_id: state.load.blocks_total for state in report.cluster.members} == free
    assert clients.complete(mesh.http, "after the storm", 30) == clients.expected_text("after the storm", 30)


def test_a_deadline_ends_a_stream_with_one_error() -> None:
    flags = {**SLOW, "gateway": ["--request-deadline-s=0.5"]}
    with Mesh(flags=flags) as mesh:
        with _stream(mesh, "takes too long", 4000) as stream:
            stream.wait_over()
        assert [error["code"] for error in stream.errors] == ["deadline_exceeded"]
        assert stream.finish_reasons == []
        answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields("whole", 4000))
        assert (answer.status, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        mesh.wait_idle()


# --- a pool that is too small -----------------------------------------------------------------------------------------


def test_sequences_that_outgrow_the_pool_make_room_for_each_other() -> None:
    """16 blocks at the decode node; either sequence grows to 10: the younger one gives way and is placed again."""
    layout = KvLayout(layers=2, kv_heads=2, head_dim=256, dtype=KvDtype.BFLOAT16, block_tokens=16)
    config = FakeConfig(name="fake", layout=layout)
    wide = ["--fake-head-dim=256"]
    flags = {
        "prefill": wide,
        "decode": [*wide, "--fake-decode-s-base=0.005", "--swap-most-bytes=0"],
        "messenger1": ["--arena-bytes=1MiB"],
    }
    with Mesh(flags=flags) as mesh:
        prompts = ["the first of two that grow", "the other of two that grow"]
        with ExitStack() as stack:
            with decoded_together(mesh, 2):
                streams = [stack.enter_context(_stream(mesh, prompt)) for prompt in prompts]
            texts = [stream.result() for stream in streams]
        assert texts == [clients.expected_text(prompt, TOKENS, config) for prompt in prompts]
        assert mesh.find_log("decode0", "job_preempted", swapped=False) is not None
        mesh.wait_idle()


# --- orderly ends -----------------------------------------------------------------------------------------------------


def test_a_gateway_that_is_told_to_stop_finishes_its_streams(small_mesh: Mesh) -> None:
    mesh = small_mesh
    n_tokens = 4 * TOKENS  # it has to last until the refusal
    with _stream(mesh, "the gateway drains", n_tokens) as stream:
        stream.wait_chunks(5)
        base = mesh.http
        mesh.terminate("gateway0")
        mesh.wait_log("gateway0", "stopping")
        refused = mesh.wait(lambda: _refused(base), what="the gateway to refuse new requests")
        assert refused.json()["error"]["code"] == "draining"
        assert stream.result() == clients.expected_text("the gateway drains", n_tokens)
    assert mesh.exit_code("gateway0") == 0


def _refused(base: str) -> clients.Answer | None:
    answer = clients.post(base, "/v1/completions", clients.completion_fields("too late", 1))
    return answer if answer.status == 503 else None


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_is_told_to_stop_finishes_its_jobs(mesh: Mesh, role: str) -> None:
    prompt = f"{role} drains: " + (LONG_PROMPT if role == "prefill" else "")
    known = len(placements(mesh))
    with _stream(mesh, prompt) as stream:
        if role == "decode":
            stream.wait_chunks(5)
        name = _decoding(mesh) if role == "decode" else _computing(mesh, known)
        mesh.terminate(name)
        assert stream.result() == clients.expected_text(prompt, TOKENS)
    assert mesh.exit_code(name) == 0
    assert clients.complete(mesh.http, "who is left", 10) == clients.expected_text("who is left", 10)
