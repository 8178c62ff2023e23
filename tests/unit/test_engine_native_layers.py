"""Products and layers in C are those of transformers, whatever else is in the batch."""

import copy
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer  # noqa: E402
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer  # noqa: E402

from mooncake_mesh.config_layerwise import Overlap  # noqa: E402
from mooncake_mesh.engine.attention import IMPLEMENTATION, KernelDecodePass, PrefillPass, attention_pass  # noqa: E402
from mooncake_mesh.engine.attention_kernels import LayerCall, chunk_attention  # noqa: E402
from mooncake_mesh.engine.contexts import ContextCache, KeptContext  # noqa: E402
from mooncake_mesh.engine.copying import CopyThread  # noqa: E402
from mooncake_mesh.engine.kv_storage import ArenaPages, Span  # noqa: E402
from mooncake_mesh.engine.layer_loading import ChunkContexts, PrefixLoads  # noqa: E402
from mooncake_mesh.engine.native import weight_memory  # noqa: E402
from mooncake_mesh.engine.native.kernels import Kernels  # noqa: E402
from mooncake_mesh.engine.native.layers import NativeLayer, NativeLayers, fits  # noqa: E402
from mooncake_mesh.engine.native.loading import load  # noqa: E402
from mooncake_mesh.engine.native.places import TokenPlaces  # noqa: E402
from mooncake_mesh.engine.native.products import NativeLinear, PackedWeights, multiplied  # noqa: E402
from mooncake_mesh.engine.native.weight_memory import WeightMemory  # noqa: E402
from mooncake_mesh.kv.layers import LayerRange  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, KvLayout  # noqa: E402


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    loaded = load(tmp_path_factory.mktemp("native"))
    if not loaded.multiplies:
        pytest.skip("this processor has AMX or no AVX512-BF16, so products are left to torch")
    return loaded


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def some(*shape: int, seed: int = 1) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(ours: Any, exact: Any, within: float = 0.004) -> None:
    assert ours.dtype is torch.bfloat16
    assert ours.shape == exact.shape
    assert float((ours.float() - exact).norm() / exact.norm()) < within


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 11, 12, 13, 24, 25, 240, 241, 500])
@pytest.mark.parametrize(("columns", "inner"), [(32, 64), (96, 576), (70, 30), (1, 2)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_a_linear_layer(kernels: Kernels, rows: int, columns: int, inner: int, has_bias: bool) -> None:
    linear = torch.nn.Linear(inner, columns, bias=has_bias, dtype=torch.bfloat16)
    x = some(2, rows, inner)
    exact = functional.linear(x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float())
    close(NativeLinear(kernels.library, linear)(x), exact)


def test_a_cut_out_of_rows_is_multiplied_as_such(kernels: Kernels) -> None:
    x, weight = some(3, 9, 64), some(40, 64, seed=2)
    cut = x[:, -1:]
    packed = PackedWeights(kernels.library, weight, None)
    assert not cut.is_contiguous()
    close(multiplied(kernels.library, cut, packed), functional.linear(cut.float(), weight.float()))


def test_a_rows_product_is_the_same_in_every_batch_and_for_every_number_of_threads(kernels: Kernels) -> None:
    """So what a request is answered does not depend on who else asks."""
    x, packed = some(300, 192), PackedWeights(kernels.library, some(100, 192, seed=2), some(100, seed=3))
    alone = torch.cat([multiplied(kernels.library, x[row : row + 1], packed) for row in range(300)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in (2, 7, 12, 30, 300):
                assert torch.equal(multiplied(kernels.library, x[:rows], packed), alone[:rows])
    finally:
        torch.set_num_threads(before)


def test_weights_lie_apart_each_at_the_start_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_SLAB_BYTES", 1 << 20)
    memory = WeightMemory()
    parts = [memory.empty(shape, torch.bfloat16) for shape in [(3, 5), (1000, 300), (1, 33), (600, 2000), (7,)]]
    for number, part in enumerate(parts):
        part.fill_(number)
    for number, part in enumerate(parts):
        assert part.data_ptr() % 64 == 0
        assert part.is_contiguous()
        assert bool((part == number).all())
    assert parts[0].data_ptr() % (2 << 20) == 0, "a large page can begin there"
    assert parts[3].data_ptr() % (2 << 20) == 0, "one that has no room in a slab has its own"


# --- layers -----------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_implementation": IMPLEMENTATION,
}
LAYERS: dict[str, tuple[type[Any], PreTrainedConfig]] = {
    "llama": (LlamaDecoderLayer, LlamaConfig(**SIZES)),
    "llama with biases": (LlamaDecoderLayer, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": (Qwen2DecoderLayer, Qwen2Config(**SIZES)),
    "a sliding window": (MistralDecoderLayer, MistralConfig(**SIZES, sliding_window=5)),
}


def made(name: str, index: int = 0) -> Any:
    """A layer whose norms and biases are neither one nor zero."""
    layer_class, config = LAYERS[name]
    layer = layer_class(config, index)
    generator = torch.Generator().manual_seed(index + 1)
    for parameter in layer.parameters():
        spread = 0.1 if parameter.dim() == 2 else 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return layer.eval()


def sines(batch: int, tokens: int) -> tuple[Any, Any]:
    angles = torch.randn((batch, tokens, 32), generator=torch.Generator().manual_seed(5)).repeat(1, 1, 2)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


class Own:
    """Attention over the call's own tokens, as a chunk's."""

    def attend(self, call: LayerCall) -> Any:
        assert (call.layer, call.scaling) == (0, 0.125)
        return chunk_attention(call, call.k, call.v, None)

    def places(self, layer: int, end: int) -> None:
        """None: this is a chunk."""


@pytest.mark.parametrize("tokens", [1, 9, 40])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_transformers(name: str, tokens: int, kernels: Kernels) -> None:
    layer, x, (cos, sin) = made(name), some(1, tokens, 128), sines(1, tokens)
    rounded = copy.deepcopy(layer).bfloat16()
    assert fits(rounded)
    given = x.clone()
    with attention_pass(Own()):
        ours = NativeLayer(kernels.library, rounded)(x, position_embeddings=(cos, sin), attention_mask=None)
        exact_in_float32 = rounded.float()(x.float(), position_embeddings=(cos.float(), sin.float()))
    close(ours, exact_in_float32, within=0.01)
    assert torch.equal(x, given), "the rows that came in are somebody else's"


def contexts(lengths: Sequence[int], n_layers: int) -> list[Any]:
    return [some(n_layers, 2, 2, length + 7, 64, seed=length) for length in lengths]


@pytest.mark.parametrize("name", ["llama", "a sliding window"])
def test_a_steps_layers_at_once_are_those_one_by_one(name: str, kernels: Kernels) -> None:
    """Also bit for bit: products, rotation and attention are the same functions."""
    layers = [NativeLayer(kernels.library, made(name, index).bfloat16()) for index in range(8)]
    lengths = (1, 70, 33)
    x, embeddings = some(3, 1, 128), sines(3, 1)
    layout = KvLayout(layers=8, kv_heads=2, head_dim=64, dtype=KvDtype.BFLOAT16, block_tokens=4)
    spans = [
        Span(sequence=str(index), blocks=list(range(30)), start=length, end=length + 1)
        for index, length in enumerate(lengths)
    ]
    at_once, by_one = ([KeptContext(kv, 0, 0) for kv in contexts(lengths, 8)] for _ in range(2))
    with attention_pass(KernelDecodePass(ArenaPages(layout), spans, at_once, kernels)):
        together = NativeLayers(layers)(x, position_embeddings=embeddings)
    hidden = x
    with attention_pass(KernelDecodePass(ArenaPages(layout), spans, by_one, kernels)):
        for layer in layers:
            hidden = layer(hidden, position_embeddings=embeddings)
    assert torch.equal(together, hidden)
    for one, other in zip(at_once, by_one, strict=True):
        assert torch.equal(one.kv, other.kv)


def test_a_sequences_step_is_the_same_in_every_batch(kernels: Kernels) -> None:
    layers = NativeLayers([NativeLayer(kernels.library, made("qwen2", index).bfloat16()) for index in range(8)])
    lengths = tuple(range(20, 40))
    x, (cos, sin) = some(20, 1, 128), sines(20, 1)

    class Step:
        def __init__(self, chosen: Sequence[int]) -> None:
            self.kv = contexts([lengths[index] for index in chosen], 8)
            self._places = TokenPlaces(self.kv, [lengths[index] for index in chosen])

        def attend(self, call: LayerCall) -> Any:
            raise AssertionError("a step's layers attend by themselves")

        def places(self, layer: int, end: int) -> TokenPlaces:
            return self._places

    def step(chosen: Sequence[int]) -> Any:
        index = list(chosen)
        with attention_pass(Step(index)):
            return layers(x[index], position_embeddings=(cos[index], sin[index]))

    whole = step(range(20))
    for chosen in ([3], [19, 0, 7], list(range(13))):
        assert torch.equal(step(chosen), whole[chosen])


@pytest.mark.parametrize("name", ["qwen2", "a sliding window"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 70), (33, 1), (61, 6), (128, 200)])
def test_a_chunks_layers_at_once_are_those_one_by_one(name: str, start: int, tokens: int, kernels: Kernels) -> None:
    """With what was before in the context; it and what is stored get the chunk's K and V."""
    layers = [NativeLayer(kernels.library, made(name, index).bfloat16()) for index in range(8)]
    x, embeddings = some(1, tokens, 128), sines(1, tokens)
    span = Span(sequence="s", blocks=list(range(100)), start=start, end=start + tokens)
    at_once, by_one = (KeptContext(some(8, 2, 2, start + tokens + 5, 64), 0, 0) for _ in range(2))
    stored: dict[str, list[tuple[int, Any]]] = {"at once": [], "by one": []}

    def through(way: str, context: KeptContext) -> PrefillPass:
        context.open(start, start + tokens)
        return PrefillPass(span, context, lambda layer, kv: stored[way].append((layer, kv.clone())), kernels)

    with attention_pass(through("at once", at_once)):
        together = NativeLayers(layers)(x, position_embeddings=embeddings)
    hidden = x
    with attention_pass(through("by one", by_one)):
        for layer in layers:
            hidden = layer(hidden, position_embeddings=embeddings)
    assert torch.equal(together, hidden)
    assert torch.equal(at_once.kv, by_one.kv)
    first_layers = [0, 6] if tokens <= 70 else [0, 2, 4, 6]
    assert [layer for layer, _ in stored["at once"]] == first_layers
    assert torch.equal(*(torch.cat([kv for _, kv in written]) for written in stored.values()))


def test_layers_ask_for_places_again_every_few(kernels: Kernels) -> None:
    """Between two calls the number of threads may change; and a pass without places attends itself."""
    layers = NativeLayers([NativeLayer(kernels.library, made("llama", index).bfloat16()) for index in range(8)])
    asked: list[str] = []

    class Chunk:
        def attend(self, call: LayerCall) -> Any:
            asked.append(f"layer {call.layer}")
            return chunk_attention(call, call.k, call.v, None)

        def places(self, layer: int, end: int) -> None:
            asked.append(f"places of {layer} to {end}")

    with attention_pass(Chunk()):
        layers(some(1, 5, 128), position_embeddings=sines(1, 5))
    assert asked == ["places of 0 to 6", *(f"layer {n}" for n in range(6)), "places of 6 to 8", "layer 6", "layer 7"]


@pytest.mark.parametrize("layer_budget", [0, 3])
@pytest.mark.parametrize("least_bytes", [0, 1 << 30])
@pytest.mark.parametrize("overlap", Overlap)
def test_a_chunk_whose_prefix_is_on_its_way_is_that_behind_one_which_is_there(
    overlap: Overlap, least_bytes: int, layer_budget: int, kernels: Kernels
) -> None:
    """In a context of its own, or in a window of three layers."""
    start, end = 128, 165
    layout = KvLayout(layers=8, kv_heads=2, head_dim=64, dtype=KvDtype.BFLOAT16, block_tokens=4)
    pages = ArenaPages(layout, kernels)
    pages.bind(memoryview(bytearray(50 * layout.block_bytes)))
    span = Span(sequence="s", blocks=list(range(45))[::-1], start=start, end=end)
    there = KeptContext(some(8, 2, 2, end, 64), start, 0)
    there.open(start, end)
    pages.write_layers(0, span.blocks, 0, there.kv[:, :, :, :start])
    layers = NativeLayers([NativeLayer(kernels.library, made("llama", index).bfloat16()) for index in range(8)])
    x, embeddings = some(1, end - start, 128), sines(1, end - start)
    with attention_pass(PrefillPass(span, there, lambda _, __: None, kernels)):
        expected = layers(x, position_embeddings=embeddings)
    stored: list[int] = []
    chunks = ChunkContexts(
        pages,
        ContextCache(pages, torch.device("cpu"), 1 << 30),
        LayerRange.whole(8),
        torch.device("cpu"),
        CopyThread(overlap, least_bytes),
        layer_budget=layer_budget,
    )
    with (
        chunks.open(span, stored.append) as chunk,
        attention_pass(PrefillPass(span, chunk.context, chunk.stores.store, kernels)),
    ):
        assert torch.equal(layers(x, position_embeddings=embeddings), expected)
    assert stored == list(range(8))
    in_arena = torch.empty_like(there.kv)
    pages.read_all(span.blocks, 0, end, in_arena)
    assert torch.equal(in_arena, there.kv)


def test_of_a_prefix_on_its_way_those_layers_are_computed_that_are_there(kernels: Kernels) -> None:
    """The first is waited for; who computes does not wait for more."""
    context = KeptContext(some(8, 2, 2, 20, 64), 0, 0)
    copies, go_on = CopyThread(Overlap.ON), threading.Event()
    layout = KvLayout(layers=8, kv_heads=2, head_dim=64, dtype=KvDtype.BFLOAT16, block_tokens=4)
    pages = ArenaPages(layout, kernels)
    pages.bind(memoryview(bytearray(5 * layout.block_bytes)))
    span = Span(sequence="s", blocks=range(5), start=16, end=20)

    def hold_up() -> None:
        go_on.wait(10)

    def place(layer: int) -> Any:
        if layer == 5:
            copies.run(hold_up, 0)
        return context.kv[layer, :, :, :16]

    loads = PrefixLoads(copies, pages, span, LayerRange.whole(8), place, start=0, ahead=4)
    copies.run(lambda: None, 0).outcome().result(10)
    assert loads.need_some(0, 3) == 3, "not more than asked for"
    assert loads.need_some(3, 8) == 5, "the copy of layer 5 has not begun"
    go_on.set()
    assert loads.need_some(5, 8) in (6, 7, 8)
    loads.abandon()


def test_a_layer_with_other_numbers_does_not_fit(tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "intermediate_size": 72})
    assert not fits(LlamaDecoderLayer(config, 0))
