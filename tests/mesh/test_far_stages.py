"""A prefill instance whose stages are on several nodes: same text, KV of all in the head's arena, and what follows when
one of them dies."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh
from tests.mesh.test_pipeline import FLAGS, PROMPT, TOKENS, computed, expected

pytestmark = pytest.mark.mesh

NEAR, FAR = "prefill0-1", "prefill0-2"


@pytest.fixture(scope="module")
def three_stages() -> Iterator[Mesh]:
    with Mesh(flags=FLAGS, prefill_stages=3, stage_nodes=(0, 1)) as mesh:
        yield mesh


@pytest.fixture
def mesh(three_stages: Mesh) -> Mesh:
    """One instance with two stages on one node and the last one on another, whole again whatever the last test did."""
    return three_stages.mended()


def prefixes(mesh: Mesh) -> list[int]:
    """Blocks of each prefix that went to stages on other nodes."""
    return [entry["blocks"] for entry in mesh.logs("prefill0") if entry.get("event") == "prefix_sent_to_stages"]


def ask(mesh: Mesh, prompt: str) -> dict[str, Any]:
    answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, TOKENS)).json()
    assert answer["choices"][0]["text"] == expected(prompt)
    return dict(answer)


def test_stages_on_two_nodes_say_what_one_stage_says(mesh: Mesh) -> None:
    n_before, n_prefixes = len(computed(mesh, FAR, 0)), len(prefixes(mesh))
    assert ask(mesh, PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    chunks = computed(mesh, FAR, n_before + 3)[n_before:]
    assert [chunk["start"] for chunk in chunks] == sorted(chunk["start"] for chunk in chunks)
    assert len(prefixes(mesh)) == n_prefixes
    mesh.wait_idle()


def test_a_second_turn_is_computed_behind_what_a_far_stage_has_of_the_first(mesh: Mesh) -> None:
    prompt = "whole blocks of five layers, of which each stage has some, " * 6
    n_prefixes = len(prefixes(mesh))
    ask(mesh, prompt)
    again = ask(mesh, prompt + "and a second turn, which is computed behind the first one. " * 2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
    assert len(prefixes(mesh)) == n_prefixes


def test_a_cached_prefix_goes_to_a_far_stage_that_has_begun_another_life(mesh: Mesh) -> None:
    """What all stages wrote is in the head's arena, and no stage is left without what it lacks."""
    prompt = "this one is cached when the stage begins anew, " * 8
    ask(mesh, prompt)
    mesh.kill(FAR)
    mesh.start(FAR)
    mesh.wait_healthy()
    n_prefixes = len(prefixes(mesh))
    again = ask(mesh, prompt + "and goes on")
    cached_tokens = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached_tokens > 300
    assert prefixes(mesh)[n_prefixes:] == [cached_tokens // 16]


def test_requests_follow_each_other_through_all_stages(mesh: Mesh) -> None:
    prompts = [f"request number {number} of several at once: " + PROMPT for number in range(4)]
    streams = [Stream(mesh.http, prompt, TOKENS) for prompt in prompts]
    for stream, prompt in zip(streams, prompts, strict=True):
        with stream:
            assert stream.result() == expected(prompt)
    mesh.wait_idle()


def test_a_cancelled_request_leaves_all_stages(mesh: Mesh) -> None:
    before = len(computed(mesh, FAR, 0))
    with Stream(mesh.http, "it will be cancelled: " + PROMPT * 3, TOKENS):
        computed(mesh, FAR, before + 2)
    mesh.wait_idle()
    ask(mesh, PROMPT)


def test_a_request_outlasts_a_far_stage_that_stands_still(mesh: Mesh) -> None:
    """Chunks wait for it, as many as have slots."""
    prompt = "while this one runs a stage stands still: " + PROMPT * 2
    before, at_head = len(computed(mesh, FAR, 0)), len(computed(mesh, "prefill0", 0))
    with Stream(mesh.http, prompt, TOKENS) as stream:
        computed(mesh, FAR, before + 2)
        mesh.stop(FAR)
        n_computed = len(mesh.logs(FAR))
        computed(mesh, "prefill0", at_head + 6)
        assert len(mesh.logs(FAR)) == n_computed
        mesh.cont(FAR)
        assert stream.result() == expected(prompt)
    mesh.wait_idle()


@pytest.mark.parametrize("victim", [FAR, NEAR, "prefill0"])
def test_a_request_survives_the_death_of_a_stage(mesh: Mesh, victim: str) -> None:
    prompt = f"while this one runs {victim} dies: " + PROMPT * 2
    before = len(computed(mesh, FAR, 0))
    with Stream(mesh.http, prompt, TOKENS) as stream:
        computed(mesh, FAR, before + 2)
        mesh.kill(victim)
        assert stream.text == ""
        mesh.start(victim)
        assert stream.result() == expected(prompt)
    mesh.wait_healthy()
    mesh.wait_idle()


@pytest.mark.parametrize("victim", ["messenger0", "messenger1"])
def test_stages_join_again_after_a_messenger_was_lost(mesh: Mesh, victim: str) -> None:
    prompt = f"while this one runs {victim} dies: " + PROMPT * 2
    before = len(computed(mesh, FAR, 0))
    with Stream(mesh.http, prompt, TOKENS) as stream:
        computed(mesh, FAR, before + 2)
        mesh.kill(victim)
        mesh.start(victim)
        assert stream.result() == expected(prompt)
    mesh.wait_healthy()
    ask(mesh, PROMPT)
    mesh.wait_idle()


def test_prompts_wait_for_each_other_where_a_far_stage_has_room_for_one() -> None:
    """A block has one layer there, of 1 KiB; each prompt has 44 or 45."""
    prompts = [f"request number {number} of several at once: " + PROMPT for number in range(3)]
    flags = {**FLAGS, "prefill0-1": ["--pipeline-kv-bytes=64KiB"]}
    with Mesh(
        flags={**flags, "prefill": [*FLAGS["prefill"], "--pipeline-split=4,1"]}, prefill_stages=2, stage_nodes=(1,)
    ) as mesh:
        streams = [Stream(mesh.http, prompt, TOKENS) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            with stream:
                assert stream.result() == expected(prompt)
        refused = clients.post(mesh.http, "/v1/completions", clients.completion_fields(PROMPT * 2, TOKENS))
        assert refused.status == 400
        assert "no room" in refused.json()["error"]["message"]
        mesh.wait_idle()


@pytest.mark.parametrize(
    ("stage_nodes", "transport", "flags"),
    [
        ((1, 0), "shm", []),
        ((1, 2), "tcp", ["--pipeline-transport=tcp"]),
        ((1,), "tcp+tls", ["--pipeline-transport=tcp", "--pipeline-tcp-tls"]),
    ],
)
def test_it_does_not_matter_where_stages_are(stage_nodes: Sequence[int], transport: str, flags: Sequence[str]) -> None:
    together = {**FLAGS, "prefill": [*FLAGS["prefill"], *flags]}
    with Mesh(flags=together, prefill_stages=len(stage_nodes) + 1, stage_nodes=stage_nodes) as mesh:
        mesh.wait_log("prefill0", "pipeline_joined", transport=transport)
        ask(mesh, PROMPT)
        assert ask(mesh, PROMPT + "and more")["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
        mesh.wait_idle()
