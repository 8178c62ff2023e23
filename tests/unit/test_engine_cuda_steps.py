"""Kernels and fixed steps of a CUDA device, on the CPU: in Triton's interpreter, and without a graph."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton comes with torch for CUDA, and is not installed")

from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig  # noqa: E402

from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest  # noqa: E402
from mooncake_mesh.engine.cuda.attention import ContextTable, TokenAttention  # noqa: E402
from mooncake_mesh.engine.cuda.steps import StepGraphs  # noqa: E402
from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402

CPU = torch.device("cpu")


def some(*shape: int, seed: int = 1) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact(q: Any, keys: Any, values: Any, window: int, scaling: float) -> Any:
    """q (heads, head_dim) over keys and values (kv_heads, positions, head_dim)."""
    groups = len(q) // len(keys)
    keys, values = (one.float().repeat_interleave(groups, 0) for one in (keys, values))
    scores = torch.einsum("hd,hpd->hp", q.float(), keys) * scaling
    if window:
        scores[:, :-window] = float("-inf")
    return torch.einsum("hp,hpd->hd", scores.softmax(-1), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 70])
@pytest.mark.parametrize(("kv_heads", "groups", "head_dim"), [(1, 1, 64), (3, 3, 64), (2, 7, 32), (2, 4, 96)])
def test_tokens_attend_and_are_written(kv_heads: int, groups: int, head_dim: int, window: int, dtype: Any) -> None:
    lengths = (1, 2, 64, 65, 66, 1100)
    contexts = [some(3, 2, kv_heads, n + n % 7, head_dim, seed=n).to(dtype) for n in lengths]
    untouched = [context.clone() for context in contexts]
    q = some(len(lengths), kv_heads * groups, head_dim).to(dtype)
    new = some(len(lengths), 2, kv_heads, head_dim, seed=2).to(dtype)
    table = ContextTable(
        addresses=torch.tensor([context.data_ptr() for context in contexts]),
        capacities=torch.tensor([context.shape[3] for context in contexts]),
        positions=torch.tensor([n - 1 for n in lengths]),
    )
    attention = TokenAttention(8, kv_heads, groups, head_dim, CPU)
    out = attention(q, new, table, 1, window=window, scaling=0.2)
    for i, n in enumerate(lengths):
        untouched[i][1, :, :, n - 1] = new[i]
        assert torch.equal(contexts[i], untouched[i]), "the new position of this layer, and nothing else"
        keys, values = contexts[i][1, :, :, :n]
        expected = exact(q[i], keys, values, window, 0.2)
        assert float((out[i].float() - expected).norm() / expected.norm()) < (1e-5 if dtype is torch.float32 else 0.01)


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CONFIGS = {"llama": LlamaConfig(**TINY), "a sliding window": MistralConfig(**TINY, sliding_window=9)}
BLOCK_TOKENS = 4
SAMPLE = SampleRequest(sampling=Sampling(temperature=0.0, top_logprobs=0), position=0, history=np.zeros(0, np.int32))


def engine_of(folder: Path, config: Any) -> TransformersEngine:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return TransformersEngine.load(str(folder), dtype=KvDtype.FLOAT32, block_tokens=BLOCK_TOKENS, threads=1)


def served(engine: TransformersEngine) -> tuple[list[int], list[float], Any]:
    """Tokens and their log-probabilities in batches of one to five sequences, and what the arena holds in the end."""
    arena = np.zeros(60 * engine.spec.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    lengths = {name: 3 + 7 * name for name in range(5)}
    blocks = {name: list(range(12 * name, 12 * name + 12)) for name in lengths}
    for name, n in lengths.items():
        tokens = (np.arange(n, dtype=np.int32) * (name + 5)) % 64
        engine.prefill(PrefillChunk(sequence=str(name), tokens=tokens, start=0, blocks=blocks[name]), lambda _: None)
    tokens_drawn, logprobs = [], []
    for step, size in enumerate((1, 2, 5, 3, 4)):
        slots = [
            DecodeSlot(sequence=str(name), token=step, position=lengths[name], blocks=blocks[name], sample=SAMPLE)
            for name in range(size)
        ]
        for name, drawn in enumerate(engine.decode(slots)):
            assert drawn.logprob is not None
            tokens_drawn.append(drawn.token)
            logprobs.append(drawn.logprob.logprob)
            lengths[name] += 1
    engine.unbind()
    return tokens_drawn, logprobs, arena.view(np.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_fixed_steps_are_those_of_the_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, logprobs, arena = served(engine_of(tmp_path, CONFIGS[name]))
    made: list[Callable[[], None]] = []

    def once(compute: Callable[[], None]) -> Callable[[], None]:
        made.append(compute)
        return compute

    monkeypatch.setattr(
        "mooncake_mesh.engine.runner._step_graphs",
        lambda loaded, dtype, options: StepGraphs(loaded.model, loaded.layout, dtype, options, once),
    )
    fixed_tokens, fixed_logprobs, fixed_arena = served(engine_of(tmp_path, CONFIGS[name]))
    assert len(made) == 4, "for 1, 2, 4 and 8 sequences"
    assert fixed_tokens == tokens
    assert np.allclose(fixed_logprobs, logprobs, atol=1e-5)
    assert np.allclose(fixed_arena, arena, atol=1e-5)
