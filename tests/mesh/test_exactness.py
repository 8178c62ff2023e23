"""Greedy output through the mesh is transformers' own, token for token, whatever way the KVCache came."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import openai
import pytest
from openai.types.chat import ChatCompletion

from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from mooncake_proto.control import StatusReport
from tests.mesh.harness import Mesh, Start
from tests.mesh.together import decoded_together

if TYPE_CHECKING:
    from tests.mesh.greedy_reference import GreedyReference

# torch is imported where it is used: who runs or collects other tests need not wait for it.
pytestmark = [
    pytest.mark.mesh,
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("_forks_real_meshes"),
    pytest.mark.skipif(
        find_spec("torch") is None or find_spec("transformers") is None, reason="needs the engine extra"
    ),
]

N: Final = 64
N_FEW: Final = 24
BLOCK: Final = 16
UNCHUNKED: Final = 0
# Below a block, a whole block, one less than three, whole blocks, and one over a chunk of 512. The seeds are those
# whose greedy continuations have no near tie.
PROMPTS: Final = ((5, 1), (16, 0), (47, 3), (128, 2), (300, 2), (513, 1), (1100, 3), (3000, 2))
# A machine under load must not be told that it is too slow.
PATIENT: Final = {"conductor": ["--ttft-slo-s=600", "--tbt-slo-s=60"]}


class Served:
    """A mesh with a client. Prompts and answers are token ids."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.client = openai.OpenAI(base_url=f"{mesh.http}/v1", api_key="none", max_retries=0, timeout=500)

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def complete(self, prompt: Sequence[int], **options: Any) -> openai.types.Completion:
        return cast(openai.types.Completion, self._create(prompt, **options))

    def stream(self, prompt: Sequence[int], **options: Any) -> openai.Stream[openai.types.Completion]:
        return cast(openai.Stream[openai.types.Completion], self._create(prompt, stream=True, **options))

    def _create(self, prompt: Sequence[int], **options: Any) -> object:
        options = {"max_tokens": N, "temperature": 0.0, **options}
        extra = {"ignore_eos": True, "return_token_ids": True}
        return self.client.completions.create(model=self.mesh.model, prompt=list(prompt), extra_body=extra, **options)

    def indexed_blocks(self, node: str) -> int:
        return int(self.mesh.status().indexed_blocks.get(node, 0))

    def wait_indexed(self, node: str, blocks: int) -> None:
        """Wait until the conductor knows of *blocks* blocks on *node*."""

        def look() -> StatusReport | None:
            report = self.mesh.status()
            return report if report.indexed_blocks.get(node, 0) >= blocks else None

        self.mesh.wait(look, what=f"{blocks} indexed blocks on {node}")


def tokens_of(answer: openai.types.Completion) -> list[int]:
    assert answer.choices[0].model_extra is not None
    return list(answer.choices[0].model_extra["token_ids"])


def cached_tokens_of(answer: openai.types.Completion) -> int:
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    return answer.usage.prompt_tokens_details.cached_tokens


def completion_tokens_of(answer: openai.types.Completion | ChatCompletion) -> int:
    assert answer.usage is not None
    return answer.usage.completion_tokens


def logprobs_of(answer: openai.types.Completion) -> list[float]:
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs is not None
    return answer.choices[0].logprobs.token_logprobs


@pytest.fixture(scope="module")
def reference() -> Iterator["GreedyReference"]:
    import torch

    from tests.mesh.greedy_reference import GreedyReference

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them spin against the workers of the mesh
    yield GreedyReference(resolve_model(DEFAULT_MODEL))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """The real model in float32, with prefill chunks of the parameter's tokens."""
    with (
        Mesh(
            engine="transformers",
            model=DEFAULT_MODEL,
            dtype="float32",
            arena_bytes="768MiB",
            flags={**PATIENT, "prefill": [f"--chunk-tokens={request.param}"]},
            ready_s=120,
        ) as mesh,
        Served(mesh) as served,
    ):
        yield served


chunks_of_512 = pytest.mark.parametrize("served", [512], indirect=True, scope="module")


