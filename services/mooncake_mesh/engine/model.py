"""Loads a transformers model for paged attention, or says why it cannot be.

What is not known to work is refused at load, in three steps, each cheaper than a wrong answer later: the config is
checked for what paged grouped-query attention does not do; after loading, a short forward records what every layer
passes to our attention; and its logits are compared with those of the model's own attention.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedModel

from mooncake_mesh.engine.attention import IMPLEMENTATION, attention_pass
from mooncake_mesh.engine.attention_kernels import LayerCall, chunk_attention
from mooncake_mesh.engine.direct_forward import DirectModel, can_be_direct
from mooncake_mesh.engine.fused_layer import FusedLayer, TorchRows, can_fuse
from mooncake_mesh.engine.kv_storage import torch_dtype
from mooncake_mesh.engine.native.kernels import Kernels
from mooncake_mesh.engine.native.layers import NativeLayer, NativeLayers, fits
from mooncake_mesh.engine.native.loading import kernels_for
from mooncake_mesh.engine.native.products import NativeLinear
from mooncake_mesh.engine.packing import can_pack, pack
from mooncake_mesh.engine.stage_model import first_and_last_hidden, stage_class, stage_config, stage_output
from mooncake_mesh.errors import ConfigError, ModelError, UnsupportedModel
from mooncake_mesh.kv.layers import LayerRange, StagePart
from mooncake_mesh.kv.layout import KvDtype, KvLayout, layout_from_config

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
# Their frequencies follow the longest sequence of the batch, so one request would change another's keys.
_BATCH_DEPENDENT_ROPE: Final = frozenset({"dynamic", "longrope"})
_REFUSED_WHEN_SET: Final = {
    "is_encoder_decoder": "an encoder-decoder",
    "add_cross_attention": "cross-attention",
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "attn_logit_softcapping": "soft-capped attention logits",
    "use_bidirectional_attention": "bidirectional attention",
    "num_kv_shared_layers": "layers that share KV",
    "attention_chunk_size": "chunked attention",
    "text_config": "a multimodal model, only text decoders are served",
}
# Arguments that models pass to every attention function and that do not change its result.
_HARMLESS: Final = frozenset(
    {
        "position_ids",
        "cache_position",
        "use_cache",
        "dropout",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
_PROBE_TOKENS: Final = 8
_PROBE_TOLERANCE: Final = {KvDtype.FLOAT32: 1e-3, KvDtype.BFLOAT16: 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """``layout`` is that of the whole model, of which ``layers`` are loaded. ``kernels`` compute its attention.
    ``forward`` is called as the model is, and gives the same."""

    model: PreTrainedModel
    forward: Any
    layout: KvLayout
    vocab_size: int
    max_context_tokens: int
    layers: LayerRange
    device: torch.device
    kernels: Kernels | None = None


def load_model(
    folder: Path, *, dtype: KvDtype, block_tokens: int, device: torch.device, part: StagePart | None = None
) -> LoadedModel:
    """The model in *folder*, checked and ready for forwards on *device*; of a pipeline stage, its *part* alone.

    Raises ModelError, UnsupportedModel, or ConfigError for a part that the model does not have.
    """
    config = _read_config(folder)
    model_class = check_supported(config)
    layout = _layout(config, dtype, block_tokens)
    layers = LayerRange.whole(layout.layers) if part is None else _layers(part, layout)
    if layers.count < layers.total:
        model_class, config = stage_class(model_class, config, layers), stage_config(config, layers)
    model = _load_weights(model_class, config, folder, torch_dtype(dtype))
    model = model.to(device).eval().requires_grad_(False)
    if layers.count < layers.total:
        probe_stage(model, layout, layers)
    else:
        probe_attention(model, layout)
    kernels = kernels_for(model, layout)
    if can_pack(model):
        _speed_up(model, layout, layers, kernels)
    return LoadedModel(
        model=model,
        forward=_forward(model, layout, layers),
        layout=layout,
        vocab_size=config.vocab_size,
        max_context_tokens=config.max_position_embeddings,
        layers=layers,
        device=device,
        kernels=kernels,
    )


def _speed_up(model: Any, layout: KvLayout, layers: LayerRange, kernels: Kernels | None) -> None:
    """Pack the weights; layers that a faster one computes are replaced by it, where the results stay the same."""
    decoder_layers: Any = getattr(model.base_model, "layers", ())
    with torch.inference_mode():
        faster = {index: _faster(old, kernels) for index, old in enumerate(decoder_layers) if can_fuse(old)}
        differences = _differences(model, layout, layers, faster)
        for index, layer in faster.items():
            if differences[index] <= _PROBE_TOLERANCE[layout.dtype]:
                decoder_layers[index] = layer
        if faster:
            _join(model.base_model, layers)
    if kernels is not None and kernels.multiplies:
        pack(model, partial(NativeLinear, kernels.library))
    else:
        pack(model)


def _forward(model: Any, layout: KvLayout, layers: LayerRange) -> Any:
    """That of *model*, or a shorter one with the same results."""
    if not can_be_direct(model):
        return model
    with torch.inference_mode(), attention_pass(_Probe(type(model).__name__, layout)):
        like = torch.empty(0, dtype=torch_dtype(layout.dtype))
        direct = DirectModel(model, like.dtype)
        ours, theirs = (stage_output(forward, model.config, layers, _PROBE_TOKENS, like) for forward in (direct, model))
    return direct if torch.equal(ours, theirs) else model


def _faster(layer: Any, kernels: Kernels | None) -> torch.nn.Module:
    if kernels is None:
        return FusedLayer(layer, TorchRows())
    if kernels.multiplies and fits(layer):
        return NativeLayer(kernels.library, layer)
    return FusedLayer(layer, kernels)


def _join(base: Any, layers: LayerRange) -> None:
    """Layers that can be computed by one call are the only one from now on."""
    mine = [layer for index, layer in enumerate(base.layers) if layers.first <= index < layers.end]
    native = [layer for layer in mine if isinstance(layer, NativeLayer)]
    if len(native) == len(mine):
        base.layers = torch.nn.ModuleList([NativeLayers(native)])


def _differences(
    model: Any, layout: KvLayout, layers: LayerRange, others: Mapping[int, torch.nn.Module]
) -> dict[int, float]:
    """Between the outputs of the model's layers and of those that may replace them, each for the same input.

    Not between whole models: where activations are large, rounding in one layer becomes another result of the last one.
    """
    found: dict[int, float] = {}

    def compare(index: int, _: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        found[index] = _difference(others[index](*args, **kwargs), output)

    hooks = [
        model.base_model.layers[index].register_forward_hook(partial(compare, index), with_kwargs=True)
        for index in others
    ]
    try:
        with attention_pass(_Probe(type(model).__name__, layout)):
            first_and_last_hidden(model, layers, _PROBE_TOKENS)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _layers(part: StagePart, layout: KvLayout) -> LayerRange:
    try:
        return part.of(layout.layers)
    except ValueError as error:
        raise ConfigError(str(error), path="prefill.split") from error


def _layout(config: Any, dtype: KvDtype, block_tokens: int) -> KvLayout:
    try:
        return layout_from_config(config, dtype, block_tokens)
    except (AttributeError, RuntimeError) as error:  # RuntimeError: transformers, of what differs by layer
        raise UnsupportedModel(f"{config.model_type} is not supported: no one KV layout: {error}") from error


def _load_weights(model_class: type[PreTrainedModel], config: Any, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    with _quiet_transformers():
        try:
            model, info = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"cannot load the weights in {folder}: {error}") from error
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random numbers there
        raise ModelError(f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} among them")
    return model


def check_supported(config: Any) -> type[PreTrainedModel]:
    """The model class for *config*; raises UnsupportedModel, naming the architecture and the reason."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    for attribute, reason in _REFUSED_WHEN_SET.items():
        if getattr(config, attribute, None):
            raise UnsupportedModel(f"{name} is not supported: it has {reason}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{name} is not supported: transformers has no causal language model of this kind")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class._is_stateful:
        raise UnsupportedModel(f"{name} is not supported: it keeps a state that is no KVCache")
    if not model_class._supports_attention_backend:
        raise UnsupportedModel(f"{name} is not supported: it does not use transformers' attention interface")
    if other := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise UnsupportedModel(f"{name} is not supported: it has layers of type {', '.join(sorted(other))}")
    if kinds := _rope_types(config) & _BATCH_DEPENDENT_ROPE:
        kind = ", ".join(sorted(kinds))
        raise UnsupportedModel(f"{name} is not supported: its {kind} rotary embedding depends on the rest of the batch")
    if not getattr(config, "max_position_embeddings", None):
        raise UnsupportedModel(f"{name} is not supported: its config has no max_position_embeddings")
    return model_class


