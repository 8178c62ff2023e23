"""The fake engine's tokenizer as a folder that tools of the Hugging Face kind can load.

Ids are the bytes of UTF-8 and four markers, as in :class:`mooncake_mesh.gateway.tokenizer.ByteTokenizer`, so that a
tool and the mesh count the same tokens.
"""

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mooncake_mesh.gateway.tokenizer import BYTE_EOS, ByteTokenizer

_CONFIG: Final = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 65_536}
_REVISION: Final = "0" * 40


def write_byte_tokenizer(folder: Path) -> Path:
    """*folder*, made, with a byte-level tokenizer in it."""
    bytes_only = ByteTokenizer()
    markers = {name: id_ for id_ in sorted(bytes_only.special_ids) for name in [bytes_only.decode([id_])]}
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in markers])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {**_CONFIG, "eos_token": bytes_only.decode([BYTE_EOS])}
    (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    return folder


def byte_letters() -> list[str]:
    """How byte-level vocabularies write each byte: as its own letter if that can be printed, else as one from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def into_hub_cache(folder: Path, home: Path, name: str) -> None:
    """The tokenizer of *folder* as *name* (``owner/name``) in a cache of the hub below *home* (HF_HOME).

    For tools that take local folders in some of their processes only.
    """
    cache = home / "hub" / f"models--{name.replace('/', '--')}"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(_REVISION)
    snapshot = cache / "snapshots" / _REVISION
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".txt"):
            (snapshot / path.name).symlink_to(path.resolve())