@pytest.mark.parametrize("served", [512, 64, UNCHUNKED], indirect=True, scope="module")
def test_greedy_equals_generate(served: Served, reference: "GreedyReference") -> None:
    prompts = [reference.prompt(n_tokens, seed=seed) for n_tokens, seed in PROMPTS]
    with ThreadPoolExecutor(len(prompts)) as threads:  # one batch of very different lengths
        answers = list(threads.map(served.complete, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert reference.picks(prompt, tokens_of(answer)) == tokens_of(answer)
    assert tokens_of(answers[2]) == reference.generate(prompts[2], N)
    assert [completion_tokens_of(answer) for answer in answers] == [N] * len(prompts)


@chunks_of_512
@pytest.mark.parametrize(("n_tokens", "seed", "cached"), [(300, 2, 288), (128, 2, 112)])
def test_a_prefix_from_the_local_arena_changes_nothing(
    served: Served, reference: "GreedyReference", n_tokens: int, seed: int, cached: int
) -> None:
    """Of a prompt of whole blocks the last one is computed again: its last token's logits are needed."""
    prompt = reference.prompt(n_tokens, seed=seed)
    first, second = (served.complete(prompt, max_tokens=N_FEW) for _ in range(2))
    assert cached_tokens_of(second) == cached
    assert tokens_of(second) == tokens_of(first) == reference.picks(prompt, tokens_of(first))


@chunks_of_512
def test_a_prefix_from_another_nodes_arena_changes_nothing(served: Served, reference: "GreedyReference") -> None:
    """The next turn: the blocks of the first answer lie where it was decoded, and come to the prefill node."""
    prompt = reference.prompt(200, seed=2)
    known = served.indexed_blocks("node1")
    answer = tokens_of(served.complete(prompt))
    assert answer == reference.picks(prompt, answer)
    decoded_blocks = (len(prompt) + N - 1) // BLOCK  # the last token's KV was never computed
    served.wait_indexed("node1", known + decoded_blocks)

    turn = [*prompt, *answer, *reference.prompt(25, seed=1)]
    second = served.complete(turn)
    assert cached_tokens_of(second) == decoded_blocks * BLOCK > len(prompt)
    fetched = served.mesh.wait_log("messenger0", "prefix_fetched", source=served.mesh.endpoint("messenger1"))
    assert fetched["blocks"] == decoded_blocks - len(prompt) // BLOCK
    assert tokens_of(second) == reference.picks(turn, tokens_of(second))


@chunks_of_512
def test_seeded_samples_are_repeatable(served: Served, reference: "GreedyReference") -> None:
    prompt = reference.prompt(100, seed=3)
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": N_FEW}
    first, second = served.complete(prompt, **options), served.complete(prompt, **options)
    other = served.complete(prompt, **options | {"seed": 8})
    assert (cached_tokens_of(first), cached_tokens_of(second)) == (0, 96)
    assert tokens_of(first) == tokens_of(second) != tokens_of(other)
    assert tokens_of(first) != reference.picks(prompt, tokens_of(first))


@chunks_of_512
def test_a_seeded_request_survives_its_decode_worker(served: Served, reference: "GreedyReference") -> None:
    prompt = reference.prompt(60, seed=1)
    options = {"temperature": 0.9, "seed": 11, "max_tokens": 96}  # many left when it is killed
    expected = tokens_of(served.complete(prompt, **options))
    drawn: list[int] = []
    killed_at = None
    for chunk in served.stream(prompt, **options):
        drawn += (chunk.choices[0].model_extra or {}).get("token_ids", [])
        if killed_at is None and len(drawn) >= 10:
            killed_at = len(drawn)
            served.mesh.kill("decode0")
            served.mesh.start("decode0")
    assert drawn == expected
    assert killed_at is not None
    landed = served.mesh.wait_log("decode0", "kv_landed")  # in its second life
    assert not landed["job_id"].endswith(".0"), "an attempt of its own"
    served.mesh.wait_healthy(60)


def test_sequences_that_push_each_other_out_of_the_pool_draw_the_same(reference: "GreedyReference") -> None:
    """6 blocks at the decode node; the sequences grow to 2 and 5."""
    prompts = [reference.prompt(5, seed=1), reference.prompt(47, seed=3)]
    flags = {
        "conductor": [*PATIENT["conductor"], "--wip-limit=100"],
        "messenger1": ["--arena-bytes=4.5MiB"],
        "decode": ["--swap-patience-s=120"],
    }
    sampled = {"temperature": 0.9, "seed": 11, "logprobs": 2, "max_tokens": N_FEW}
    with (
        Mesh(engine="transformers", model=DEFAULT_MODEL, dtype="float32", flags=flags, ready_s=120) as mesh,
        Served(mesh) as served,
        ThreadPoolExecutor(2) as threads,
    ):
        alone = [served.complete(prompt, **sampled) for prompt in prompts]
        assert mesh.find_log("decode0", "job_preempted") is None
        together: list[openai.types.Completion] = []
        greedy: list[openai.types.Completion] = []
        for answers, options in ((together, sampled), (greedy, {"max_tokens": N_FEW})):
            with decoded_together(mesh, 2):
                asked = [threads.submit(served.complete, prompt, **options) for prompt in prompts]
            answers += [one.result() for one in asked]
        back = [event["event"] for event in mesh.logs("decode0")].count("job_back")
        assert mesh.find_log("decode0", "job_failed") is None, "nobody was placed again"
    assert back >= 2
    assert [tokens_of(answer) for answer in together] == [tokens_of(answer) for answer in alone]
    for one, other in zip(together, alone, strict=True):
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-3)
    assert [tokens_of(answer) for answer in greedy] == [
        reference.picks(prompt, tokens_of(answer)) for prompt, answer in zip(prompts, greedy, strict=True)
    ]


def test_bfloat16_answers(tmp_path: Path) -> None:
    """Started as users do it, with cores that the instances share."""
    share = ["--threads=0", f"--core-board={tmp_path / 'cores'}"]
    with (
        Mesh(
            engine="transformers",
            model=DEFAULT_MODEL,
            dtype="bfloat16",
            flags={**PATIENT, "prefill": share, "decode": share},
            ready_s=120,
            start=Start.COMMAND,
        ) as mesh,
        Served(mesh) as served,
    ):
        answer = served.client.chat.completions.create(
            model=DEFAULT_MODEL, messages=[{"role": "user", "content": "What is 2+2?"}], temperature=0, max_tokens=16
        )
    assert (answer.choices[0].message.content or "").strip()
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert 0 < completion_tokens_of(answer) <= 16


@pytest.mark.parametrize("stage_nodes", [(), (1,)], ids=["one_node", "two_nodes"])
def test_another_architecture_equals_generate(tmp_path: Path, stage_nodes: Sequence[int]) -> None:
    """A folder with a random Qwen2 of three layers: its prompts cross blocks, chunks and two uneven stages.

    The second stage keeps nothing on its device, so it reads what was cached from where its KV lies; in another life of
    it that is what it got from others.
    """
    from tests.mesh.greedy_reference import GreedyReference
    from tests.mesh.tiny_models import save_qwen2

    save_qwen2(tmp_path)
    reference = GreedyReference(tmp_path)
    prompts = [reference.prompt(n_tokens, seed=1) for n_tokens in (7, 64, 200)]
    expected = [reference.generate(prompt, N) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) == 3
    with (
        Mesh(
            engine="transformers",
            model=str(tmp_path),
            dtype="float32",
            flags={
                **PATIENT,
                "prefill": ["--chunk-tokens=32", "--pipeline-split=1,2"],
                "prefill0-1": ["--layerwise-budget=1"],
            },
            prefill_stages=2,
            stage_nodes=stage_nodes,
            ready_s=120,
        ) as mesh,
        Served(mesh) as served,
    ):
        answers = [served.complete(prompt) for prompt in prompts]
        again = [served.complete(prompts[2])]
        mesh.kill("prefill0-1")
        mesh.start("prefill0-1")
        mesh.wait_healthy(120)
        again.append(served.complete(prompts[2]))
    assert [tokens_of(answer) for answer in [*answers, *again]] == [*expected, expected[2], expected[2]]
    assert [cached_tokens_of(answer) for answer in again] == [192, 192]


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    from tests.mesh.tiny_models import save_mamba

    save_mamba(tmp_path)
    command = [sys.executable, "-m", "mooncake_mesh", "up", "--port=0", f"--model={tmp_path}"]
    end = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert end.returncode != 0
    assert end.stdout == ""
    assert "MambaForCausalLM is not supported: it keeps a state that is no KVCache" in end.stderr
