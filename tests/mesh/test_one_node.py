"""Prefill and decode on one node: both have blocks of a request in the same arena."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

SLOW = {"prefill": ["--fake-prefill-s-per-token=0.008"], "decode": ["--fake-decode-s-base=0.01"]}
PROMPT = "both of its jobs ask the same messenger for blocks, and the KV goes from one to the other"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(prefill_nodes=(0,), decode_nodes=(0,)) as mesh:
        yield mesh


@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_the_answer_is_the_same(mesh: Mesh, n_tokens: int) -> None:
    assert clients.complete(mesh.http, PROMPT, n_tokens) == clients.expected_text(PROMPT, n_tokens)


def test_kv_goes_from_one_to_the_other_without_being_moved(mesh: Mesh) -> None:
    """Also the block that is not full, in which decoding goes on."""
    text = clients.complete(mesh.http, f"{PROMPT} at once", 40)
    assert text == clients.expected_text(f"{PROMPT} at once", 40)
    mesh.wait_log("prefill0", "prefill_sent", transport="arena", sent_bytes=0)
    assert {entry["transport"] for entry in mesh.logs("prefill0") if entry["event"] == "prefill_sent"} == {"arena"}


def test_stages_hand_over_what_each_of_them_wrote() -> None:
    """Each tells of its layers on a connection of its own; nothing is taken before the last of them has."""
    flags = {"prefill": ["--fake-layers=5", "--chunk-tokens=32"], "decode": ["--fake-layers=5"]}
    config = replace(clients.FAKE, layout=replace(clients.FAKE.layout, layers=5))
    with Mesh(prefill_nodes=(0,), prefill_stages=3, decode_nodes=(0,), flags=flags) as mesh:
        for number in range(20):
            prompt = f"{number} " + PROMPT
            assert clients.complete(mesh.http, prompt, 20) == clients.expected_text(prompt, 20, config)
        mesh.wait_log("prefill0", "prefill_sent", transport="arena", sent_bytes=0)
        mesh.wait_idle()


def test_what_was_computed_and_decoded_is_found_again(mesh: Mesh) -> None:
    text = clients.complete(mesh.http, PROMPT, 40)
    got = clients.post(mesh.http, "/v1/completions", clients.completion_fields(PROMPT + text + " and on", 5))
    assert got.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > len(PROMPT)


def test_nothing_is_held_afterwards(mesh: Mesh) -> None:
    for number in range(5):
        clients.complete(mesh.http, f"{number} {PROMPT}", 30)
    mesh.wait_idle()


def test_prompts_that_fill_the_arena_do_not_wait_for_room_that_they_take_themselves() -> None:
    """Each has seven of 128 blocks, and is decoded in those: 24 at once are computed long before they are decoded.

    It comes to nine blocks. How many are served, of more than have room, is a matter of who grows when.
    """
    wide = ["--fake-head-dim=32"]
    flags = {"prefill": [*wide, "--fake-prefill-s-per-token=0.0005"], "decode": [*wide, "--fake-decode-s-base=0.005"]}
    config = replace(clients.FAKE, layout=replace(clients.FAKE.layout, head_dim=32))
    with Mesh(prefill_nodes=(0,), decode_nodes=(0,), arena_bytes="1MiB", flags=flags) as mesh, ExitStack() as kept:
        prompts = [f"{number} " + "x" * 100 for number in range(24)]
        streams = [kept.enter_context(Stream(mesh.http, prompt, 30)) for prompt in prompts]
        for stream in streams:
            stream.wait_over()
        served = [stream for stream in streams if stream.status == 200]
        refusals = {str(error) for stream in streams for error in stream.errors}
        assert all("kv_in_progress" in refusal for refusal in refusals), refusals
        assert len(served) >= 128 // 10
        assert [stream.result() for stream in served] == [
            clients.expected_text(stream.prompt, 30, config) for stream in served
        ]
        mesh.wait_idle()


# --- losses: each worker and the one messenger, while a prompt is computed and while it is decoded --------------------


@pytest.fixture(scope="module")
def slow_mesh() -> Iterator[Mesh]:
    with Mesh(flags=SLOW, prefill_nodes=(0,), decode_nodes=(0,)) as mesh:
        yield mesh


@pytest.mark.parametrize("name", ["prefill0", "decode0", "messenger0"])
@pytest.mark.parametrize("is_decoding", [False, True], ids=["in prefill", "in decoding"])
def test_a_request_goes_on_after_the_restart(slow_mesh: Mesh, name: str, is_decoding: bool) -> None:
    mesh, prompt = slow_mesh, f"{name} dies {'late' if is_decoding else 'early'}: " + PROMPT * 2
    with Stream(mesh.http, prompt, 60) as stream:
        if is_decoding:
            stream.wait_chunks(5)
        else:
            mesh.wait_busy("prefill")
        mesh.kill(name)
        mesh.start(name)
        assert stream.result() == clients.expected_text(prompt, 60)
    mesh.wait_healthy()
    mesh.wait_idle()
