"""The engine with the real demonstration model (converted to the user's cache on first use)."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from mooncake_mesh.engine.api import DecodeSlot, Engine, PrefillChunk, SampleRequest  # noqa: E402
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model  # noqa: E402
from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

N = 32
QUESTIONS = [
    "What is 2+2?",
    "Write a short poem about the moon and the sea.",
    "Summarise in one sentence: " + "The lighthouse keeper climbed the stairs every evening and lit the lamp. " * 20,
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = TransformersEngine.load(DEFAULT_MODEL, dtype=KvDtype.FLOAT32, block_tokens=16)
    arena = bytearray(64 * engine.spec.layout.block_bytes)
    engine.bind(memoryview(arena))
    yield engine
    engine.unbind()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(DEFAULT_MODEL))
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]


def sample(position: int) -> SampleRequest:
    return SampleRequest(sampling=Sampling(temperature=0.0), position=position, history=np.zeros(0, np.int32))


def test_the_spec_is_that_of_the_model(engine: Engine) -> None:
    layout = engine.spec.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim) == (30, 3, 64)
    assert layout.token_bytes == 46_080
    assert engine.spec.vocab_size == 49_152
    assert engine.spec.max_context_tokens == 8192


def test_greedy_equals_generate(engine: Engine, prompts: list[list[int]]) -> None:
    model = AutoModelForCausalLM.from_pretrained(resolve_model(DEFAULT_MODEL), dtype=torch.float32)
    model.generation_config.eos_token_id = None  # the engine goes on until its worker stops it
    expected = [reference(model, prompt) for prompt in prompts]
    blocks, used = [], 0
    for prompt in prompts:
        needed = engine.spec.layout.blocks_for(len(prompt) + N)
        blocks.append(range(used, used + needed))
        used += needed
    drawn = [[prefill(engine, prompt, blocks[i], f"s{i}")] for i, prompt in enumerate(prompts)]
    for step in range(1, N):
        slots = [
            DecodeSlot(
                sequence=f"s{i}",
                token=drawn[i][-1],
                position=len(prompt) + step - 1,
                blocks=blocks[i],
                sample=sample(step),
            )
            for i, prompt in enumerate(prompts)
        ]
        for i, one in enumerate(engine.decode(slots)):
            drawn[i].append(one.token)
    assert drawn == expected


def prefill(engine: Engine, prompt: list[int], blocks: range, name: str, chunk_tokens: int = 64) -> int:
    drawn = None
    for start in range(0, len(prompt), chunk_tokens):
        tokens = prompt[start : start + chunk_tokens]
        chunk = PrefillChunk(
            sequence=name,
            tokens=np.array(tokens, np.int32),
            start=start,
            blocks=blocks,
            sample=sample(0) if start + len(tokens) == len(prompt) else None,
        )
        drawn = engine.prefill(chunk, lambda layer: None)
    assert drawn is not None
    return drawn.token


def reference(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=N, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]
