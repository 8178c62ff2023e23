"""The kernels in C compute what torch does, or are not used."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config  # noqa: E402

from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest  # noqa: E402
from mooncake_mesh.engine.attention_kernels import LayerCall  # noqa: E402
from mooncake_mesh.engine.kv_storage import ArenaPages  # noqa: E402
from mooncake_mesh.engine.native import loading as native  # noqa: E402
from mooncake_mesh.engine.native.compiling import NativeUnavailable, compiled  # noqa: E402
from mooncake_mesh.engine.native.kernels import Kernels  # noqa: E402
from mooncake_mesh.engine.native.library import SOURCES, Library  # noqa: E402
from mooncake_mesh.engine.native.loading import kernels_for, load  # noqa: E402
from mooncake_mesh.engine.native.places import TokenPlaces  # noqa: E402
from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, KvLayout  # noqa: E402
from mooncake_proto.serving import Sampling  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def kernels(folder: Path) -> Kernels:
    return load(folder)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Small tensors: a second thread only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def some(*shape: int, seed: int = 1) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(ours: Any, exact: Any) -> None:
    assert ours.dtype is torch.bfloat16
    assert float((ours.float() - exact).norm() / exact.norm()) < 0.004  # one rounding, of 2**-9 at most


def exact_attention(call: LayerCall, k: Any, v: Any) -> Any:
    """In float32, with a mask: (batch, tokens, heads, head_dim)."""
    tokens, positions = call.q.shape[2], k.shape[2]
    own = torch.arange(positions - tokens, positions)[:, None]
    hidden = torch.arange(positions) > own
    if call.window is not None:
        hidden |= torch.arange(positions) <= own - call.window
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    attended = torch.nn.functional.scaled_dot_product_attention(
        call.q.float(), k.float(), v.float(), attn_mask=mask, scale=call.scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)


SHAPES = [(1, 1, 64), (3, 3, 64), (2, 8, 64), (2, 4, 128), (1, 16, 64), (1, 2, 192), (1, 3, 256)]


@pytest.mark.parametrize(("kv_heads", "groups", "head_dim"), SHAPES)
@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (1, 63), (2, 0), (64, 0), (65, 64), (33, 200), (200, 77)])
@pytest.mark.parametrize("window", [None, 1, 50, 1000])
def test_a_chunk_attends(
    kernels: Kernels,
    kv_heads: int,
    groups: int,
    head_dim: int,
    tokens: int,
    before: int,
    window: int | None,
) -> None:
    if not kernels.multiplies:
        pytest.skip("this processor has AMX or no AVX512-BF16, so chunks are left to torch")
    positions = before + tokens
    q = some(1, tokens, kv_heads * groups, head_dim).transpose(1, 2)  # strided as models have it
    context = some(2, 1, kv_heads, positions + 5, head_dim, seed=2)
    context[:, :, :, positions:] = float("nan")  # what will be there is anything yet
    k, v = context[:, :, :, :positions]
    call = LayerCall(layer=0, q=q, k=k, v=v, scaling=0.2, window=window, other={})
    close(kernels.chunk_attention(call, k, v), exact_attention(call, k, v))


@pytest.mark.parametrize(("kv_heads", "groups", "head_dim"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_tokens_of_several_sequences_attend_and_are_written(
    kernels: Kernels, kv_heads: int, groups: int, head_dim: int, window: int | None
) -> None:
    lengths = (1, 16, 63, 64, 65, 130)
    contexts = [some(3, 2, kv_heads, n + n % 7, head_dim, seed=n) for n in lengths]
    untouched = [context.clone() for context in contexts]
    qkv = some(len(lengths), 1, kv_heads * (groups + 2), head_dim).transpose(1, 2)
    q, k, v = qkv.split([kv_heads * groups, kv_heads, kv_heads], dim=1)
    places = TokenPlaces(contexts, [n - 1 for n in lengths])
    call = LayerCall(layer=1, q=q, k=k, v=v, scaling=None, window=window, other={})
    attended = kernels.token_attention(call, places)
    for i, n in enumerate(lengths):
        expected = untouched[i]
        expected[1, :, :, n - 1] = torch.stack((k[i, :, 0], v[i, :, 0]))
        assert torch.equal(contexts[i], expected), "the new position of this layer, and nothing else"
        keys, values = expected[1, :, None, :, :n]
        one = LayerCall(layer=1, q=q[i : i + 1], k=keys, v=values, scaling=None, window=window, other={})
        close(attended[i : i + 1], exact_attention(one, keys, values))
        assert torch.equal(places.newest()[i], expected[:, :, :, n - 1])


def test_scores_far_apart_neither_overflow_nor_vanish(kernels: Kernels) -> None:
    q = some(1, 70, 1, 64).transpose(1, 2) * 40
    k, v = some(2, 1, 1, 70, 64, seed=2) * 10
    call = LayerCall(layer=0, q=q, k=k, v=v, scaling=None, window=None, other={})
    context = torch.stack((k[0], v[0]))[None]
    last = LayerCall(layer=0, q=q[:, :, 69:], k=k[:, :, 69:], v=v[:, :, 69:], scaling=None, window=None, other={})
    close(kernels.token_attention(last, TokenPlaces([context], [69])), exact_attention(last, k, v))
    if kernels.multiplies:
        close(kernels.chunk_attention(call, k, v), exact_attention(call, k, v))


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_rows_are_normalized_and_turned(kernels: Kernels, rows: int) -> None:
    x, weight = some(1, rows, 96), some(96, seed=2)
    exact = torch.nn.functional.rms_norm(x.float(), (96,), weight.float(), 1e-5)
    close(kernels.rms_norm(x, weight, 1e-5), exact)

    heads = some(1, rows, 5, 64, seed=3)
    cos, sin = some(1, rows, 64, seed=4), some(1, rows, 64, seed=5)
    swapped = torch.cat((-heads[..., 32:], heads[..., :32]), dim=-1).float()
    exact = heads.float() * cos.float().unsqueeze(2) + swapped * sin.float().unsqueeze(2)
    exact[:, :, 3:] = heads[:, :, 3:]
    close(kernels.turned(heads, 3, cos, sin), exact)


def test_results_do_not_depend_on_the_number_of_threads(kernels: Kernels) -> None:
    """Otherwise a request's tokens would depend on what else the machine did."""
    before = torch.get_num_threads()
    q, (k, v) = some(1, 150, 9, 64).transpose(1, 2), some(2, 1, 3, 400, 64, seed=2)
    call = LayerCall(layer=0, q=q, k=k, v=v, scaling=None, window=None, other={})
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            context = torch.stack((k[0], v[0]))[None].clone()
            last = LayerCall(
                layer=0, q=q[:, :, 149:], k=k[:, :, 399:], v=v[:, :, 399:], scaling=None, window=None, other={}
            )
            results.append(kernels.token_attention(last, TokenPlaces([context], [399])))
            if kernels.multiplies:
                results.append(kernels.chunk_attention(call, k, v))
    finally:
        torch.set_num_threads(before)
    step = 2 if kernels.multiplies else 1
    for one, other in zip(results, results[step:], strict=False):
        assert torch.equal(one, other)


