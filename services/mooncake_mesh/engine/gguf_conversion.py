"""Converts a Llama model from a GGUF file to a transformers folder: float32 safetensors, config and tokenizer.

The weights are dequantised exactly; their quality stays that of the quantised file. GGUF stores the rows of the query
and key projections of each head in pairs (x0, y0, x1, y1, …) where transformers' rotary embedding wants halves (x0, x1,
…, y0, y1, …), so these are put back in order.
"""

import json
import re
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mooncake_mesh.engine.progress import LongTask
from mooncake_mesh.errors import ModelError, UnsupportedModel

Weights = npt.NDArray[np.float32]

_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def convert(source: Path, target: Path) -> None:
    """Write the model of GGUF file *source* into the empty folder *target*. Raises ModelError."""
    try:
        from gguf import GGUFReader, dequantize
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ModelError(f"{error}; converting a model needs: pip install 'mooncake-mesh[engine]'") from error

    reader = GGUFReader(source)
    fields: dict[str, Any] = {}
    for key in reader.fields:
        if not key.startswith("tokenizer.ggml.to") and key != "tokenizer.ggml.merges":  # long lists, read elsewhere
            fields[key] = reader.fields[key].contents()
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: dict[str, Weights] = {}
    tensors = len(reader.tensors)
    with LongTask(f"Converting {source.name}", total=3 * tensors) as task:  # writing and the tokenizer take as long
        for tensor in reader.tensors:
            name, kind = _transformers_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            weights[name] = _halves(values, heads[kind]) if kind in heads else values
            task.advance()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "model.safetensors").chmod(0o644)  # the cache may be shared by several users' processes
        task.advance(tensors)
        _write_json(target / "config.json", _config(fields, tied="lm_head.weight" not in weights))
        _write_json(target / "generation_config.json", _generation_config(fields))
        _write_tokenizer(source, target)
        task.advance(tensors)


def _transformers_name(name: str) -> tuple[str, str]:
    """transformers' name of GGUF tensor *name*, and its kind within a layer ("" outside of layers)."""
    if name in _TOP:
        return _TOP[name], ""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModel(f"GGUF tensor {name!r} is none of a Llama model")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.weight", match[2]


def _halves(weights: Weights, heads: int) -> Weights:
    """Rows of each head from pairs to halves."""
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    if fields["general.architecture"] != "llama":
        raise UnsupportedModel(f"GGUF architecture {fields['general.architecture']!r} is not converted, only llama")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "tie_word_embeddings": tied,
        "dtype": "float32",
        **_special_tokens(fields),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_tokens(fields)}


def _special_tokens(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(source: Path, target: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ModelError(f"{error}; converting a model needs: pip install 'mooncake-mesh[engine]'") from error
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    tokenizer.save_pretrained(target)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
