"""A whole mesh of processes whose KV moves by RDMA, on real verbs: see test_rdma.py for how to run it."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from mooncake_mesh.cli.status import as_json
from mooncake_mesh.engine.model_files import DEFAULT_MODEL
from tests.hardware import rdma_reason
from tests.mesh import clients
from tests.mesh.harness import Mesh

rdma_reason.skip_module()
pytestmark = [pytest.mark.hardware, pytest.mark.timeout(600)]

READY_S = 300.0
PATIENT = ["--suspect-after-s=20", "--dead-after-s=60", "--ttft-slo-s=600", "--tbt-slo-s=600"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An engine with its model, and what it is asked."""

    engine: str
    model: str
    dtype: str
    prompt: str
    max_tokens: int


FAKE = Asked(
    engine="fake",
    model="fake",
    dtype="bfloat16",
    prompt="Once upon a time there was a KVCache that wanted to see the other node. " * 8,
    max_tokens=32,
)
REAL = Asked(engine="transformers", model=DEFAULT_MODEL, dtype="float32", prompt="What is 2+2?", max_tokens=16)


def answer_over(transport: str, asked: Asked) -> tuple[dict[str, object], dict[str, object]]:
    """Choice and usage of one chat completion, in a mesh of its own."""
    flags = {"messenger": [f"--transport={transport}"], "conductor": PATIENT}
    fields = {
        "model": asked.model,
        "messages": [{"role": "user", "content": asked.prompt}],
        "max_tokens": asked.max_tokens,
        "temperature": 0,
    }
    with Mesh(
        engine=asked.engine,
        model=asked.model,
        dtype=asked.dtype,
        flags=flags,
        arena_bytes="16MiB",
        ready_s=READY_S,
    ) as mesh:
        answer = clients.post(mesh.http, "/v1/chat/completions", fields)
        assert answer.status == 200, answer.body
        sent = mesh.wait_log("prefill0", "prefill_sent")
        assert sent["transport"] == transport
        assert sent["sent_bytes"] > 0
        mesh.wait(
            lambda: mesh if f'"transports": "{transport}"' in as_json(mesh.status(timeout_s=30.0)) else None,
            timeout_s=60.0,
            what="the conductor to know the transport",
        )
        body = answer.json()
        return body["choices"][0], body["usage"]


def packets() -> int | None:
    """Packets that Soft-RoCE devices have sent; None where there are others only."""
    counters = list(Path("/sys/class/infiniband").glob("*/ports/*/hw_counters/sent_pkts"))
    return sum(int(counter.read_text()) for counter in counters) if counters else None


roomy = pytest.mark.skipif(
    psutil.virtual_memory().total < 3 << 30, reason="two workers with a model need 3 GiB: scripts/rdma-vm --memory 4096"
)


@pytest.mark.parametrize("asked", [FAKE, pytest.param(REAL, marks=[pytest.mark.model, roomy])], ids=["fake", "real"])
def test_a_chat_completion_over_rdma_equals_that_over_shared_memory(asked: Asked) -> None:
    before = packets()
    over_rdma = answer_over("rdma", asked)
    after = packets()
    assert before is None or after is None or after > before
    assert over_rdma == answer_over("shm", asked)
    assert packets() == after
