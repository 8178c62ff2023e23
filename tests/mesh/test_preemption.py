"""Two sequences outgrow the pool of their decode node: one goes out and comes back, and its answer is the same.

There are 16 blocks at the decode node, and a sequence may grow to 10.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import pytest

from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.control import Role
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh
from tests.mesh.together import decoded_together

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

TOKENS: Final = 120
LAYOUT: Final = KvLayout(layers=2, kv_heads=2, head_dim=256, dtype=KvDtype.BFLOAT16, block_tokens=16)
CONFIG: Final = replace(clients.FAKE, layout=LAYOUT)
WIDE: Final = ["--fake-head-dim=256"]
DECODE: Final = [*WIDE, "--fake-decode-s-base=0.005", "--swap-patience-s=60"]
SAMPLINGS: Final[list[dict[str, Any]]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "seed": 7, "logprobs": 3, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "guided_regex": "[a-z ]{100}[0-9]{20}"},
]


@pytest.fixture(scope="module")
def started() -> Iterator[Mesh]:
    flags = {"prefill": WIDE, "decode": DECODE, "messenger1": ["--arena-bytes=1MiB"]}
    with Mesh(flags=flags) as mesh:
        yield mesh


@pytest.fixture
def mesh(started: Mesh) -> Mesh:
    started.wait_healthy()
    started.wait_idle()
    return started


def preemptions(mesh: Mesh) -> int:
    return sum(state.load.preemptions for state in mesh.status().cluster.members if state.member.role is Role.DECODE)


def events(mesh: Mesh, name: str) -> int:
    return sum(event["event"] == name for event in mesh.logs("decode0"))


def swapped(mesh: Mesh) -> bool | None:
    return any(state.load.swapped_jobs for state in mesh.status().cluster.members) or None


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded", "grammar"])
def test_both_answers_are_those_of_an_undisturbed_run(mesh: Mesh, sampling: dict[str, Any]) -> None:
    def answer(prompt: str) -> Any:
        got = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, TOKENS, **sampling))
        assert got.status == 200, got.body
        return got.json()["choices"]

    prompts = ["the first of two that grow", "the other of two that grow"]
    alone = [answer(prompt) for prompt in prompts]
    went, back, failed = (events(mesh, name) for name in ("job_preempted", "job_back", "job_failed"))
    with ThreadPoolExecutor(2) as threads:
        with decoded_together(mesh, 2):
            asked = [threads.submit(answer, prompt) for prompt in prompts]
        together = [one.result() for one in asked]
    assert together == alone
    assert events(mesh, "job_preempted") > went
    assert events(mesh, "job_back") > back
    assert events(mesh, "job_failed") == failed, "it was not placed again"
    mesh.wait_idle()


def test_who_is_cancelled_while_it_is_away_leaves_nothing(mesh: Mesh) -> None:
    prompts = ["stays, and grows for long", "leaves while it is away"]
    mesh.restart("decode0", "--fake-decode-s-base=0.03")  # the one that stays is there for long after the other went
    mesh.wait_healthy()
    before = preemptions(mesh)
    with Stream(mesh.http, prompts[0], 200) as stays:
        stays.wait_chunks(1)
        with Stream(mesh.http, prompts[1], 200) as leaves:
            mesh.wait(lambda: swapped(mesh), what="a sequence to be away")
            leaves.disconnect()
        assert stays.result() == clients.expected_text(prompts[0], 200, CONFIG)
    mesh.wait_idle()
    assert preemptions(mesh) > before
    metrics = clients.get(mesh.http, "/metrics").body.decode()
    [line] = [line for line in metrics.splitlines() if line.startswith("mooncake_instance_preemptions_total{")]
    assert float(line.rpartition(" ")[2]) >= preemptions(mesh)


def test_who_waits_too_long_is_placed_again(mesh: Mesh) -> None:
    prompts = ["the one that has the room", "the one that waits for room"]
    mesh.restart("decode0", "--swap-patience-s=0.05")
    mesh.wait_healthy()
    with ThreadPoolExecutor(2) as threads:
        with decoded_together(mesh, 2):
            asked = [threads.submit(clients.complete, mesh.http, prompt, TOKENS) for prompt in prompts]
        texts = [one.result() for one in asked]
    assert texts == [clients.expected_text(prompt, TOKENS, CONFIG) for prompt in prompts]
    assert mesh.find_log("decode0", "job_preempted", swapped=True) is not None
    assert mesh.find_log("decode0", "job_failed", code="no_free_blocks") is not None
    mesh.wait_idle()


def held_blocks(mesh: Mesh) -> int:
    """Blocks of the decode node that somebody has."""
    [load] = [state.load for state in mesh.status().cluster.members if state.member.instance_id == "messenger1"]
    return load.blocks_total - load.blocks_free - load.blocks_evictable


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_what_two_prompts_of_one_batch_share_is_stored_once(mesh: Mesh, sampling: dict[str, Any]) -> None:
    """Four of their five blocks; both are on their way at once, so neither finds what the other one has."""
    shared = f"{sampling}: four blocks that both of these prompts begin with".ljust(64, ".")[:64]
    prompts = [f"{shared}a..", f"{shared}b.."]
    mesh.restart("decode0", "--fake-decode-s-base=0.3")  # time to be told of it
    mesh.wait_healthy()
    mesh.wait_idle()
    with ExitStack() as stack:
        with decoded_together(mesh, 2):
            one, other = [stack.enter_context(Stream(mesh.http, prompt, 12, sampling)) for prompt in prompts]
        one.wait_chunks(1)
        other.wait_chunks(1)
        mesh.wait(lambda: held_blocks(mesh) == 4 + 2 or None, what="shared blocks to be stored once")
        texts = [one.result(), other.result()]
    landed = [event for event in mesh.logs("decode0") if event["event"] == "kv_landed"]
    assert [event["cached_blocks"] for event in landed] == [0, 0]
    mesh.wait_idle()
    mesh.restart("decode0")
    mesh.wait_healthy()
    alone = [clients.complete(mesh.http, prompt, 12, **sampling) for prompt in prompts]
    assert texts == alone
