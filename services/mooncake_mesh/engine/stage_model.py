"""A transformers model cut down to the layers of one pipeline stage.

Which modules come before and after the layers is what the model publishes in its pipeline plan. What a stage lacks is
replaced before the weights are loaded, so the weights of other stages are never read: layers by ones that pass
activations on, which keeps every layer's index, the rest by identities.
"""

import copy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from mooncake_mesh.errors import UnsupportedModel
from mooncake_mesh.kv.layers import LayerRange

_SEED: Final = 7


class _Elsewhere(nn.Module):
    """In the place of a layer that another stage has."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type"):  # models choose masks and rotary embeddings by it
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Names of a base model's modules in the order that activations pass them."""

    before: tuple[str, ...]
    layers: str
    after: tuple[str, ...]


def stage_class(model_class: type[PreTrainedModel], config: Any, layers: LayerRange) -> type[PreTrainedModel]:
    """*model_class* whose objects have *layers* only. Raises UnsupportedModel for one without a pipeline plan."""
    plan = _plan(model_class, config)

    class Stage(model_class):
        _keys_to_ignore_on_load_unexpected = (".*",)  # the weights of the other stages

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            _cut(self, plan, layers)

    Stage.__name__ = Stage.__qualname__ = model_class.__name__
    return Stage


def stage_config(config: Any, layers: LayerRange) -> Any:
    """*config* for a stage: only the one with the head has an output embedding to tie to."""
    config = copy.deepcopy(config)
    if not layers.has_head:
        config.tie_word_embeddings = False
    return config


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForward:
    """``is_passed_on``: the first layer got what came in, and what the last one gave came out."""

    output: torch.Tensor
    is_passed_on: bool


def first_and_last_hidden(model: PreTrainedModel, layers: LayerRange, n_tokens: int) -> StageForward:
    """A short forward of a stage; its output is (1, n_tokens, hidden_size), or logits where the head is."""
    base: Any = model.base_model
    modules = getattr(base, _plan(type(model), model.config).layers)
    seen: dict[str, torch.Tensor] = {}

    def enter(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen["in"] = args[0]

    def leave(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        seen["out"] = output

    hooks = [
        modules[layers.first].register_forward_pre_hook(enter),
        modules[layers.end - 1].register_forward_hook(leave),
    ]
    try:
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        output = stage_output(model, model.config, layers, n_tokens, like)
    finally:
        for hook in hooks:
            hook.remove()
    hidden, is_passed_on = _hidden(model.config, n_tokens, like), True
    if not layers.has_head:
        is_passed_on = torch.equal(seen["out"], output) and output.shape == hidden.shape
    if not layers.has_embedding:
        is_passed_on &= torch.equal(seen["in"], hidden)
    return StageForward(output=output, is_passed_on=is_passed_on)


def stage_output(forward: Any, config: Any, layers: LayerRange, n_tokens: int, like: torch.Tensor) -> torch.Tensor:
    """That of a short forward of a stage, the same each time: (1, n_tokens, hidden_size), or logits. *forward* is
    called as its model is, with activations of the type and on the device of *like*."""
    positions = torch.arange(n_tokens, device=like.device)[None]
    tokens, hidden = positions % config.vocab_size, _hidden(config, n_tokens, like)
    given = {"input_ids": tokens} if layers.has_embedding else {"inputs_embeds": hidden}
    output: torch.Tensor
    if layers.has_head:
        output = forward(**given, position_ids=positions, use_cache=False).logits
    else:
        output = forward.base_model(**given, position_ids=positions, use_cache=False).last_hidden_state
    return output


def _hidden(config: Any, n_tokens: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn((1, n_tokens, config.hidden_size), generator=generator).to(like)


def _cut(model: PreTrainedModel, plan: _Plan, layers: LayerRange) -> None:
    base: Any = model.base_model
    modules = getattr(base, plan.layers)
    for index in range(len(modules)):
        if not layers.first <= index < layers.end:
            modules[index] = _Elsewhere(modules[index])
    is_tied = layers.has_head and model.config.tie_word_embeddings
    if not layers.has_embedding and not is_tied:
        for name in plan.before:
            setattr(base, name, nn.Identity())
    if not layers.has_head:
        for name in plan.after:
            setattr(base, name, nn.Identity())
        for name in type(model)._pp_plan or ():
            setattr(model, name, nn.Identity())


def _plan(model_class: type[PreTrainedModel], config: Any) -> _Plan:
    names = list(getattr(config, "base_model_pp_plan", None) or ())
    if "layers" not in names or not model_class._pp_plan:
        raise UnsupportedModel(f"{model_class.__name__} cannot be split into stages: it has no pipeline plan")
    at = names.index("layers")
    return _Plan(before=tuple(names[:at]), layers="layers", after=tuple(names[at + 1 :]))