# --- models ----------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "a sliding window": MistralConfig(**TINY, sliding_window=20),
    "layers that are not fused": Qwen3Config(**TINY),
}
PROMPT = [(7 * i * i + 3 * i + 1) % 64 for i in range(90)]
BLOCK_TOKENS = 4


def _served(folder: Path, context_bytes: int, threads: int = 1) -> tuple[list[int], Any]:
    """The tokens of a prompt in chunks and of two sequences' steps; and the arena."""
    engine = TransformersEngine.load(
        str(folder), dtype=KvDtype.BFLOAT16, block_tokens=BLOCK_TOKENS, context_bytes=context_bytes, threads=threads
    )
    arena = np.zeros(60 * engine.spec.layout.block_bytes, np.uint8)
    engine.bind(arena.data)
    sample = SampleRequest(sampling=Sampling(temperature=0.0), position=0, history=np.zeros(0, np.int32))
    blocks = {"a": list(range(30)), "b": list(range(30, 60))}
    drawn: list[int] = []
    for name, n in (("a", 90), ("b", 41)):
        for start in range(0, n, 40):
            tokens = np.array(PROMPT[start : min(n, start + 40)], np.int32)
            chunk = PrefillChunk(sequence=name, tokens=tokens, start=start, blocks=blocks[name], sample=sample)
            last = engine.prefill(chunk, lambda _: None)
        assert last is not None
        drawn.append(last.token)
    for step in range(6):
        slots = [
            DecodeSlot(sequence=name, token=PROMPT[step], position=n + step, blocks=blocks[name], sample=sample)
            for name, n in (("a", 90), ("b", 41))
        ]
        drawn += [one.token for one in engine.decode(slots)]
    engine.unbind()
    return drawn, torch.from_numpy(arena).view(torch.bfloat16).float()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_computes_the_same_with_kernels_and_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    used: list[str] = []
    monkeypatch.setattr("mooncake_mesh.engine.model.kernels_for", lambda *_: _Counted(kernels, used))
    with_kernels, kv = _served(tmp_path, 1 << 30)
    joined = kernels.multiplies and name != "layers that are not fused"
    assert ("decode_layers" if joined else "token_attention") in used
    assert ("chunk_layers" in used) == joined
    assert ("chunk_attention" in used) == (kernels.multiplies and not joined)
    assert ("product" in used) == kernels.multiplies
    gathered, gathered_kv = _served(tmp_path, 0)  # no room for contexts: their pages are gathered
    monkeypatch.setattr("mooncake_mesh.engine.model.kernels_for", lambda *_: None)
    without, plain_kv = _served(tmp_path, 1 << 30)
    for other in (kv, gathered_kv):
        assert float((other - plain_kv).norm() / plain_kv.norm()) < 0.02
    assert sum(a == b for a, b in zip(with_kernels, without, strict=True)) >= len(without) - 1  # a near tie may flip
    assert sum(a == b for a, b in zip(gathered, without, strict=True)) >= len(without) - 1


