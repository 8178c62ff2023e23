"""A mesh on this machine for a benchmark: `mooncake up` as a child process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalMesh:
    """Where a running mesh answers, and its processes by instance name."""

    host: str
    port: int
    model: str
    sdk: str
    conductor: str
    processes: dict[str, psutil.Process]


@contextmanager
def local_mesh(flags: Sequence[str], settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[LocalMesh]:
    """Run `mooncake up --port 0 FLAGS` for the length of the block. Raises RuntimeError when it does not get ready.

    *settings* are variables that its processes take theirs from (``MOONCAKE_CONDUCTOR_PLACEMENT`` …).
    """
    command = [sys.executable, "-m", "mooncake_mesh", "up", "--port", "0", "--log-level", "error", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **settings}) as up:
        try:
            assert up.stdout is not None
            line = up.stdout.readline()
            if not line.startswith("ready "):
                raise RuntimeError(f"`{' '.join(command)}` did not get ready")
            yield _parse(line, up.pid)
        finally:
            up.terminate()


def _parse(line: str, pid: int) -> LocalMesh:
    _, url, *pairs = line.split()
    facts = dict(pair.split("=", 1) for pair in pairs)
    host, port = url.removeprefix("http://").split(":")
    return LocalMesh(
        host=host,
        port=int(port),
        model=facts["model"],
        sdk=facts["sdk"],
        conductor=facts["conductor"],
        processes={_name(child): child for child in psutil.Process(pid).children()},
    )


def _name(process: psutil.Process) -> str:
    flag = "--instance-id="
    return next((word.removeprefix(flag) for word in process.cmdline() if word.startswith(flag)), str(process.pid))
