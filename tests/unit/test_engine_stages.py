"""A prompt that goes through the layers stage by stage draws the token that one engine draws; the KV is the same."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_mesh.engine.api import Engine, PrefillChunk, SampleRequest
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.kv.block_hash import chain, token_bytes
from mooncake_mesh.kv.layers import LayerRange, StagePart, layer_ranges
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.ids import BlockKey
from mooncake_proto.serving import Sampling

torch = pytest.importorskip("torch")

from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402

LAYERS = 7
SPLITS = [(7,), (4, 3), (1, 6), (2, 4, 1), (1, 2, 1, 1, 2)]
PROMPT = np.array([(7 * i * i + 3 * i + 1) % 128 for i in range(45)], np.int32)
BLOCKS = [5, 0, 9, 3, 7, 1]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that attention matters and tokens vary
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
}
Make = Callable[[StagePart | None], Engine]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["fake", "llama"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes an engine with a part of one model."""
    if request.param == "fake":
        layout = KvLayout(layers=LAYERS, kv_heads=1, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=8)
        config = FakeConfig(layout=layout)
        return lambda part: FakeEngine(config, layers=None if part is None else part.of(LAYERS))
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(11)
    MODELS[request.param]().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return lambda part: _load(folder, part)


def _load(folder: Path, part: StagePart | None) -> TransformersEngine:
    return TransformersEngine.load(str(folder), dtype=KvDtype.FLOAT32, block_tokens=8, part=part)


def stages_of(make: Make, split: Sequence[int]) -> list[Engine]:
    return [make(StagePart(stage=i, stages=len(split), split=tuple(split))) for i in range(len(split))]


def chunk(engine: Engine, start: int, end: int, hidden_in: Any, hidden_out: Any) -> PrefillChunk:
    sample = SampleRequest(sampling=Sampling(temperature=0.0), position=0, history=PROMPT)
    return PrefillChunk(
        sequence="s",
        tokens=PROMPT[start:end] if engine.spec.layers.has_embedding else PROMPT[:0],
        start=start,
        blocks=BLOCKS,
        sample=sample if end == len(PROMPT) else None,
        hidden_in=hidden_in,
        hidden_out=hidden_out,
    )


def run(engines: Sequence[Engine], bounds: Sequence[int]) -> tuple[int, np.ndarray, list[int]]:
    """Token, arena and layers in the order they were written. The arena is the node's, for all stages."""
    arena = np.zeros(12 * engines[0].spec.layout.block_bytes, np.uint8)
    for engine in engines:
        engine.bind(arena.data)
    written: list[int] = []
    drawn = None
    for start, end in itertools.pairwise(bounds):
        hidden = None
        for engine in engines:
            out = memoryview(bytearray((end - start) * engine.spec.hidden_bytes))
            drawn = engine.prefill(chunk(engine, start, end, hidden, out), written.append)
            hidden = out
    assert drawn is not None
    return drawn.token, arena, written


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_stages_compute_what_one_engine_computes(make: Make, split: Sequence[int]) -> None:
    token, arena, _ = run([make(None)], [0, 45])
    bounds = [0, 16, 32, 40, 45]
    staged_token, staged_arena, written = run(stages_of(make, split), bounds)
    assert staged_token == token
    np.testing.assert_allclose(staged_arena.view(np.float32), arena.view(np.float32), rtol=1e-3, atol=1e-4)
    assert written == list(range(LAYERS)) * 4


