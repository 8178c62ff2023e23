"""Environments for the peers, outside the checkout: made once, then reused.

A peer that cannot be installed is an answer too: its reason is reported where its figures would be. A file
``installed`` says that all went well; without it the next call goes on from where it failed.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INSTALL_TIMEOUT_S: Final = 900.0
_IBVERBS: Final = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


class NotInstalled(Exception):
    """The peer cannot run here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """``packages`` go in without their dependencies where ``bare``: those are GPU stacks that nobody uses here."""

    name: str
    packages: tuple[str, ...]
    bare: bool
    imports: str
    needs_ibverbs: bool


MOONCAKE: Final = Peer(
    name="mooncake",
    packages=("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    bare=False,
    imports="import mooncake.engine, mooncake.store, numpy",
    needs_ibverbs=True,
)
NIXL: Final = Peer(
    name="nixl",
    packages=("nixl==1.5.1", "nixl-cu12==1.5.1"),
    bare=True,
    imports="import nixl._api, numpy",
    needs_ibverbs=False,
)
AIPERF: Final = Peer(
    name="aiperf",
    packages=("aiperf==0.13.0",),
    bare=False,
    imports="import aiperf",
    needs_ibverbs=False,
)
GUIDELLM: Final = Peer(
    name="guidellm",
    packages=("guidellm==0.8.1", "torch==2.13.0"),
    bare=False,
    imports="import guidellm",
    needs_ibverbs=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An installed peer: its interpreter, and what its processes need in their environment."""

    python: Path
    variables: dict[str, str]


def peers_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake-mesh" / "peers"


def install(peer: Peer) -> Environment:
    """The environment of *peer*, made if need be (up to some minutes). Raises NotInstalled."""
    home = peers_dir() / peer.name
    python = home / "bin" / "python"
    variables = _library_path(peers_dir() / "lib") if peer.needs_ibverbs else {}
    environment = Environment(python=python, variables=variables)
    done = home / "installed"
    if not done.exists():
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(home)])
        flags = ["--no-deps"] if peer.bare else []
        _run([str(python), "-m", "pip", "install", "--quiet", *flags, *peer.packages])
        _run([str(python), "-m", "pip", "install", "--quiet", "numpy"])
        done.touch()
    _run([str(python), "-c", peer.imports], variables)
    return environment


def _library_path(folder: Path) -> dict[str, str]:
    """Mooncake's engine is linked against libibverbs, also where only TCP is used; unpacked, not installed."""
    if not any(folder.glob("**/libibverbs.so.1")):
        folder.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", "download", *_IBVERBS], cwd=folder)
        for package in sorted(folder.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(folder)])
    places = {path.parent for path in folder.glob("**/lib*.so.*")}
    return {"LD_LIBRARY_PATH": ":".join(sorted(map(str, places)))}


def _run(command: list[str], variables: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(variables or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{command[0]}: {error}") from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().split("\n")[-1]
        raise NotInstalled(f"`{' '.join(command[:4])} …` failed: {words[:300]}")
