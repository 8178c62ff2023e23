"""The shorter ways on the CPU compute what the long ones do: attention, packed weights, fused layers."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config  # noqa: E402

from mooncake_mesh.config_layerwise import Overlap  # noqa: E402
from mooncake_mesh.engine import attention_kernels as kernels  # noqa: E402
from mooncake_mesh.engine import packing  # noqa: E402
from mooncake_mesh.engine.attention import SharingPass, attention_pass  # noqa: E402
from mooncake_mesh.engine.attention_kernels import LayerCall, chunk_attention  # noqa: E402
from mooncake_mesh.engine.copying import CopyThread  # noqa: E402
from mooncake_mesh.engine.fused_layer import FusedLayer  # noqa: E402
from mooncake_mesh.engine.model import LoadedModel, load_model  # noqa: E402
from mooncake_mesh.engine.packing import PackedLinear  # noqa: E402
from mooncake_mesh.engine.stage_model import first_and_last_hidden  # noqa: E402
from mooncake_mesh.kv.layers import StagePart  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype  # noqa: E402

has_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="this processor has no bfloat16 products in oneDNN, so nothing is packed",
)
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama with biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**TINY),
    "mistral": MistralConfig(**TINY, head_dim=16, sliding_window=None),
}


def _call(tokens: int, positions: int, dtype: Any, scaling: float | None = 0.3) -> tuple[LayerCall, Any, Any]:
    """A call with its k and v, and those of everything before."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((1, tokens, 6, 16), generator=generator).transpose(1, 2)  # strided as models have it
    k, v = torch.randn((2, 1, 2, positions, 16), generator=generator).to(dtype)
    return LayerCall(layer=0, q=q.to(dtype), k=k, v=v, scaling=scaling, window=None, other={}), k, v


def _masked(call: LayerCall, k: Any, v: Any) -> Any:
    """The plain way, in float32: every score, and a mask."""
    tokens, positions = call.q.shape[2], k.shape[2]
    hidden = torch.arange(positions) > torch.arange(positions - tokens, positions)[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    whole = dataclasses.replace(call, q=call.q.float())
    return chunk_attention(whole, k.float(), v.float(), mask)


@pytest.mark.parametrize(("tokens", "positions"), [(2, 3), (16, 80), (33, 34), (64, 65)])
def test_attention_in_two_parts_is_attention_with_a_mask(tokens: int, positions: int) -> None:
    call, k, v = _call(tokens, positions, torch.float32)
    torch.testing.assert_close(kernels.split_attention(call, k, v), _masked(call, k, v))


@pytest.mark.parametrize(("tokens", "positions"), [(2, 2), (64, 64), (65, 65), (200, 200), (9, 80), (130, 700)])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("scores", [1, 1 << 21])
def test_attention_block_by_block_is_attention_with_a_mask(
    tokens: int, positions: int, scaling: float | None, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK_SCORES", scores)
    call, k, v = _call(tokens, positions, torch.bfloat16, scaling)
    result = kernels.blocked_attention(call, k, v)
    assert result.dtype is torch.bfloat16
    torch.testing.assert_close(result.float(), _masked(call, k, v), rtol=0.03, atol=0.02)


@pytest.mark.parametrize("has_amx", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [40, 90])
def test_every_way_of_causal_attention_is_the_same(
    has_amx: bool, dtype: Any, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HAS_AMX", has_amx)
    call, k, v = _call(40, positions, dtype)
    within = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.03, "atol": 0.02}
    torch.testing.assert_close(kernels.causal_attention(call, k, v).float(), _masked(call, k, v), **within)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("positions", [511, 512, 700])
def test_a_token_attends_alike_by_plain_products(
    positions: int, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "HAS_AMX", False)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((1, 2, 3, 16), generator=generator).to(torch.bfloat16)
    k, v = torch.randn((2, 1, 2, 800, 16), generator=generator).to(torch.bfloat16)[:, :, :, :positions]
    exact = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=scaling)
    result = kernels.token_attention(q, k, v, scaling)
    torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.004)


def test_what_copies_has_one_core_and_takes_none_from_what_computes() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        numbers: list[int] = []
        for overlap in (Overlap.ON, Overlap.ON):  # a second engine of this process, too
            copy = CopyThread(overlap).run(lambda: numbers.append(torch.get_num_threads()), 0)
            while not copy.is_done:  # finish() might make it here
                time.sleep(0.001)
        with ThreadPoolExecutor(1) as other:
            assert (numbers, torch.get_num_threads(), other.submit(torch.get_num_threads).result()) == ([1, 1], 3, 3)
    finally:
        torch.set_num_threads(before)


def test_small_copies_are_not_handed_over() -> None:
    copies = CopyThread(Overlap.ON, least_bytes=100)
    threads: dict[int, str] = {}

    def copied_by(n_bytes: int) -> Callable[[], None]:
        return lambda: threads.update({n_bytes: threading.current_thread().name})

    made = [copies.run(copied_by(n_bytes), n_bytes) for n_bytes in (99, 100, 1)]
    assert made[0].is_done
    assert made[2].is_done
    while not made[1].is_done:
        time.sleep(0.001)
    assert [threads[n].startswith("kv-copy") for n in (99, 100, 1)] == [False, True, False]