@pytest.mark.parametrize("split", [(4, 3), (1, 2, 4)], ids=str)
def test_stages_of_bfloat16_compute_bit_for_bit_what_one_engine_does(split: Sequence[int], tmp_path: Path) -> None:
    """Its layers are those of engine/native where the processor can: one module for all of a stage."""
    torch.manual_seed(11)
    wide = {**SIZES, "hidden_size": 96, "head_dim": 64, "intermediate_size": 96}
    LlamaForCausalLM(LlamaConfig(**wide)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")

    def make(part: StagePart | None) -> Engine:
        return TransformersEngine.load(str(tmp_path), dtype=KvDtype.BFLOAT16, block_tokens=8, part=part)

    bounds = [0, 16, 32, 40, 45]
    token, arena, _ = run([make(None)], bounds)
    staged_token, staged_arena, written = run(stages_of(make, split), bounds)
    assert staged_token == token
    np.testing.assert_array_equal(staged_arena, arena)
    assert written == list(range(LAYERS)) * 4


def test_a_prefix_that_was_cached_is_read_by_every_stage(make: Make) -> None:
    token, arena, _ = run([make(None)], [0, 45])
    engines = stages_of(make, (3, 4))
    for engine in engines:
        engine.bind(arena.data)
    out = memoryview(bytearray(21 * engines[0].spec.hidden_bytes))
    assert engines[0].prefill(chunk(engines[0], 24, 45, None, out), lambda _: None) is None
    drawn = engines[1].prefill(chunk(engines[1], 24, 45, out, None), lambda _: None)
    assert drawn is not None
    assert drawn.token == token


def test_a_stage_needs_no_more_than_its_own_layers(make: Make) -> None:
    """Each has memory of its own, with nothing in what are others' layers, before and after."""
    token, arena, _ = run([make(None)], [0, 45])
    hidden = None
    for engine in stages_of(make, (3, 4)):
        own = slice(engine.spec.layers.first, engine.spec.layers.end)
        pages = np.zeros_like(arena).reshape(12, LAYERS, -1)
        pages[:, own] = arena.reshape(12, LAYERS, -1)[:, own]
        engine.bind(pages.reshape(-1).data)
        out = memoryview(bytearray(21 * engine.spec.hidden_bytes))
        drawn, hidden = engine.prefill(chunk(engine, 24, 45, hidden, out), lambda _: None), out
        pages[:, own] = 0
        assert not pages.any()
    assert drawn is not None
    assert drawn.token == token


def test_a_stage_has_the_prefix_of_a_sequence_that_is_over(tmp_path: Path) -> None:
    """Nothing is left of it in the arena, and the token is the same."""
    torch.manual_seed(11)
    MODELS["llama"]().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    engines = stages_of(lambda part: _load(tmp_path, part), (3, 4))
    keys = chain(BlockKey(b"r" * 16), token_bytes(PROMPT.tolist()), 8)
    token, arena, _ = run(engines, [0, 24, 45])
    for engine in engines:
        engine.retire("s", keys)
    arena[:] = 0
    hidden = None
    for engine in engines:
        out = memoryview(bytearray(21 * engine.spec.hidden_bytes))
        with_keys = replace(chunk(engine, 24, 45, hidden, out), sequence="next", keys=keys[:3])
        drawn, hidden = engine.prefill(with_keys, lambda _: None), out
    assert drawn is not None
    assert drawn.token == token


def test_activations_matter(make: Make) -> None:
    token, _, _ = run([make(None)], [0, 45])
    first, second = stages_of(make, (3, 4))
    arena = np.zeros(12 * first.spec.layout.block_bytes, np.uint8)
    out = memoryview(bytearray(45 * first.spec.hidden_bytes))
    for engine in (first, second):
        engine.bind(arena.data)
    first.prefill(chunk(first, 0, 45, None, out), lambda _: None)
    rows = np.frombuffer(out, np.uint8).reshape(45, -1)
    rows[:] = rows[::-1].copy()
    drawn = second.prefill(chunk(second, 0, 45, out, None), lambda _: None)
    assert drawn is not None
    assert drawn.token != token


def test_a_stage_loads_its_own_weights_only(tmp_path: Path) -> None:
    torch.manual_seed(11)
    MODELS["qwen2"]().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    sizes = []
    engines = stages_of(lambda part: _load(tmp_path, part), (3, 2, 2))
    for engine in engines:
        assert isinstance(engine, TransformersEngine)
        sizes.append(sum(weight.numel() for weight in engine._model.parameters()))
    layer = sizes[1] // 2  # the middle stage has nothing but its two layers
    embedding = 128 * 48
    assert run(engines, [0, 16, 45])[0] == run([_load(tmp_path, None)], [0, 45])[0]
    assert sizes == [3 * layer + embedding, 2 * layer, 2 * layer + embedding + 48]


def test_layers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    MODELS["qwen2"]().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="7 layers"):
        _load(tmp_path, StagePart(stage=0, stages=2, split=(4, 4)))


def test_ranges_follow_each_other() -> None:
    assert [(r.first, r.end) for r in layer_ranges(7, (1, 4, 2))] == [(0, 1), (1, 5), (5, 7)]
    assert StagePart(stage=1, stages=3).of(7) == LayerRange(first=3, end=5, total=7)
    for split in ((), (7, 0), (3, 3)):
        with pytest.raises(ValueError, match="split"):
            layer_ranges(7, split)
    with pytest.raises(ValueError, match="stages"):
        StagePart(stage=0, stages=8).of(7)
