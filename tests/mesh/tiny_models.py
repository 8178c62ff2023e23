"""Model folders with random weights, made in a moment: other architectures than the demonstration model's."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_END = "<|end|>"


def save_qwen2(folder: Path) -> None:
    """Three layers with two query heads for each key head."""
    tokenizer = _byte_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,  # far apart logits: the default's are so close that greedy text is chance
    )
    torch.manual_seed(5)
    _save(folder, Qwen2ForCausalLM(config), tokenizer)


def save_mamba(folder: Path) -> None:
    """A state-space model: it has no KVCache."""
    tokenizer = _byte_tokenizer()
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, state_size=4)
    _save(folder, MambaForCausalLM(config), tokenizer)


def _save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, and one more ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: token for token, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