@has_bf16
def test_packed_products_are_products() -> None:
    torch.manual_seed(2)
    linears = [torch.nn.Linear(32, width).to(torch.bfloat16) for width in (16, 24)]
    for rows in (1, 7, 600):
        x = torch.randn((1, rows, 32), dtype=torch.bfloat16)
        other = torch.randn((1, rows, 40), dtype=torch.bfloat16)
        with torch.inference_mode():
            packed = PackedLinear(*linears)
            exact = torch.cat([torch.nn.functional.linear(x, one.weight, one.bias) for one in linears], dim=-1).float()
            results = [
                (packed(x), exact),
                (packed.silu(x), torch.nn.functional.silu(exact)),
                (packed.times(x, other), exact * other),
                (packed.plus(x, other), exact + other),
            ]
        for result, expected in results:
            torch.testing.assert_close(result.float(), expected, rtol=0.02, atol=0.02)


def _load(folder: Path, *, dtype: KvDtype = KvDtype.BFLOAT16, part: StagePart | None = None) -> LoadedModel:
    return load_model(folder, dtype=dtype, block_tokens=4, device=torch.device("cpu"), part=part)


def _save(folder: Path, config: Any) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)  # else they are zero
    model.save_pretrained(folder)


def _output(loaded: LoadedModel) -> Any:
    """What the layers of *loaded* give for a few tokens, by our attention function."""

    class Plain:
        def attend(self, call: LayerCall) -> Any:
            return chunk_attention(call, call.k, call.v, None)

        def places(self, layer: int, end: int) -> None:
            """None: this is a chunk."""

    with torch.inference_mode(), attention_pass(Plain()):
        return first_and_last_hidden(loaded.model, loaded.layers, 9).output.float()


def _layers(loaded: LoadedModel) -> list[str]:
    base: Any = loaded.model.base_model
    return [type(layer).__name__ for layer in base.layers]


@has_bf16
@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_compute_what_transformers_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, CONFIGS[name])
    fused = _load(tmp_path)
    assert _layers(fused) == ["FusedLayer"] * 3
    assert not [one for one in fused.model.modules() if type(one) is torch.nn.Linear]
    exact = _output(_load(tmp_path, dtype=KvDtype.FLOAT32))
    difference = (_output(fused) - exact).norm() / exact.norm()
    monkeypatch.setattr("mooncake_mesh.engine.model.can_pack", lambda _: False)
    plain = _load(tmp_path)
    assert "FusedLayer" not in _layers(plain)
    assert difference <= 1.2 * (_output(plain) - exact).norm() / exact.norm()  # rounds less often, not more


@has_bf16
def test_a_stage_has_fused_layers_too(tmp_path: Path) -> None:
    _save(tmp_path, CONFIGS["llama"])
    stage = _load(tmp_path, part=StagePart(stage=1, stages=2))
    assert _layers(stage).count("FusedLayer") == stage.layers.count


@has_bf16
def test_only_the_layer_that_would_change_the_results_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, CONFIGS["llama"])
    right = FusedLayer.forward

    def wrong_in_the_second(layer: Any, hidden_states: Any, **arguments: Any) -> Any:
        return right(layer, hidden_states, **arguments) * (3.0 if layer._layer == 1 else 1.0)

    monkeypatch.setattr(FusedLayer, "forward", wrong_in_the_second)
    assert _layers(_load(tmp_path)) == ["FusedLayer", "LlamaDecoderLayer", "FusedLayer"]


@has_bf16
@pytest.mark.parametrize("wrong", [float("nan"), 3.0])
def test_layers_that_would_change_the_results_stay(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr(FusedLayer, "forward", lambda _, hidden_states, **__: hidden_states * wrong)
    loaded = _load(tmp_path)
    assert _layers(loaded) == ["LlamaDecoderLayer"] * 3
    assert any(isinstance(one, PackedLinear) for one in loaded.model.modules())


def test_float32_stays_as_it_is(tmp_path: Path) -> None:
    _save(tmp_path, CONFIGS["llama"])
    loaded = _load(tmp_path, dtype=KvDtype.FLOAT32)
    assert not packing.can_pack(loaded.model)
    assert _layers(loaded) == ["LlamaDecoderLayer"] * 3


class Lent:
    """Cores of which one is taken away in the middle of a forward."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self) -> int:
        self.told.append("begin")
        return 2 if len(self.told) < 3 else 1

    def end(self) -> None:
        self.told.append("end")


def test_a_forward_has_the_threads_that_it_is_given_in_each_layer() -> None:
    cores = Lent()
    seen: list[int] = []

    class Layers:
        def attend(self, call: LayerCall) -> Any:
            seen.append(torch.get_num_threads())
            return call.q

        def places(self, layer: int, end: int) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        attention = SharingPass(Layers(), cores)
        call, _, _ = _call(2, 3, torch.float32)
        attention.attend(call)
        assert attention.places(0, 2) is None
        attention.attend(call)
    finally:
        torch.set_num_threads(before)
    assert (seen, cores.told) == ([2, 1, 1], ["begin"] * 4)
