"""The transformers engine against transformers' own generate, on tiny random models in float32."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mooncake_mesh.config_layerwise import LayerwiseConfig, Overlap  # noqa: E402
from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest  # noqa: E402
from mooncake_mesh.engine.attention import IMPLEMENTATION  # noqa: E402
from mooncake_mesh.engine.model import LoadedModel, probe_attention  # noqa: E402
from mooncake_mesh.engine.runner import DEFAULT_LAYERWISE, TransformersEngine  # noqa: E402
from mooncake_mesh.kv.block_hash import chain, token_bytes  # noqa: E402
from mooncake_mesh.kv.layers import LayerRange  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, layout_from_config  # noqa: E402
from mooncake_proto.ids import BlockKey  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402

GREEDY = Sampling(temperature=0.0)
BLOCK_TOKENS = 8
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # so that attention matters and tokens vary
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**SIZES, "num_key_value_heads": 1},
            head_dim=16,
            sliding_window=11,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}
PROMPT = [(7 * i * i + 3 * i + 1) % 128 for i in range(45)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(11)
    return CONFIGS[request.param]().eval().requires_grad_(False)


def make_engine(
    model: Any,
    dtype: KvDtype = KvDtype.FLOAT32,
    context_bytes: int = 1 << 30,
    layerwise: LayerwiseConfig = DEFAULT_LAYERWISE,
) -> TransformersEngine:
    """An engine over *model*'s weights; *model* itself stays as it is."""
    paged = type(model)(model.config.__class__(**model.config.to_dict()))
    paged.load_state_dict(model.state_dict())
    paged = paged.eval().requires_grad_(False).to({"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype.value])
    paged.set_attn_implementation(IMPLEMENTATION)
    layout = layout_from_config(paged.config, dtype, BLOCK_TOKENS)
    probe_attention(paged, layout)
    layers = LayerRange.whole(layout.layers)
    loaded = LoadedModel(
        model=paged,
        forward=paged,
        layout=layout,
        vocab_size=128,
        max_context_tokens=512,
        layers=layers,
        device=torch.device("cpu"),
    )
    return TransformersEngine(
        loaded, name="tiny", fingerprint="f", folder=Path(), context_bytes=context_bytes, layerwise=layerwise
    )


def bound_engine(model: Any, **options: Any) -> tuple[TransformersEngine, np.ndarray]:
    engine = make_engine(model, **options)
    arena = np.zeros(64 * engine.spec.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    return engine, arena


def reference(model: Any, prompt: Sequence[int], n: int) -> list[int]:
    """The first *n* tokens that transformers' generate draws greedily."""
    return _reference(model, tuple(prompt))[:n]


@functools.cache
def _reference(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    return [int(token) for token in out[0, len(prompt) :]]


def sample(position: int, sampling: Sampling = GREEDY) -> SampleRequest:
    return SampleRequest(sampling=sampling, position=position, history=np.zeros(0, np.int32))


def prefill(
    engine: TransformersEngine,
    prompt: Sequence[int],
    blocks: Sequence[int],
    *,
    name: str,
    start: int = 0,
    chunk_tokens: int = 1000,
    on_layer: Callable[[int], None] = lambda layer: None,
) -> int:
    drawn = None
    for begin in range(start, len(prompt), chunk_tokens):
        end = min(begin + chunk_tokens, len(prompt))
        chunk = PrefillChunk(
            sequence=name,
            tokens=np.array(prompt[begin:end], np.int32),
            start=begin,
            blocks=blocks,
            sample=sample(0) if end == len(prompt) else None,
        )
        drawn = engine.prefill(chunk, on_layer)
    assert drawn is not None
    return drawn.token


def slot(name: str, blocks: Sequence[int], position: int, tokens: Sequence[int]) -> DecodeSlot:
    return DecodeSlot(sequence=name, token=tokens[-1], position=position, blocks=blocks, sample=sample(len(tokens)))


def decode(
    engine: TransformersEngine, blocks: Sequence[int], *, name: str, prompt_tokens: int, first: int, n: int
) -> list[int]:
    """*n* tokens of one sequence, *first* among them."""
    tokens = [first]
    while len(tokens) < n:
        position = prompt_tokens + len(tokens) - 1
        tokens.append(engine.decode([slot(name, blocks, position, tokens)])[0].token)
    return tokens


SCATTERED = [40, 3, 17, 5, 63, 9, 22, 1, 30, 31]


@pytest.mark.parametrize(
    ("chunk_tokens", "context_bytes"), [(1, 1 << 30), (7, 0), (16, 1 << 30), (1000, 0), (1000, 1 << 30)]
)
def test_greedy_equals_generate(model: Any, chunk_tokens: int, context_bytes: int) -> None:
    engine, _ = bound_engine(model, context_bytes=context_bytes)
    first = prefill(engine, PROMPT, SCATTERED, name="s", chunk_tokens=chunk_tokens)
    tokens = decode(engine, SCATTERED, name="s", prompt_tokens=len(PROMPT), first=first, n=20)
    assert tokens == reference(model, PROMPT, 20)
    assert len(set(tokens)) > 4  # a model that repeats itself would prove little


def test_a_ragged_batch_equals_each_sequence_alone(model: Any) -> None:
    lengths = [45, 3, 21, 8, 30]
    engine, _ = bound_engine(model)
    blocks = [list(range(10 * i, 10 * i + 10)) for i in range(len(lengths))]
    drawn = [
        [prefill(engine, PROMPT[:length], blocks[i], name=f"s{i}", chunk_tokens=10)] for i, length in enumerate(lengths)
    ]
    for step in range(15):
        # Sequences join and leave, and change their place in the batch.
        running = [i for i in range(len(lengths)) if step >= i]
        running = running[step % len(running) :] + running[: step % len(running)]
        slots = [slot(f"s{i}", blocks[i], lengths[i] + len(drawn[i]) - 1, drawn[i]) for i in running]
        for i, one in zip(running, engine.decode(slots), strict=True):
            drawn[i].append(one.token)
    for length, tokens in zip(lengths, drawn, strict=True):
        assert tokens == reference(model, PROMPT[:length], len(tokens))


def test_kv_from_another_engines_arena_is_used(model: Any) -> None:
    source, source_arena = bound_engine(model)
    first = prefill(source, PROMPT, [0, 1, 2, 3, 4, 5], name="p")
    target, target_arena = bound_engine(model)
    target_blocks = [9, 4, 50, 2, 7, 33, 8, 1]
    move_blocks(source, source_arena, [0, 1, 2, 3, 4, 5], target_arena, target_blocks)
    tokens = decode(target, target_blocks, name="d", prompt_tokens=len(PROMPT), first=first, n=16)
    assert tokens == reference(model, PROMPT, 16)


def test_a_prefix_is_reused(model: Any) -> None:
    source, source_arena = bound_engine(model)
    prefill(source, PROMPT[:32], [0, 1, 2, 3], name="p")
    for context_bytes in (1 << 30, 0):
        target, target_arena = bound_engine(model, context_bytes=context_bytes)
        move_blocks(source, source_arena, [0, 1, 2, 3], target_arena, SCATTERED)
        first = prefill(target, PROMPT, SCATTERED, name="d", start=32, chunk_tokens=5)
        tokens = decode(target, SCATTERED, name="d", prompt_tokens=len(PROMPT), first=first, n=16)
        assert tokens == reference(model, PROMPT, 16)


LAYERWISE = [
    pytest.param(
        LayerwiseConfig(overlap=overlap, least_bytes=0, budget=budget), id=f"{overlap.value}-{budget or 'all'}"
    )
    for overlap in Overlap
    for budget in (0, 1, 2, 30)
] + [pytest.param(LayerwiseConfig(budget=budget), id=f"small copies at once-{budget or 'all'}") for budget in (0, 2)]


@pytest.mark.parametrize("layerwise", LAYERWISE)
def test_however_its_layers_are_loaded_and_stored_a_prompt_is_the_same(model: Any, layerwise: LayerwiseConfig) -> None:
    source, source_arena = bound_engine(model)
    prefill(source, PROMPT[:24], [0, 1, 2], name="p")
    target, target_arena = bound_engine(model, layerwise=layerwise)
    move_blocks(source, source_arena, [0, 1, 2], target_arena, SCATTERED)
    reported: list[int] = []
    first = prefill(target, PROMPT, SCATTERED, name="d", start=24, chunk_tokens=9, on_layer=reported.append)
    layers = target.spec.layout.layers
    assert reported == [*range(layers)] * 3, "each chunk tells of each layer once, in order"
    if 0 < layerwise.budget < layers:
        assert target.kv_bytes == 1024 * layerwise.budget * target.spec.layout.token_bytes // layers
    tokens = decode(target, SCATTERED, name="d", prompt_tokens=len(PROMPT), first=first, n=10)
    assert tokens == reference(model, PROMPT, 10)


def test_every_corrupted_slice_changes_the_output(model: Any) -> None:
    engine, arena = bound_engine(model)
    first = prefill(engine, PROMPT, SCATTERED, name="p")
    layout = engine.spec.layout
    with_logprob = sample(1, Sampling(temperature=0.0, top_logprobs=0))
    intact = arena.copy()
    logprobs = set()
    for layer in (None, *range(layout.layers)):
        arena[:] = intact
        if layer is not None:
            begin = SCATTERED[5] * layout.block_bytes + layer * layout.slice_bytes
            arena[begin : begin + layout.slice_bytes].view(np.float32)[:] *= -1
        one = replace(slot(f"layer {layer}", SCATTERED, len(PROMPT), [first]), sample=with_logprob)
        drawn = engine.decode([one])[0]
        assert drawn.logprob is not None
        logprobs.add(drawn.logprob.logprob)
    assert len(logprobs) == 1 + layout.layers


def block_keys(tokens: Sequence[int]) -> list[BlockKey]:
    return chain(BlockKey(b"r" * 16), token_bytes(tokens), BLOCK_TOKENS)


def test_a_turn_behind_a_retired_sequence_reads_no_pages(model: Any) -> None:
    engine, arena = bound_engine(model)
    first = prefill(engine, PROMPT[:30], SCATTERED, name="turn 1")
    said = decode(engine, SCATTERED, name="turn 1", prompt_tokens=30, first=first, n=5)
    history = [*PROMPT[:30], *said]
    keys = block_keys(history[:34])  # the last token drawn was never fed
    engine.retire("turn 1", keys)
    arena[:] = 0xFF  # NaN
    turn = [*history, *PROMPT[30:]]
    start = len(keys) * BLOCK_TOKENS
    chunk = PrefillChunk(
        sequence="turn 2",
        tokens=np.array(turn[start:], np.int32),
        start=start,
        blocks=SCATTERED,
        sample=sample(0),
        keys=keys,
    )
    drawn = engine.prefill(chunk, lambda layer: None)
    assert drawn is not None
    again, _ = bound_engine(model)
    assert drawn.token == prefill(again, turn, SCATTERED, name="whole")


@pytest.mark.parametrize("overlap", Overlap)
def test_a_preloaded_sequence_reads_no_pages_in_its_steps(model: Any, overlap: Overlap) -> None:
    source, source_arena = bound_engine(model)
    first = prefill(source, PROMPT, SCATTERED, name="p")
    engine, arena = bound_engine(model, layerwise=LayerwiseConfig(overlap=overlap, least_bytes=0))
    arena[:] = source_arena
    other = prefill(engine, PROMPT[::-1], [50, 51, 52, 53, 54, 55, 56, 57], name="other")
    loading = engine.preload("d", SCATTERED, len(PROMPT), block_keys(PROMPT))
    beside = decode(engine, [50, 51, 52, 53, 54, 55, 56, 57], name="other", prompt_tokens=45, first=other, n=3)
    assert beside == reference(model, PROMPT[::-1], 3)
    assert loading.result(timeout=10) is None
    arena[:] = 0xFF
    assert decode(engine, SCATTERED, name="d", prompt_tokens=45, first=first, n=6) == reference(model, PROMPT, 6)


def test_blocks_of_a_finished_sequence_can_be_used_by_another(model: Any) -> None:
    engine, _ = bound_engine(model)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1]), ("c", PROMPT)):
        first = prefill(engine, prompt, SCATTERED, name=name, chunk_tokens=20)
        tokens = decode(engine, SCATTERED, name=name, prompt_tokens=len(PROMPT), first=first, n=8)
        assert tokens == reference(model, prompt, 8)


def test_contexts_beyond_the_budget_are_dropped_and_made_anew(model: Any) -> None:
    layout = make_engine(model).spec.layout
    context_bytes = 2 * len(SCATTERED) * layout.block_bytes
    engine, _ = bound_engine(model, context_bytes=context_bytes)
    blocks = [list(range(10 * i, 10 * i + 10)) for i in range(4)]
    drawn = [[prefill(engine, PROMPT[: 40 + i], blocks[i], name=f"s{i}")] for i in range(4)]
    for step in range(12):
        running = [0, 1, 2, 3] if step % 3 == 0 else [step % 4]
        slots = [slot(f"s{i}", blocks[i], 40 + i + len(drawn[i]) - 1, drawn[i]) for i in running]
        for i, one in zip(running, engine.decode(slots), strict=True):
            drawn[i].append(one.token)
        assert engine._contexts.kept_bytes <= context_bytes
    for i, tokens in enumerate(drawn):
        assert tokens == reference(model, PROMPT[: 40 + i], len(tokens))


@pytest.mark.parametrize("overlap", Overlap)
def test_each_layer_is_in_the_arena_when_it_is_reported(model: Any, overlap: Overlap) -> None:
    whole, whole_arena = bound_engine(model)
    prefill(whole, PROMPT, SCATTERED, name="s")
    engine, arena = bound_engine(model, layerwise=LayerwiseConfig(overlap=overlap, least_bytes=0))
    layout = engine.spec.layout
    done = whole_arena.reshape(64, layout.layers, -1).view(np.float32)
    reported: list[int] = []

    def on_layer(layer: int) -> None:
        now = arena.reshape(64, layout.layers, -1).view(np.float32)
        np.testing.assert_array_equal(now[:, : layer + 1], done[:, : layer + 1])
        assert overlap is Overlap.ON or not now[:, layer + 1 :].any(), "it is told of at once"
        reported.append(layer)

    prefill(engine, PROMPT, SCATTERED, name="s", on_layer=on_layer)
    assert reported == list(range(layout.layers))


@pytest.mark.parametrize("layerwise", LAYERWISE)
def test_a_forward_that_is_stopped_leaves_nothing_wrong_behind(model: Any, layerwise: LayerwiseConfig) -> None:
    engine, _ = bound_engine(model, layerwise=layerwise)
    first = prefill(engine, PROMPT[:20], SCATTERED, name="s")

    def stop(layer: int) -> None:
        if layer == 2:
            raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        prefill(engine, PROMPT, SCATTERED, name="s", start=20, on_layer=stop)
    first = prefill(engine, PROMPT, SCATTERED, name="s", start=20)
    tokens = decode(engine, SCATTERED, name="s", prompt_tokens=len(PROMPT), first=first, n=8)
    assert tokens == reference(model, PROMPT, 8)


def test_bfloat16_runs_close_to_float32(model: Any) -> None:
    engine, arena = bound_engine(model, dtype=KvDtype.BFLOAT16)
    first = prefill(engine, PROMPT, SCATTERED, name="s", chunk_tokens=16)
    tokens = decode(engine, SCATTERED, name="s", prompt_tokens=len(PROMPT), first=first, n=4)
    assert all(0 <= token < 128 for token in tokens)
    exact, exact_arena = bound_engine(model)
    prefill(exact, PROMPT, SCATTERED, name="s")
    layout = engine.spec.layout
    ours = torch.frombuffer(arena, dtype=torch.bfloat16).view(-1, *layout.shape)[SCATTERED[:5]].float()
    theirs = torch.frombuffer(exact_arena, dtype=torch.float32).view(-1, *layout.shape)[SCATTERED[:5]]
    assert float((ours - theirs).norm() / theirs.norm()) < 0.1


def test_sampling_draws_the_same_tokens_in_any_batch_and_after_a_move(model: Any) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.95, seed=5)
    engine, _ = bound_engine(model)
    first = prefill(engine, PROMPT, SCATTERED, name="a")
    prefill(engine, PROMPT[::-1], range(50, 60), name="other")
    tokens = [first]
    for position in range(len(PROMPT), len(PROMPT) + 8):
        one = replace(slot("a", SCATTERED, position, tokens), sample=sample(len(tokens), sampling))
        other = slot("other", range(50, 60), position, tokens)
        tokens.append(engine.decode([other, one])[1].token)
    moved = prefill_sampled(engine, PROMPT + tokens[:4], range(20, 30), sample(4, sampling))
    assert moved == tokens[4]


