"""A part of `python -m bench.faults` that fits into every test run: each process, each stage, kill and restart.

The whole matrix, with SIGSTOP for ten seconds, is run on demand (docs/faults.md).
"""

import time
from collections.abc import Iterator

import pytest

from bench.fault_matrix import Cell, Fault, Target, run_cell
from bench.fault_mesh import FLAGS, Books, fault_mesh
from bench.fault_stages import Scene, Stage
from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

SETTLE_S = 20.0
"""That nothing is left matters here, how soon does in the benchmark."""
PATIENT = ("--suspect-after-s=5", "--dead-after-s=8")

CELLS = [
    Cell(target=Target.CONDUCTOR, fault=Fault.RESTART, stage=Stage.PLACING),
    Cell(target=Target.DECODE_MESSENGER, fault=Fault.KILL, stage=Stage.PREFIX),
    Cell(target=Target.PREFILL, fault=Fault.RESTART, stage=Stage.QUEUED),
    Cell(target=Target.PREFILL, fault=Fault.KILL, stage=Stage.BETWEEN_CHUNKS),
    Cell(target=Target.PREFILL_MESSENGER, fault=Fault.RESTART, stage=Stage.TRANSFER),
    Cell(target=Target.DECODE, fault=Fault.KILL, stage=Stage.DECODING),
    Cell(target=Target.GATEWAY, fault=Fault.RESTART, stage=Stage.DECODING),
    Cell(target=Target.DECODE, fault=Fault.KILL, stage=Stage.FINISHING),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with fault_mesh({**FLAGS, "conductor": [*FLAGS["conductor"], *PATIENT]}) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def books(mesh: Mesh) -> Books:
    """Field report P24: counters and descriptors that leak one for each loss are seen (vllm-project/router#215)."""
    books = Books(mesh, SETTLE_S)
    books.open()
    return books


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(CELLS)), ids=[str(cell) for cell in CELLS])
def test_nothing_is_lost_and_nothing_is_left(mesh: Mesh, books: Books, number: int) -> None:
    outcome = run_cell(mesh, books, CELLS[number], "#" * number)
    assert outcome.violations == []
    assert outcome.ends.total() >= 2


def test_a_client_that_leaves_stops_a_long_prefill_at_the_next_chunk(mesh: Mesh, books: Books) -> None:
    """Field report P4: nobody grinds through the chunks of a prompt that no one waits for (ai-dynamo/dynamo#13691)."""
    scene = Scene(mesh)
    scene.place("nobody will read the answer to this " * 160, 1)
    mesh.wait_log(scene.prefill, "chunk_computed", job_id=scene.job_id)
    scene.asks[0].opened.disconnect()
    mesh.wait_log(scene.prefill, "job_cancelled", job_id=scene.job_id)
    assert books.differences(time.monotonic()) == []
    events = [event["event"] for event in mesh.logs(scene.prefill) if event.get("job_id") == scene.job_id]
    assert events[events.index("job_cancelled") :].count("chunk_computed") <= 1, "but that which was being computed"
    assert events.count("chunk_computed") < 90, "of 91"


def test_of_a_prompt_that_is_cached_as_a_whole_the_last_block_is_computed(mesh: Mesh) -> None:
    """Field report P16: its last token's logits are needed (LMCache/LMCache#3322, vllm-project/vllm#17999)."""
    prompt = "with the token that begins every prompt, this is exactly 64 of them"[:63]
    answers = [clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, 20)).json() for _ in "12"]
    assert [answer["choices"][0]["text"] for answer in answers] == [clients.expected_text(prompt, 20)] * 2
    usage = answers[1]["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (64, 48)
