"""A forward without transformers' between its parts gives the same, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from mooncake_mesh.engine.attention import attention_pass  # noqa: E402
from mooncake_mesh.engine.attention_kernels import LayerCall, chunk_attention  # noqa: E402
from mooncake_mesh.engine.direct_forward import DirectModel  # noqa: E402
from mooncake_mesh.engine.model import load_model  # noqa: E402
from mooncake_mesh.engine.native.loading import load  # noqa: E402
from mooncake_mesh.kv.layers import StagePart  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype  # noqa: E402
from tests.unit.test_engine_native import TINY  # noqa: E402

SCALED = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DIRECT = {
    "llama": LlamaConfig(**TINY),
    "llama with scaled positions": LlamaConfig(
        **TINY, rope_parameters={**SCALED, "original_max_position_embeddings": 512}
    ),
    "a tied head": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY, sliding_window=20),
    "qwen2": Qwen2Config(**TINY),
}


@pytest.fixture(scope="module", autouse=True)
def _native(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not load(tmp_path_factory.mktemp("native")).multiplies:
        pytest.skip("this processor has AMX or no AVX512-BF16, so layers are not computed in C")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


class Own:
    """Attention over the call's own tokens."""

    def attend(self, call: LayerCall) -> Any:
        return torch.cat([self._one(call, row) for row in range(len(call.q))])

    def _one(self, call: LayerCall, row: int) -> Any:
        q, k, v = (one[row : row + 1] for one in (call.q, call.k, call.v))
        one = LayerCall(layer=call.layer, q=q, k=k, v=v, scaling=call.scaling, window=None, other={})
        return chunk_attention(one, k, v, None)

    def places(self, layer: int, end: int) -> None:
        """Layers attend one by one."""


Load = Callable[..., Any]


@pytest.fixture
def loaded(tmp_path: Path) -> Load:
    def make(config: Any, part: StagePart | None = None) -> Any:
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        return load_model(tmp_path, dtype=KvDtype.BFLOAT16, block_tokens=4, device=torch.device("cpu"), part=part)

    return make


@pytest.mark.parametrize("name", DIRECT)
def test_logits_and_activations_are_the_models(name: str, loaded: Load) -> None:
    made = loaded(DIRECT[name])
    assert isinstance(made.forward, DirectModel)
    for positions in ([[0, 1, 2, 3, 4]], [[7], [2000], [0], [5000]], [[1023]], [[1024]]):
        tokens = {"input_ids": torch.tensor(positions) % 64, "position_ids": torch.tensor(positions)}
        with attention_pass(Own()):
            for keep in (0, 1):
                ours, theirs = (one(**tokens, logits_to_keep=keep).logits for one in (made.forward, made.model))
                assert torch.equal(ours, theirs)
            ours, theirs = (one.base_model(**tokens).last_hidden_state for one in (made.forward, made.model))
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_so_are_those_of_a_stage(stage: int, loaded: Load) -> None:
    made = loaded(DIRECT["llama"], StagePart(stage=stage, stages=3))
    assert isinstance(made.forward, DirectModel)
    positions = torch.arange(6)[None]
    rows = torch.randn(1, 6, 128).bfloat16()
    inputs = {"inputs_embeds": rows} if stage else {"input_ids": positions}
    with attention_pass(Own()):
        ours, theirs = (
            one.base_model(**inputs, position_ids=positions, use_cache=False).last_hidden_state
            for one in (made.forward, made.model)
        )
    assert torch.equal(ours, theirs)


def test_a_model_that_does_more_keeps_its_own(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    made = loaded(Qwen3Config(**TINY))
    assert made.forward is made.model, "its layers are not one module"
    monkeypatch.setattr(DirectModel, "__call__", lambda self, **_: self.base_model(**_))
    made = loaded(DIRECT["llama"])
    assert made.forward is made.model, "the results differ"
