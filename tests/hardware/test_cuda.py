"""The engine on a CUDA device beside the same on the CPU.

Skipped where there is none; with REQUIRE_CUDA in the environment that is a failure.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    if os.environ.get("REQUIRE_CUDA"):
        raise RuntimeError("REQUIRE_CUDA is set, but torch sees no CUDA device")
    pytest.skip("torch sees no CUDA device", allow_module_level=True)

from structlog.testing import capture_logs  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig  # noqa: E402

from mooncake_mesh.config_layerwise import LayerwiseConfig, Overlap  # noqa: E402
from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest  # noqa: E402
from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(300)]

TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
}
CONFIGS = {"llama": LlamaConfig(**TINY), "a sliding window": MistralConfig(**TINY, sliding_window=50)}
BLOCK_TOKENS = 16
SAMPLE = SampleRequest(sampling=Sampling(temperature=0.0, top_logprobs=0), position=0, history=np.zeros(0, np.int32))
LENGTHS = (700, 33, 5, 260, 64)


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def load(
    folder: Path, device: str, dtype: KvDtype = KvDtype.FLOAT32, *, context_bytes: int = 1 << 30, **layerwise: Any
) -> TransformersEngine:
    return TransformersEngine.load(
        str(folder),
        dtype=dtype,
        block_tokens=BLOCK_TOKENS,
        device=device,
        context_bytes=context_bytes,
        layerwise=LayerwiseConfig(**layerwise),
    )


def prompt(n: int) -> Any:
    return (np.arange(n, dtype=np.int32) * 37 + n) % 256


def served(engine: TransformersEngine, sizes: Sequence[int] = (1, 2, 5, 3, 4)) -> tuple[list[float], Any]:
    """Log-probabilities of what prompts in chunks and steps of batches of *sizes* drew, and the arena."""
    blocks_of_one = 64
    arena = np.zeros(len(LENGTHS) * blocks_of_one * engine.spec.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    found: list[float] = []
    places = [list(range(blocks_of_one * i, blocks_of_one * (i + 1)))[::-1] for i in range(len(LENGTHS))]
    for i, n in enumerate(LENGTHS):
        for start in range(0, n, 200):
            chunk = prompt(n)[start : start + 200]
            layers: list[int] = []
            drawn = engine.prefill(
                PrefillChunk(sequence=str(i), tokens=chunk, start=start, blocks=places[i], sample=SAMPLE),
                layers.append,
            )
            assert layers == list(range(5))
        assert drawn is not None
        assert drawn.logprob is not None
        found.append(drawn.logprob.logprob)
    lengths = list(LENGTHS)
    for step, size in enumerate(sizes):
        slots = [
            DecodeSlot(sequence=str(i), token=step, position=lengths[i], blocks=places[i], sample=SAMPLE)
            for i in range(size)
        ]
        for i, one in enumerate(engine.decode(slots)):
            assert one.logprob is not None
            found.append(one.logprob.logprob)
            lengths[i] += 1
    engine.unbind()
    return found, arena


def same(ours: tuple[list[float], Any], theirs: tuple[list[float], Any], within: float) -> None:
    assert np.allclose(ours[0], theirs[0], atol=within)
    kv, expected = (torch.from_numpy(one[1]).view(torch.float32) for one in (ours, theirs))
    assert float((kv - expected).norm() / expected.norm()) < within


@pytest.mark.parametrize("overlap", Overlap)
@pytest.mark.parametrize("budget", [0, 2])
def test_a_device_computes_what_the_cpu_does(folder: Path, overlap: Overlap, budget: int) -> None:
    on_device = served(load(folder, "cuda", overlap=overlap, budget=budget))
    same(on_device, served(load(folder, "cpu")), 2e-3)


def test_without_room_for_contexts_too(folder: Path) -> None:
    same(served(load(folder, "cuda", context_bytes=0)), served(load(folder, "cpu")), 2e-3)


def test_steps_are_graphs(folder: Path) -> None:
    with capture_logs() as logs:
        engine = load(folder, "cuda", KvDtype.BFLOAT16)
        first, second = served(engine)[0], served(engine)[0]
    assert [line for line in logs if line["event"].startswith("step_graph")] == []
    assert engine._graphs is not None
    assert first == second, "made, and run again"


def test_a_prefix_that_landed_is_loaded_beside_steps(folder: Path) -> None:
    engine = load(folder, "cuda")
    arena = np.zeros(128 * engine.spec.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    blocks, tokens = list(range(64)), prompt(700)
    for start in range(0, 700, 200):
        chunk = PrefillChunk(sequence="first", tokens=tokens[start : start + 200], start=start, blocks=blocks)
        engine.prefill(chunk, lambda _: None)
    slot = DecodeSlot(sequence="first", token=7, position=700, blocks=blocks, sample=SAMPLE)
    expected = engine.decode([slot])[0]
    loading = engine.preload("second", blocks, 700, ())
    engine.decode([DecodeSlot(sequence="first", token=8, position=701, blocks=blocks, sample=SAMPLE)])
    loading.result(timeout=60)
    slot = DecodeSlot(sequence="second", token=7, position=700, blocks=blocks, sample=SAMPLE)
    again = engine.decode([slot])[0]
    assert expected.logprob is not None
    assert again.logprob is not None
    assert again.logprob.logprob == pytest.approx(expected.logprob.logprob, abs=2e-3)
