"""The engine without a model."""

import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import pytest

from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest
from mooncake_mesh.engine.fake import (
    EOS,
    UTF8_TEXT,
    FakeConfig,
    FakeEngine,
    FakeOutput,
    FakeTiming,
    expected_tokens,
)
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.serving import Sampling

GREEDY = Sampling(temperature=0.0)
PROMPT = list(b"The quick brown fox jumps over the lazy dog, twice.")


def request(position: int, sampling: Sampling = GREEDY, banned: tuple[int, ...] = ()) -> SampleRequest:
    return SampleRequest(sampling=sampling, position=position, history=np.zeros(0, np.int32), banned=banned)


class Sequence1:
    """Drives one sequence through an engine: prefill in chunks, then decode."""

    def __init__(
        self, engine: FakeEngine, blocks: Sequence[int], *, name: str = "s", sampling: Sampling = GREEDY
    ) -> None:
        self.engine = engine
        self.blocks = blocks
        self.name = name
        self.sampling = sampling
        self.length = 0
        self.drawn: list[int] = []

    def prefill(self, prompt: Sequence[int], chunk_tokens: int = 1000, start: int = 0) -> None:
        for begin in range(start, len(prompt), chunk_tokens):
            end = min(begin + chunk_tokens, len(prompt))
            drawn = self.engine.prefill(
                PrefillChunk(
                    sequence=self.name,
                    tokens=np.array(prompt[begin:end], np.int32),
                    start=begin,
                    blocks=self.blocks,
                    sample=request(0, self.sampling) if end == len(prompt) else None,
                ),
                lambda layer: None,
            )
        assert drawn is not None
        self.drawn.append(drawn.token)
        self.length = len(prompt)

    def slot(self) -> DecodeSlot:
        return DecodeSlot(
            sequence=self.name,
            token=self.drawn[-1],
            position=self.length,
            blocks=self.blocks,
            sample=request(len(self.drawn), self.sampling),
        )

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self.accept(self.engine.decode([self.slot()])[0].token)

    def accept(self, token: int) -> None:
        self.drawn.append(token)
        self.length += 1


def bound(config: FakeConfig, n_blocks: int = 64) -> tuple[FakeEngine, np.ndarray]:
    engine = FakeEngine(config)
    arena = np.zeros(n_blocks * config.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    return engine, arena


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 1000])
@pytest.mark.parametrize(
    "layout",
    [
        FakeConfig().layout,
        KvLayout(layers=3, kv_heads=2, head_dim=6, dtype=KvDtype.BFLOAT16, block_tokens=5),
    ],
)
def test_tokens_are_those_of_the_reference(chunk_tokens: int, layout: KvLayout) -> None:
    config = FakeConfig(layout=layout)
    engine, _ = bound(config)
    sequence = Sequence1(engine, blocks=list(range(40, 10, -1)))
    sequence.prefill(PROMPT, chunk_tokens)
    sequence.decode(20)
    assert sequence.drawn == expected_tokens(config, PROMPT, 21)
    assert len(set(sequence.drawn)) > 10
    assert all(32 <= token < 127 for token in sequence.drawn)


def test_a_batch_draws_what_its_sequences_draw_alone() -> None:
    config = FakeConfig()
    engine, _ = bound(config)
    sequences = [Sequence1(engine, blocks=range(10 * i, 10 * i + 10), name=f"s{i}") for i in range(5)]
    for i, sequence in enumerate(sequences):
        sequence.prefill(PROMPT[: 9 * (i + 1)])
    for _ in range(12):
        for sequence, drawn in zip(sequences, engine.decode([s.slot() for s in sequences]), strict=True):
            sequence.accept(drawn.token)
    for i, sequence in enumerate(sequences):
        assert sequence.drawn == expected_tokens(config, PROMPT[: 9 * (i + 1)], 13)


def test_an_empty_batch_is_no_step() -> None:
    engine, _ = bound(FakeConfig())
    assert engine.decode([]) == []


def test_every_slice_of_the_prefix_matters() -> None:
    config = FakeConfig(layout=KvLayout(layers=3, kv_heads=1, head_dim=2, dtype=KvDtype.FLOAT32, block_tokens=16))
    prompt = PROMPT[:40]
    engine, arena = bound(config, n_blocks=4)
    writer = Sequence1(engine, blocks=range(4))
    writer.prefill(prompt[:39])
    written = arena.copy()
    good = expected_tokens(config, prompt, 12)
    half_bytes = config.layout.slice_bytes // 2
    for half in range(3 * config.layout.layers * 2):
        arena[:] = written
        arena[half * half_bytes + 3] ^= 1
        reader = Sequence1(engine, blocks=range(4), name=f"flipped bit {half}")
        reader.prefill(prompt, start=39)
        reader.decode(11)
        assert reader.drawn != good
    arena[:] = written
    reader = Sequence1(engine, blocks=range(4), name="intact")
    reader.prefill(prompt, start=39)
    reader.decode(11)
    assert reader.drawn == good


def test_swapped_blocks_change_the_output() -> None:
    config = FakeConfig()
    engine, _ = bound(config)
    Sequence1(engine, blocks=[1, 2, 3, 4]).prefill(PROMPT)
    reader = Sequence1(engine, blocks=[2, 1, 3, 4], name="swapped")
    reader.prefill(PROMPT, start=48)
    reader.decode(11)
    assert reader.drawn != expected_tokens(config, PROMPT, 12)


