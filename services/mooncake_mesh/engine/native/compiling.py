"""Compiles C files for this processor, once for all processes of a user."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_FLAGS: Final = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Not -ffast-math: it makes a library that, once loaded, has the thread that loads it take small numbers for zero.
    "-fno-strict-aliasing",  # two bfloat16 are read as one word
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-nodefaultlibs",  # GNU OpenMP is the one that torch has brought into the process
)
_X86_FLAGS: Final = ("-mprefer-vector-width=512",)
_LIBRARIES: Final = ("-lc", "-lm")
_TIMEOUT_S: Final = 60.0


class NativeUnavailable(Exception):
    """There are no kernels in C here, and why. Nobody but the log hears of it."""


def compiled(sources: Sequence[Path], folder: Path) -> Path:
    """The shared library of *sources*, C files and their headers, made in *folder* unless it is there.

    Raises NativeUnavailable.
    """
    compiler = _compiler()
    library = _private(folder) / f"kernels-{_fingerprint(sources, compiler)}.so"
    if not library.exists():
        _compile(compiler, [source for source in sources if source.suffix == ".c"], library)
    return library


def _flags() -> tuple[str, ...]:
    return (*_FLAGS, *_X86_FLAGS) if platform.machine() == "x86_64" else _FLAGS


def _compiler() -> str:
    wanted = os.environ.get("CC") or "gcc"
    found = shutil.which(wanted)
    if found is None:
        raise NativeUnavailable(f"no C compiler: {wanted!r} is not on the path (CC chooses another GCC)")
    return found


def _private(folder: Path) -> Path:
    """*folder*, made if need be. What is in it will be run, so nobody else may write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise NativeUnavailable(f"no place for compiled kernels: {error}") from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise NativeUnavailable(f"others may write to {folder}, so compiled kernels are not kept there")
    return folder


def _fingerprint(sources: Sequence[Path], compiler: str) -> str:
    """Of all that the library follows from, the processor too: a home folder may serve several machines."""
    said = _run([compiler, "--version"])
    parts = (
        *(source.read_text() for source in sources),
        said,
        " ".join(_flags()),
        platform.machine(),
        _processor_flags(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        raise NativeUnavailable(f"what the processor can do is not told: {error}") from error
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, sources: Sequence[Path], library: Path) -> None:
    """Under another name first: several processes may come at once, and none may find half a library."""
    handle, name = tempfile.mkstemp(prefix=f"{library.stem}.", suffix=".part", dir=library.parent)
    os.close(handle)
    part = Path(name)
    try:
        _run([compiler, *_flags(), "-o", str(part), *map(str, sources), *_LIBRARIES])
        part.replace(library)
    finally:
        part.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["it said nothing"])[0]
        raise NativeUnavailable(f"{command[0]} ended with {done.returncode}: {told}")
    return done.stdout
