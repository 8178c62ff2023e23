"""Prompts that decode instances compute themselves, on a live mesh whose prefill instance is ten times as slow."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.fault_mesh import placements
from mooncake_proto.control import Role
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

COST = {
    "prefill_base_s": 0.001,
    "prefill_token_s": 0.004,
    "prefill_pair_s": 0.0,
    "cached_token_s": 0.0,
    "step_base_s": 0.02,
    "step_sequence_s": 0.0,
    "step_context_token_s": 0.0,
    "transfer_base_s": 0.001,
    "transfer_byte_s": 1e-9,
}
KINDS = {"format": "mooncake-mesh/cost/2", "kinds": {"default": COST, "slow": {**COST, "prefill_token_s": 0.04}}}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 7}]
LONG = "a prompt of several chunks, " * 25
"""Three seconds."""
LONGEST = LONG * 8
"""Longer than any test is kept from looking at it."""

ELSEWHERE = "five blocks that a prefill instance computes for one token alone, and a few more"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    profile = tmp_path_factory.mktemp("cost") / "cost.json"
    profile.write_text(json.dumps(KINDS))
    flags = {
        "conductor": [f"--cost-profile={profile}", "--hybrid-decode=auto", "--hybrid-step-s=0.475"],
        "prefill": ["--kind=slow", "--fake-prefill-s-per-token=0.04"],
        "decode": ["--fake-prefill-s-per-token=0.004", "--fake-decode-s-base=0.02"],
    }
    with Mesh(flags=flags, decode_nodes=(1, 1)) as mesh:
        yield mesh


@pytest.fixture
def mesh(started: Mesh) -> Mesh:
    return started.mended()


def computed(mesh: Mesh) -> list[dict[str, Any]]:
    """The prompts that decode instances have computed in their current lives."""
    return [
        event for name in ("decode0", "decode1") for event in mesh.logs(name) if event["event"] == "prompt_computed"
    ]


def prefills_sent(mesh: Mesh) -> int:
    return sum(event["event"] == "prefill_sent" for event in mesh.logs("prefill0"))


def left(mesh: Mesh) -> dict[str, int]:
    """Prompt tokens that each decode instance has still to compute, as far as the conductor has heard."""
    members = mesh.status().cluster.members
    left = {
        str(state.member.instance_id): sum(uncached for uncached, _ in state.load.queued_prompts)
        for state in members
        if state.member.role is Role.DECODE
    }
    return {name: tokens for name, tokens in left.items() if tokens}


def computing(mesh: Mesh) -> str:
    """Wait until a decode instance computes a long prompt, and say which. Short ones may be told of when they are over
    already."""

    def look() -> str | None:
        return next((name for name, tokens in left(mesh).items() if tokens > 200), None)

    return mesh.wait(look, what="a decode instance to compute a prompt")


def answer(mesh: Mesh, prompt: str, max_tokens: int, **fields: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    got = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, max_tokens, **fields))
    assert got.status == 200, got.body
    body = got.json()
    return body["choices"][0]["text"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_answer_is_that_of_two_instances(mesh: Mesh) -> None:
    prompts = ["short", "a prompt that crosses a block", "of sixteen token"]
    before, sent = len(computed(mesh)), prefills_sent(mesh)
    here = [answer(mesh, prompt, 40, **sampling)[0] for prompt in prompts for sampling in SAMPLINGS]
    assert len(computed(mesh)) == before + len(here)
    assert prefills_sent(mesh) == sent
    assert here[::2] == [clients.expected_text(prompt, 40) for prompt in prompts]
    mesh.restart("conductor", "--hybrid-decode=off")
    mesh.wait_healthy()
    apart = [answer(mesh, prompt, 40, **sampling)[0] for prompt in prompts for sampling in SAMPLINGS]
    mesh.restart("conductor")
    assert apart == here
    assert len(computed(mesh)) == before + len(here)


def test_a_prefix_that_only_the_prefill_node_has_is_copied(mesh: Mesh) -> None:
    def at_node0(least: int) -> int | None:
        n_blocks = mesh.status().indexed_blocks.get("node0", 0)
        return n_blocks if n_blocks >= least else None

    others = mesh.status().indexed_blocks.get("node0", 0)
    mesh.restart("conductor", "--hybrid-decode=off")
    mesh.wait_healthy()
    answer(mesh, ELSEWHERE, 1)
    blocks = mesh.wait(lambda: at_node0(others + 5), what="its blocks to be told")
    mesh.restart("conductor")
    mesh.wait_healthy()
    mesh.wait(lambda: at_node0(blocks), what="all blocks to be told")
    text, cached = answer(mesh, ELSEWHERE, 20)
    assert (text, cached) == (clients.expected_text(ELSEWHERE, 20), 80)
    assert 80 in [prompt["cached_tokens"] for prompt in computed(mesh)]


def test_a_first_token_that_is_the_last_one(mesh: Mesh) -> None:
    before = len(computed(mesh))
    assert answer(mesh, "one token only", 1)[0] == clients.expected_text("one token only", 1)
    assert len(computed(mesh)) == before + 1
    mesh.wait_idle()


def test_the_next_turn_finds_what_was_computed_and_decoded_here(mesh: Mesh) -> None:
    first = "the first turn of a conversation, which is computed as a whole: "
    others = mesh.status().indexed_blocks.get("node1", 0)
    text, cached = answer(mesh, first, 40)
    assert cached == 0
    mesh.wait(lambda: mesh.status().indexed_blocks.get("node1", 0) >= others + 6 or None, what="its blocks to be told")
    second = first + text + " and the second one"
    text, cached = answer(mesh, second, 20)
    assert text == clients.expected_text(second, 20)
    assert cached >= 80
    assert cached in [prompt["cached_tokens"] for prompt in computed(mesh)]


def test_streams_go_on_while_a_prompt_is_computed(mesh: Mesh) -> None:
    with (
        Stream(mesh.http, "one that is decoded at decode0", 4000) as one,
        Stream(mesh.http, "one that is decoded at decode1", 4000) as two,
    ):
        one.wait_chunks(3)
        two.wait_chunks(3)
        with Stream(mesh.http, LONGEST, 10) as longest:
            computing(mesh)
            before = one.chunks, two.chunks
            one.wait_chunks(before[0] + 2)
            two.wait_chunks(before[1] + 2)
            assert longest.chunks == 0
            longest.disconnect()
        with Stream(mesh.http, LONG, 10) as long:
            assert long.result() == clients.expected_text(LONG, 10)
        one.disconnect()
        two.disconnect()
    mesh.wait_idle()


def test_a_client_that_leaves_while_its_prompt_is_computed_frees_everything(mesh: Mesh) -> None:
    with Stream(mesh.http, "leaves: " + LONGEST, 10) as leaving, Stream(mesh.http, "stays: " + LONG, 10) as staying:
        computing(mesh)
        leaving.disconnect()
        assert leaving.text == ""
        assert staying.result() == clients.expected_text("stays: " + LONG, 10)
    mesh.wait_idle()


def test_a_killed_instance_in_the_middle_of_a_prompt(mesh: Mesh) -> None:
    prompt = "killed early: " + 2 * LONG
    with Stream(mesh.http, prompt, 30) as stream:
        mesh.kill(computing(mesh))
        assert stream.text == ""
        assert stream.result() == clients.expected_text(prompt, 30)
    mesh.wait_idle()


def test_a_killed_instance_in_the_middle_of_the_answer(mesh: Mesh) -> None:
    prompt = "killed while it answers"
    with Stream(mesh.http, prompt, 80) as stream:
        stream.wait_chunks(10)
        mesh.kill(str(placements(mesh)[-1]["decode"]))
        assert stream.result() == clients.expected_text(prompt, 80)
    mesh.wait_idle()


def test_a_lost_messenger_in_the_middle_of_a_prompt(mesh: Mesh) -> None:
    prompt = "no messenger: " + 2 * LONG
    with Stream(mesh.http, prompt, 20) as stream:
        computing(mesh)
        mesh.kill("messenger1")
        mesh.start("messenger1")
        assert stream.result() == clients.expected_text(prompt, 20)
    mesh.wait_idle()