def probe_attention(model: PreTrainedModel, layout: KvLayout) -> None:
    """Run a few tokens through *model*; raises UnsupportedModel when its attention is not what we take it for."""
    name = type(model).__name__
    tokens = torch.arange(_PROBE_TOKENS, device=model.device)[None] % model.config.vocab_size
    probe = _Probe(name, layout)
    with torch.inference_mode():
        try:
            with attention_pass(probe):
                ours = model(input_ids=tokens, use_cache=False).logits
        except (RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{name} is not supported: a forward with our attention failed: {error}") from error
        if probe.layers != list(range(layout.layers)):
            raise UnsupportedModel(f"{name} is not supported: its layers attended in the order {probe.layers}")
        model.set_attn_implementation("eager")
        theirs = model(input_ids=tokens, use_cache=False).logits
        model.set_attn_implementation(IMPLEMENTATION)
    _check_equal(name, "logits", ours, theirs, layout)


def probe_stage(model: PreTrainedModel, layout: KvLayout, layers: LayerRange) -> None:
    """As :func:`probe_attention`, for a model that is cut down to *layers*: activations in, activations out.

    Raises UnsupportedModel also when the model does more to activations, before or after its layers, than a stage may.
    """
    name = type(model).__name__
    probe = _Probe(name, layout)
    with torch.inference_mode():
        try:
            with attention_pass(probe):
                ours = first_and_last_hidden(model, layers, _PROBE_TOKENS)
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedModel(f"{name} cannot be a stage: a forward of its layers failed: {error}") from error
        if probe.layers != list(range(layers.first, layers.end)):
            raise UnsupportedModel(f"{name} cannot be a stage: its layers attended in the order {probe.layers}")
        if not ours.is_passed_on:
            raise UnsupportedModel(f"{name} cannot be a stage: it changes activations outside of its layers")
        model.set_attn_implementation("eager")
        theirs = first_and_last_hidden(model, layers, _PROBE_TOKENS)
        model.set_attn_implementation(IMPLEMENTATION)
    _check_equal(name, "activations", ours.output, theirs.output, layout)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative; NaN when either holds one."""
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def _check_equal(name: str, what: str, ours: torch.Tensor, theirs: torch.Tensor, layout: KvLayout) -> None:
    difference = _difference(ours, theirs)
    if not difference <= _PROBE_TOLERANCE[layout.dtype]:
        raise UnsupportedModel(
            f"{name} is not supported: with our attention its {what} differ from its own by {difference:.2g}"
        )


class _Probe:
    """A pass that attends over the call's own tokens, and checks what layers pass to the attention function."""

    def __init__(self, name: str, layout: KvLayout) -> None:
        self._name = name
        self._layout = layout
        self.layers: list[int] = []

    def places(self, layer: int, end: int) -> None:
        """No step is probed."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        expected = (1, self._layout.kv_heads, call.q.shape[2], self._layout.head_dim)
        for tensor in (call.k, call.v):
            if tuple(tensor.shape) != expected:
                raise UnsupportedModel(
                    f"{self._name} is not supported: K and V of layer {call.layer} have shape {tuple(tensor.shape)}, "
                    f"its config says {expected}"
                )
        self._check_arguments(call)
        self.layers.append(call.layer)
        return chunk_attention(call, call.k, call.v, None)

    def _check_arguments(self, call: LayerCall) -> None:
        if call.other.get("is_causal") is False:
            raise UnsupportedModel(f"{self._name} is not supported: its attention is not causal")
        for name, value in call.other.items():
            if name not in _HARMLESS and name != "is_causal" and value is not None:
                raise UnsupportedModel(f"{self._name} is not supported: its attention takes {name!r}")


def _read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"the config in {folder} is not supported: {error}") from error


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding; some configs hold one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one["rope_type"]) for one in (parameters, *nested) if one.get("rope_type")}


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """transformers' progress bars are for terminals."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