def test_kv_moved_to_another_arena_goes_on_with_the_same_tokens() -> None:
    config = FakeConfig()
    source, source_arena = bound(config)
    target, target_arena = bound(config)
    prefilled = Sequence1(source, blocks=[5, 6, 7, 8])
    prefilled.prefill(PROMPT)
    size = config.layout.block_bytes
    for old, new in zip([5, 6, 7, 8], [20, 3, 9, 0], strict=True):
        target_arena[new * size : (new + 1) * size] = source_arena[old * size : (old + 1) * size]
    decoding = Sequence1(target, blocks=[20, 3, 9, 0, 1])
    decoding.drawn, decoding.length = list(prefilled.drawn), prefilled.length
    decoding.decode(20)
    assert decoding.drawn == expected_tokens(config, PROMPT, 21)


def test_a_moved_request_draws_the_rest_of_the_same_tokens() -> None:
    config = FakeConfig(eos_after=9)
    tokens = expected_tokens(config, PROMPT, 12)
    assert expected_tokens(config, PROMPT + tokens[:5], 7, drawn=5) == tokens[5:]


def test_layers_are_reported_in_order_once_their_cells_are_written() -> None:
    config = FakeConfig()
    engine, arena = bound(config, n_blocks=1)
    written: list[list[bool]] = []

    def on_layer(layer: int) -> None:
        slices = arena.reshape(config.layout.layers, -1)
        written.append([bool(s.any()) for s in slices])

    chunk = PrefillChunk(sequence="s", tokens=np.array(PROMPT[:4], np.int32), start=0, blocks=[0])
    assert engine.prefill(chunk, on_layer) is None
    assert written == [[i <= layer for i in range(4)] for layer in range(4)]


def test_seeds_matter_only_when_sampling() -> None:
    config = FakeConfig()
    drawn = [expected_tokens(config, PROMPT, 8, sampling=Sampling(temperature=1.0, seed=seed)) for seed in (1, 2, 1)]
    assert drawn[0] != drawn[1]
    assert drawn[0] == drawn[2]
    assert expected_tokens(config, PROMPT, 8, sampling=Sampling(temperature=0.0, seed=7)) == expected_tokens(
        config, PROMPT, 8
    )


def test_utf8_output_is_the_text() -> None:
    config = FakeConfig(output=FakeOutput.UTF8)
    n = len(UTF8_TEXT.encode())
    tokens = expected_tokens(config, PROMPT, 2 * n)
    assert bytes(tokens).decode() == 2 * UTF8_TEXT


def test_eos_comes_when_told_unless_banned() -> None:
    config = FakeConfig(eos_after=3)
    engine, _ = bound(config)
    sequence = Sequence1(engine, blocks=range(10))
    sequence.prefill(PROMPT)
    sequence.decode(3)
    assert EOS not in sequence.drawn[:3]
    assert sequence.drawn[3] == EOS
    slot = sequence.slot()
    banned = DecodeSlot(
        sequence=slot.sequence,
        token=slot.token,
        position=slot.position,
        blocks=slot.blocks,
        sample=request(4, banned=(EOS,)),
    )
    assert engine.decode([banned])[0].token < 127


def test_banned_tokens_are_not_drawn() -> None:
    config = FakeConfig()
    engine, _ = bound(config)
    all_but_one = tuple(token for token in range(32, 127) if token != 65)
    chunk = PrefillChunk(
        sequence="s",
        tokens=np.array(PROMPT, np.int32),
        start=0,
        blocks=range(10),
        sample=request(0, banned=all_but_one),
    )
    drawn = engine.prefill(chunk, lambda layer: None)
    assert drawn is not None
    assert drawn.token == 65


def test_logprobs_hold_the_drawn_token_first_and_as_many_as_asked_for() -> None:
    config = FakeConfig()
    engine, _ = bound(config)
    for top in (0, 1, 5):
        sampling = Sampling(temperature=0.0, top_logprobs=top)
        chunk = PrefillChunk(
            sequence=f"s{top}",
            tokens=np.array(PROMPT, np.int32),
            start=0,
            blocks=range(10),
            sample=request(0, sampling),
        )
        drawn = engine.prefill(chunk, lambda layer: None)
        assert drawn is not None
        assert drawn.logprob is not None
        assert drawn.logprob.logprob < 0
        assert len(drawn.logprob.top) == top
        assert [token for token, _ in drawn.logprob.top][:1] == [drawn.token][:top]


def test_the_device_is_busy_for_the_configured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 50.0)
    timing = FakeTiming(prefill_s_base=4.0, prefill_s_per_token=2.0, decode_s_base=30.0, decode_s_per_slot=5.0)
    config = FakeConfig(timing=timing)
    engine = FakeEngine(config, sleep=slept.append)
    engine.bind(memoryview(bytearray(10 * config.layout.block_bytes)))
    sequence = Sequence1(engine, blocks=range(10))
    sequence.prefill(PROMPT[:8])
    assert slept == [5.0, 10.0, 15.0, 20.0]  # the sleep was pretended: the deadline of each layer is left
    slept.clear()
    engine.decode([sequence.slot()])
    assert slept == [35.0]


def test_unbind_lets_go_of_the_arena() -> None:
    config = FakeConfig()
    engine = FakeEngine(config)
    arena = bytearray(10 * config.layout.block_bytes)
    engine.bind(memoryview(arena))
    Sequence1(engine, blocks=range(10)).prefill(PROMPT)
    with pytest.raises(BufferError):
        arena.append(0)
    engine.unbind()
    arena.append(0)
    with pytest.raises(RuntimeError, match="not bound"):
        Sequence1(engine, blocks=range(10)).prefill(PROMPT)


def test_an_arena_of_odd_size_is_refused() -> None:
    engine = FakeEngine(FakeConfig())
    with pytest.raises(ValueError, match="whole number"):
        engine.bind(memoryview(bytearray(100)))


def test_it_needs_no_torch() -> None:
    code = "import sys, mooncake_mesh.engine.factory, mooncake_mesh.engine.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
