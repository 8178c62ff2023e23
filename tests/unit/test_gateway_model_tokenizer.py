"""Tokenizers of model folders, on small ones made here: one of each kind of decoder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from mooncake_mesh.errors import InvalidRequest, UnsupportedModel
from mooncake_mesh.gateway.model_tokenizer import ModelTokenizer
from mooncake_mesh.gateway.text import TextRules, TextStream
from mooncake_mesh.gateway.tokenizer import SpecialTokens
from mooncake_mesh.gateway.tools import ChatMessage

CORPUS = ["the cat sat on the mat", "héllo wörld", "한국어 日本 😀 👩‍🚀", "a\tb\nc"]
HI = [ChatMessage(role="user", content="hi")]
CHATML = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2, Mistral and Gemma: words with a mark for the space, and bytes for what the vocabulary lacks."""
    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("▁", "h"), ("▁h", "i")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", "</s>", "<unk>")])
    return tokenizer


def word_pieces() -> Tokenizer:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "cat": 3}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return tokenizer


def folder_with(tmp_path: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    """A model folder; keywords are JSON files without their ending, text is written as it is."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name, content in files.items():
        if isinstance(content, str):
            (tmp_path / f"{name}.jinja").write_text(content)
        else:
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def streamed(tokenizer: ModelTokenizer, tokens: list[int]) -> str:
    stream = TextStream(tokenizer, TextRules(skip_special=False))
    return "".join(stream.feed(token).text for token in tokens) + stream.finish().text


@pytest.mark.parametrize("text", [*CORPUS, "unseen ẞ🦀", "a</s>b", ""])
def test_byte_level_tokens_stream_to_their_text(tmp_path: Path, text: str) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level()))
    tokens = tokenizer.encode(text, SpecialTokens.KEEP)
    assert streamed(tokenizer, tokens) == tokenizer.decode(tokens) == text
    assert tokenizer.encode(text, SpecialTokens.ADD) == [0, *tokens]
    parts = [tokenizer.token_bytes(token) for token in tokens]
    assert b"".join(parts) == text.encode()
    assert all(len(part) <= tokenizer.longest_token_bytes for part in parts)


@pytest.mark.parametrize("text", ["hi hi", "é 😀 hi", "한국"])
def test_byte_fallback_tokens_stream_to_their_text_behind_the_prompts_space(tmp_path: Path, text: str) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_fallback()))
    tokens = tokenizer.encode(text, SpecialTokens.KEEP)
    assert streamed(tokenizer, tokens) == " " + text
    assert tokenizer.decode(tokens) == text


def test_word_pieces_get_their_spaces(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, word_pieces()))
    tokens = tokenizer.encode("cat playing cat", SpecialTokens.KEEP)
    assert tokens == [3, 1, 2, 3]
    assert streamed(tokenizer, tokens) == " cat playing cat"


def test_ids_outside_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level()))
    assert [tokenizer.token_bytes(token) for token in (-1, 300, 1 << 40)] == [b"", b"", b""]


@pytest.mark.parametrize(
    ("config", "size"),
    [(None, 300), ({"vocab_size": 320}, 300), ({"vocab_size": 280}, 280), ({"text_config": {"vocab_size": 270}}, 270)],
)
def test_the_vocabulary_ends_where_tokenizer_or_embedding_ends(
    tmp_path: Path, config: dict[str, Any] | None, size: int
) -> None:
    files = {} if config is None else {"config": config}
    assert ModelTokenizer(folder_with(tmp_path, byte_level(), **files)).vocab_size == size


@pytest.mark.parametrize(
    ("files", "stop_ids"),
    [
        ({}, ()),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        ({"tokenizer_config": {"eos_token": {"content": "</s>"}}, "config": {"eos_token_id": 7}}, (1, 7)),
        ({"generation_config": {"eos_token_id": [5, 3]}, "config": {"eos_token_id": 7}}, (3, 5)),
        ({"generation_config": {}, "config": {"eos_token_id": 7}}, (7,)),
    ],
)
def test_end_ids_come_from_the_generation_config_and_the_tokenizer(
    tmp_path: Path, files: dict[str, Any], stop_ids: tuple[int, ...]
) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), **files))
    assert tokenizer.stop_ids == stop_ids
    assert tokenizer.special_ids == {0, 1}


def test_a_chat_is_rendered_and_its_markers_become_ids(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), chat_template=CHATML))
    tokens = tokenizer.encode_chat(HI)
    assert tokens == [0, *tokenizer.encode("user:hi\n", SpecialTokens.KEEP), 0]


def test_a_template_may_lie_in_the_config_by_name_and_use_named_tokens(tmp_path: Path) -> None:
    templates = [
        {"name": "other", "template": "x"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].role }}"},
    ]
    config = {"bos_token": "<s>", "chat_template": templates}
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), tokenizer_config=config))
    assert tokenizer.decode(tokenizer.encode_chat(HI)) == "<s>user"


def test_templates_find_what_published_ones_use(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}{{ {'é': '<'} | tojson }}"
    )
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), chat_template=template))
    assert tokenizer.decode(tokenizer.encode_chat(HI + HI)) == 'hi20{"é": "<"}'


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[9].role.nothing }}"]
)
def test_a_template_that_objects_is_the_callers_error(tmp_path: Path, template: str) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(InvalidRequest, match="chat template refuses") as refused:
        tokenizer.encode_chat(HI)
    assert refused.value.param == "messages"


def test_templates_cannot_leave_their_sandbox(tmp_path: Path) -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level(), chat_template=template))
    with pytest.raises(InvalidRequest):
        tokenizer.encode_chat(HI)


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(folder_with(tmp_path, byte_level()))
    with pytest.raises(InvalidRequest, match="no chat template") as refused:
        tokenizer.encode_chat(HI)
    assert refused.value.param == "messages"


def test_a_broken_template_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="does not compile"):
        ModelTokenizer(folder_with(tmp_path, byte_level(), chat_template="{% for %}"))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
        ModelTokenizer(tmp_path)


@pytest.mark.model
def test_the_demonstration_models_tokens_are_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    folder = resolve_model(DEFAULT_MODEL)
    theirs, ours = AutoTokenizer.from_pretrained(folder), ModelTokenizer(folder)
    for text in [*CORPUS, "x = 12345\r\n\n  y", "<|im_start|>user", "", " leading", "é" * 500]:
        assert ours.encode(text, SpecialTokens.ADD) == theirs(text)["input_ids"]
        assert ours.encode(text, SpecialTokens.KEEP) == theirs(text, add_special_tokens=False)["input_ids"]
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ]
    for chat in chats:
        messages = [ChatMessage(**turn) for turn in chat]
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert ours.encode_chat(messages) == expected
    assert theirs.eos_token_id in ours.stop_ids
    assert ours.vocab_size == 49152
