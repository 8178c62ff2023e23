"""Which models are served, and which are refused with a reason."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    DeepseekV3Config,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
    ViTConfig,
)

from mooncake_mesh.engine import model as engine_model  # noqa: E402
from mooncake_mesh.engine.api import PrefillChunk  # noqa: E402
from mooncake_mesh.engine.attention import IMPLEMENTATION  # noqa: E402
from mooncake_mesh.engine.model import check_supported, load_model, probe_attention  # noqa: E402
from mooncake_mesh.engine.runner import TransformersEngine  # noqa: E402
from mooncake_mesh.errors import ModelError, UnsupportedModel  # noqa: E402
from mooncake_mesh.kv.layout import KvDtype, layout_from_config  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration.*encoder-decoder"),
        (DeepseekV3Config(), "deepseek_v3.*latent attention"),
        (Gemma2Config(), "gemma2.*soft-capped"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "gemma3_text.*bidirectional"),
        (MambaConfig(), "mamba.*state"),
        (Qwen3NextConfig(), "qwen3_next.*(state|layers of type linear_attention)"),
        (FalconConfig(), "falcon.*attention interface"),
        (ViTConfig(), "vit.*no causal language model"),
        (LlamaConfig(**TINY, rope_parameters=DYNAMIC_ROPE), "llama.*dynamic rotary"),
        (
            Phi3Config(**TINY, original_max_position_embeddings=64, rope_parameters=LONG_ROPE, pad_token_id=0),
            "phi3.*longrope",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_paged_attention_cannot_do_is_refused_by_config(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(config)


@pytest.mark.parametrize("config", [LlamaConfig(**TINY), Qwen2Config(**TINY), Gemma3TextConfig(**TINY)])
def test_grouped_query_decoders_are_served(config: Any) -> None:
    assert check_supported(config).__name__.endswith("ForCausalLM")


def test_attention_sinks_are_found_by_the_probe() -> None:
    config = GptOssConfig(
        **TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    model = GptOssForCausalLM(config)
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(UnsupportedModel, match=r"GptOssForCausalLM.*'s_aux'"):
        probe_attention(model, layout_from_config(config, KvDtype.FLOAT32, 16))


def test_an_attention_that_differs_from_the_models_own_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.set_attn_implementation(IMPLEMENTATION)
    layout = layout_from_config(model.config, KvDtype.FLOAT32, 16)
    probe_attention(model, layout)
    assert model.config._attn_implementation == IMPLEMENTATION
    monkeypatch.setattr(engine_model, "chunk_attention", lambda call, k, v, mask: call.q.transpose(1, 2))
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*differ from its own"):
        probe_attention(model, layout)


def test_a_cache_of_another_shape_than_the_config_says_is_found_by_the_probe() -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.set_attn_implementation(IMPLEMENTATION)
    wrong = layout_from_config(LlamaConfig(**{**TINY, "num_key_value_heads": 4}), KvDtype.FLOAT32, 16)
    with pytest.raises(UnsupportedModel, match=r"K and V of layer 0 have shape \(1, 2, 8, 8\)"):
        probe_attention(model, wrong)


def test_layers_of_different_shape_are_refused(tmp_path: Path) -> None:
    Gemma4TextConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="gemma4_text"):
        load_model(tmp_path, dtype=KvDtype.FLOAT32, block_tokens=4, device=torch.device("cpu"))


def test_a_forward_that_fails_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    model.set_attn_implementation(IMPLEMENTATION)
    monkeypatch.setattr(engine_model, "chunk_attention", lambda call, k, v, mask: call.q[..., :3])
    with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM.*forward with our attention failed"):
        probe_attention(model, layout_from_config(model.config, KvDtype.FLOAT32, 16))


def test_a_saved_model_is_loaded_in_the_wanted_dtype(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    for dtype, expected in ((KvDtype.FLOAT32, torch.float32), (KvDtype.BFLOAT16, torch.bfloat16)):
        loaded = load_model(tmp_path, dtype=dtype, block_tokens=4, device=torch.device("cpu"))
        assert loaded.model.dtype == expected
        assert (loaded.layout.layers, loaded.layout.kv_heads, loaded.layout.head_dim) == (2, 2, 8)
        assert loaded.max_context_tokens == 128


def test_an_engine_is_loaded_from_a_folder_and_runs(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    engine = TransformersEngine.load(str(tmp_path), dtype=KvDtype.FLOAT32, block_tokens=4)
    assert engine.spec.name == str(tmp_path)
    assert len(engine.spec.fingerprint) == 32
    engine.bind(memoryview(bytearray(4 * engine.spec.layout.block_bytes)))
    layers: list[int] = []
    chunk = PrefillChunk(sequence="s", tokens=torch.arange(5).numpy(), start=0, blocks=[2, 0])
    assert engine.prefill(chunk, layers.append) is None
    assert layers == [0, 1]


def test_a_folder_of_no_known_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of", "architectures": ["NeverHeardOf"]}')
    with pytest.raises(UnsupportedModel, match="never_heard_of"):
        load_model(tmp_path, dtype=KvDtype.FLOAT32, block_tokens=4, device=torch.device("cpu"))


def test_weights_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError):
        load_model(tmp_path, dtype=KvDtype.FLOAT32, block_tokens=4, device=torch.device("cpu"))


def test_weights_with_a_hole_are_an_error(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors, model\.layers\.1\.mlp\.up_proj"):
        load_model(tmp_path, dtype=KvDtype.FLOAT32, block_tokens=4, device=torch.device("cpu"))


def test_the_reference_model_still_refuses_by_name() -> None:
    """The refusal of models outside the attention interface rests on a transformers attribute: it must exist."""
    assert not FalconForCausalLM._supports_attention_backend
    assert transformers.PreTrainedModel._is_stateful is False
