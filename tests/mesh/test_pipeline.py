"""A prefill instance of two processes: same text, KV of both in the pool, and what follows when one of them dies."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mooncake_proto.control import Role
from mooncake_proto.ids import InstanceId
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

FLAGS = {
    "prefill": ["--fake-prefill-s-per-token=0.003", "--chunk-tokens=32", "--fake-layers=5", "--log-level=debug"],
    "decode": ["--fake-decode-s-base=0.005", "--fake-layers=5"],
}
FIVE_LAYERS = replace(clients.FAKE, layout=replace(clients.FAKE.layout, layers=5))
TOKENS = 20
PROMPT = "a prompt that goes through two stages, chunk by chunk, " * 12


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Mesh]:
    with Mesh(flags=FLAGS, prefill_stages=2) as mesh:
        yield mesh


@pytest.fixture
def mesh(two_stages: Mesh) -> Mesh:
    """One prefill instance of two stages that take their time, whole again after whatever the last test did."""
    return two_stages.mended()


def expected(prompt: str, n: int = TOKENS) -> str:
    return clients.expected_text(prompt, n, FIVE_LAYERS)


def computed(mesh: Mesh, name: str, least_chunks: int) -> list[dict[str, Any]]:
    """Wait until a stage has computed so many chunks of its life; all of them."""

    def look() -> list[dict[str, Any]] | None:
        chunks = [entry for entry in mesh.logs(name) if entry.get("event") == "chunk_computed"]
        return chunks if len(chunks) >= least_chunks else None

    return mesh.wait(look, what=f"{name} to compute {least_chunks} chunks")


def retired(mesh: Mesh, least: int) -> list[dict[str, Any]]:
    """Wait until the further stage has let go of so many sequences that it has computed."""

    def look() -> list[dict[str, Any]] | None:
        found = [entry for entry in mesh.logs("prefill0-1") if entry.get("event") == "sequence_retired"]
        ended = [entry for entry in found if entry["blocks"]]
        return ended if len(ended) >= least else None

    return mesh.wait(look, what=f"the end of {least} sequences")


def sends(mesh: Mesh) -> list[dict[str, Any]]:
    return [entry for entry in mesh.logs("prefill0") if entry.get("event") == "prefill_sent"]


def test_two_stages_say_what_one_says_and_overlap(mesh: Mesh) -> None:
    roles = {state.member.instance_id: state.member.role for state in mesh.status().cluster.members}
    assert roles[InstanceId("prefill0-1")] is Role.STAGE
    n_before, n_sent = len(computed(mesh, "prefill0", 0)), len(sends(mesh))
    assert clients.complete(mesh.http, PROMPT, TOKENS) == expected(PROMPT)
    sent = mesh.wait(lambda: next(iter(sends(mesh)[n_sent:]), None), what="the end of the transfer")
    head = computed(mesh, "prefill0", n_before + 3)[n_before:]
    stage = computed(mesh, "prefill0-1", n_before + len(head))[n_before:]
    assert [chunk["start"] for chunk in stage] == [chunk["start"] for chunk in head]
    end_s = head[0]["began_s"] + head[0]["compute_s"]
    assert stage[0]["began_s"] >= end_s
    assert stage[0]["began_s"] < head[-1]["began_s"]  # one prompt, in both stages at once
    assert sent["sent_bytes"] > 0
    mesh.wait_idle()


def test_what_both_stages_wrote_is_in_the_pool(mesh: Mesh) -> None:
    prompt = "whole blocks of five layers, of which each stage has some, " * 6
    first = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, TOKENS)).json()
    again = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, TOKENS)).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert first["choices"][0]["text"] == again["choices"][0]["text"] == expected(prompt)


def test_a_stage_keeps_what_it_has_of_a_prompt_under_its_keys_for_the_next_turn(mesh: Mesh) -> None:
    prompt = "the first turn of a conversation, of which the stage has its layers, " * 4
    n_before, n_retired = len(computed(mesh, "prefill0-1", 0)), len(retired(mesh, 0))
    assert clients.complete(mesh.http, prompt, TOKENS) == expected(prompt)
    first = retired(mesh, n_retired + 1)[-1]
    assert clients.complete(mesh.http, prompt + "and the second one. " * 8, TOKENS)
    second = retired(mesh, n_retired + 2)[-1]
    assert 0 < first["blocks"] < second["blocks"]
    chunks = computed(mesh, "prefill0-1", n_before + 3)[n_before:]
    known = {chunk["start"]: chunk["known_blocks"] for chunk in chunks if chunk["job_id"] == second["job_id"]}
    assert known[min(known)] == first["blocks"]  # of those before it, the stage may have a context


def test_the_stage_that_draws_the_first_token_keeps_to_the_grammar(mesh: Mesh) -> None:
    """The fake engine would hardly begin with an x."""
    for seed in range(3):
        text = clients.complete(mesh.http, PROMPT, TOKENS, seed=seed, structured_outputs={"regex": "xy[0-9]{4}"})
        assert re.fullmatch("xy[0-9]{4}", text)


def test_requests_follow_each_other_through_the_stages(mesh: Mesh) -> None:
    prompts = [f"request number {number} of several at once: " + PROMPT for number in range(4)]
    streams = [Stream(mesh.http, prompt, TOKENS) for prompt in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        with stream:
            assert stream.result() == expected(prompt)
    mesh.wait_idle()


def test_a_cancelled_request_leaves_both_stages(mesh: Mesh) -> None:
    before = len(computed(mesh, "prefill0-1", 0))
    with Stream(mesh.http, "it will be cancelled: " + PROMPT * 3, TOKENS):
        computed(mesh, "prefill0-1", before + 2)
    mesh.wait_idle()
    assert clients.complete(mesh.http, PROMPT, TOKENS) == expected(PROMPT)


@pytest.mark.parametrize("victim", ["prefill0-1", "prefill0"])
def test_a_request_survives_the_death_of_a_stage(mesh: Mesh, victim: str) -> None:
    prompt = f"while this one runs {victim} dies: " + PROMPT * 2
    before = len(computed(mesh, "prefill0-1", 0))
    with Stream(mesh.http, prompt, TOKENS) as stream:
        computed(mesh, "prefill0-1", before + 2)
        mesh.kill(victim)
        assert stream.text == ""
        mesh.start(victim)
        assert stream.result() == expected(prompt)
    mesh.wait_healthy()
    mesh.wait_idle()


def test_a_request_survives_the_death_of_the_messenger_under_both_stages(mesh: Mesh) -> None:
    """The head waits for its stage before it lets go of the job, and lets go of the arena all the same."""
    prompt = "while this one runs the messenger dies: " + PROMPT * 2
    before = len(computed(mesh, "prefill0-1", 0))
    with Stream(mesh.http, prompt, TOKENS) as stream:
        computed(mesh, "prefill0-1", before + 2)
        mesh.kill("messenger0")
        mesh.start("messenger0")
        assert stream.result() == expected(prompt)
    mesh.wait_healthy()
    mesh.wait_idle()


def test_stages_join_again_after_the_messenger_was_lost(mesh: Mesh) -> None:
    mesh.kill("messenger0")
    mesh.start("messenger0")
    mesh.wait_healthy()
    assert clients.complete(mesh.http, PROMPT, TOKENS) == expected(PROMPT)
    mesh.wait_idle()