def prefill_sampled(
    engine: TransformersEngine, tokens: Sequence[int], blocks: Sequence[int], request: SampleRequest
) -> int:
    chunk = PrefillChunk(sequence="moved", tokens=np.array(tokens, np.int32), start=0, blocks=blocks, sample=request)
    drawn = engine.prefill(chunk, lambda layer: None)
    assert drawn is not None
    return drawn.token


def move_blocks(
    engine: TransformersEngine,
    source: np.ndarray,
    source_blocks: Sequence[int],
    target: np.ndarray,
    target_blocks: Sequence[int],
) -> None:
    """What a messenger does: copy blocks between arenas, byte by byte."""
    size = engine.spec.layout.block_bytes
    for old, new in itertools.zip_longest(source_blocks, target_blocks[: len(source_blocks)]):
        target[new * size : (new + 1) * size] = source[old * size : (old + 1) * size]


def test_unbind_lets_go_of_the_arena() -> None:
    torch.manual_seed(11)
    engine = make_engine(CONFIGS["llama"]())
    arena = bytearray(64 * engine.spec.layout.block_bytes)
    engine.bind(memoryview(arena))
    prefill(engine, PROMPT, SCATTERED, name="s")
    engine.decode([slot("s", SCATTERED, len(PROMPT), [1])])
    with pytest.raises(BufferError):
        arena.append(0)
    engine.unbind()
    arena.append(0)
    arena.pop()
    engine.bind(memoryview(arena))
    prefill(engine, PROMPT, SCATTERED, name="s2")


def test_an_arena_of_odd_size_is_refused() -> None:
    engine = make_engine(CONFIGS["llama"]())
    with pytest.raises(ValueError, match="whole number"):
        engine.bind(memoryview(bytearray(100)))


def test_the_head_gets_packed_activations(model: Any) -> None:
    """A slice of the chunk's activations has the chunk's strides, by which a bf16 product takes 20 times as long."""
    engine, _ = bound_engine(model)
    strides = []
    head = engine._model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    prefill(engine, PROMPT, range(8), name="packed")
    assert strides == [(48, 48, 1)]