def test_a_models_results_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    (one, one_kv), (two, two_kv) = (_served(tmp_path, 1 << 30, threads=n) for n in (1, 2))
    assert one == two
    assert torch.equal(one_kv, two_kv)


class Lent:
    """Cores of which one is to be had; ``told`` is what the engine says of itself."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> int:
        self.told.append("begin")
        return 1

    def end(self) -> None:
        self.told.append("end")


def test_an_engine_says_when_it_computes_and_when_it_has_done_or_failed(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(tmp_path)
    cores, before = Lent(), torch.get_num_threads()
    engine = TransformersEngine.load(str(tmp_path), dtype=KvDtype.BFLOAT16, block_tokens=BLOCK_TOKENS, cores=cores)
    engine.bind(memoryview(bytearray(8 * engine.spec.layout.block_bytes)))
    try:
        whole = PrefillChunk(sequence="a", tokens=np.array(PROMPT[:9], np.int32), start=0, blocks=[0, 1, 2])
        engine.prefill(whole, lambda _: None)
        *begun, last = cores.told
        assert (set(begun), last) == ({"begin"}, "end")
        assert len(begun) > 1, "at the start, and for every layer or few"
        cores.told.clear()
        with pytest.raises(RuntimeError, match="stop"):
            engine.prefill(whole, _stop)
        assert cores.told.count("end") == 1
        assert cores.told[-1] == "end"
    finally:
        torch.set_num_threads(before)


def _stop(layer: int) -> None:
    raise RuntimeError("stop")


class _Counted:
    """Kernels that note what is used of them, and of their library."""

    def __init__(self, kernels: Kernels | Library, used: list[str]) -> None:
        self._kernels = kernels
        self._used = used

    def __getattr__(self, name: str) -> Any:
        self._used.append(name)
        found = getattr(self._kernels, name)
        return _Counted(found, self._used) if name == "library" else found


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "hidden"),
    [("float32", 64, 4, 128), ("bfloat16", 16, 4, 128), ("bfloat16", 64, 64, 128), ("bfloat16", 64, 4, 72)],
)
def test_other_shapes_and_numbers_are_left_to_torch(dtype: str, head_dim: int, heads: int, hidden: int) -> None:
    class Model:
        device = torch.device("cpu")
        config = LlamaConfig(num_attention_heads=heads, hidden_size=hidden, head_dim=head_dim)

    model: Any = Model()
    model.dtype = getattr(torch, dtype)
    layout = KvLayout(layers=1, kv_heads=2, head_dim=head_dim, dtype=KvDtype(dtype), block_tokens=4)
    assert kernels_for(model, layout) is None


# --- pages ------------------------------------------------------------------------------------------------------------

PAGES = KvLayout(layers=3, kv_heads=2, head_dim=64, dtype=KvDtype.BFLOAT16, block_tokens=4)


def bound(kernels: Kernels | None, n_blocks: int = 12) -> ArenaPages:
    pages = ArenaPages(PAGES, kernels)
    pages.bind(memoryview(bytearray(n_blocks * PAGES.block_bytes)))
    return pages


@pytest.mark.parametrize("blocks", [[9, 3, 11, 0], [4, 5, 6, 7], [7, 6, 5, 4]])
@pytest.mark.parametrize(("start", "end"), [(0, 14), (0, 16), (3, 5), (4, 8), (6, 15), (13, 14)])
def test_pages_and_rows_are_those_of_torch(kernels: Kernels, blocks: list[int], start: int, end: int) -> None:
    """Rows by head, as contexts have them, and by token, as a projection does."""
    ours, theirs = bound(kernels), bound(None)
    for one in (ours, theirs):
        one.pages.copy_(some(*one.pages.shape))
    by_head, by_token = some(3, 2, 2, end - start, 64, seed=2), some(end - start, 2, 2, 64, seed=3)
    for layer, kv in ((0, by_head[0]), (2, by_head[2]), (1, by_token.permute(1, 2, 0, 3))):
        ours.write_layers(layer, blocks, start, kv[None])
        theirs.write_layers(layer, blocks, start, kv[None])
    assert torch.equal(ours.pages, theirs.pages)
    context = torch.zeros(2, 2, 2, 20, 64, dtype=torch.bfloat16)
    ours.read_all(blocks, start, end, context[:, :, :, 1 : 1 + end - start], first_layer=1)
    assert not context[:, :, :, [0, *range(1 + end - start, 20)]].any()
    assert torch.equal(context[0, :, :, 1 : 1 + end - start], by_token.permute(1, 2, 0, 3))
    assert torch.equal(context[1, :, :, 1 : 1 + end - start], by_head[2])
    layer = torch.empty(2, 2, end - start, 64, dtype=torch.bfloat16)
    ours.read_positions(0, blocks, start, end, layer)
    assert torch.equal(layer, by_head[0])


@pytest.mark.parametrize(
    ("blocks", "start", "first_layer"),
    [([0, 1], 5, 0), ([0, 12], 0, 0), ([-1, 0], 0, 0), ([0, 1], 0, 2)],
)
def test_nothing_outside_the_pages_is_touched(
    kernels: Kernels, blocks: list[int], start: int, first_layer: int
) -> None:
    pages, rows = bound(kernels).pages, some(2, 2, 2, 8, 64)
    before = rows.clone()
    with pytest.raises(IndexError):
        kernels.write_pages(pages, first_layer, blocks, start, rows)
    with pytest.raises(IndexError):
        kernels.read_pages(pages, first_layer, blocks, start, rows)
    assert not pages.any()
    assert torch.equal(rows, before)


def test_no_positions_are_no_copy(kernels: Kernels) -> None:
    pages = bound(kernels)
    pages.read_all([], 0, 0, some(3, 2, 2, 0, 64))
    assert not pages.pages.any()


# --- compiling -------------------------------------------------------------------------------------------------------


def test_a_library_is_compiled_once(folder: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(SOURCES, folder)
    assert sorted(folder.iterdir()) == [first], "no half library is left"
    stamp = first.stat().st_mtime_ns
    assert compiled(SOURCES, folder) == first
    assert first.stat().st_mtime_ns == stamp


def test_another_source_is_another_library(tmp_path: Path) -> None:
    source, header = tmp_path / "answer.c", tmp_path / "answer.h"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }')
    libraries = set()
    for answer in (1, 2):
        header.write_text(f"#define ANSWER {answer}")
        libraries.add(compiled([source, header], tmp_path / "made"))
    assert len(libraries) == 2


def _no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CC", "no-such-compiler")
    return "no-such-compiler"


def _failing_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of luck >&2\nexit 3\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    return "ended with 3: out of luck"


def _open_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made").mkdir()
    os.chmod(tmp_path / "made", 0o777)
    return "others may write"


def _file_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made").write_text("")
    return "no place for compiled kernels"


@pytest.mark.parametrize("harm", [_no_compiler, _failing_compiler, _open_folder, _file_in_the_way])
def test_why_there_are_none_is_said(
    harm: Callable[[Path, pytest.MonkeyPatch], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = harm(tmp_path, monkeypatch)
    with pytest.raises(NativeUnavailable, match=says):
        load(tmp_path / "made")
    made = tmp_path / "made"
    assert not made.is_dir() or not list(made.iterdir())


def test_without_a_compiler_torch_does_it_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path))
    native._loaded.cache_clear()
    try:
        assert native._loaded() is None
    finally:
        native._loaded.cache_clear()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("rows.c", "const float factor = 1.0f", "const float factor = 1.1f"),
        ("rows.c", "store(high, b * load(c + half) +", "store(high, b * load(c + half) -"),
        ("token_attention.c", "share = 1.0f / sum(attended[g].total)", "share = 0.9f / sum(attended[g].total)"),
        ("chunk_attention.c", "const __m512 share = 1.0f /", "const __m512 share = 1.1f /"),
        ("products.c", "weights[(panel * PANEL + i) * pairs + p]", "weights[(panel * PANEL + i) * pairs]"),
        ("products.c", "(r < rows ? r : 0) * pairs;", "(r < rows && r != 10 ? r : 0) * pairs;"),
    ],
)
def test_a_library_with_wrong_results_is_refused(
    name: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels
) -> None:
    if name in ("chunk_attention.c", "products.c") and not kernels.multiplies:
        pytest.skip("this processor has AMX or no AVX512-BF16, so products are left to torch")
    sources = [tmp_path / source.name for source in SOURCES]
    for copy, source in zip(sources, SOURCES, strict=True):
        text = source.read_text()
        assert source.name != name or text.count(right) == 1
        copy.write_text(text.replace(right, wrong) if source.name == name else text)
    monkeypatch.setattr(native, "SOURCES", sources)
    with pytest.raises(NativeUnavailable, match="differs from torch's result"):
        load(tmp_path / "made")


def test_loading_a_library_leaves_small_numbers_as_they_are(tmp_path: Path) -> None:
    """What -ffast-math links in would have this thread take them for zero from then on."""
    load(tmp_path)
    assert float(np.array([1e-40], np.float32)[0] * np.float32(0.5)) > 0
    assert 5e-324 * 1.0 > 0


def test_nobody_else_may_read_or_write_what_was_compiled(folder: Path, kernels: Kernels) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) & 0o022 == 0
