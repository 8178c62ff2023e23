"""A mesh on this machine for a benchmark: `mooncake up` as a child process."""

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import MappingProxyType
from typing import Final

import psutil

_READY_S: Final = 180.0
_ASK_EVERY_S: Final = 0.5


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


def keep_on(process: psutil.Process, cores: Collection[int]) -> None:
    """Keep all threads of *process*, and what they start from now on, on *cores*."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


@contextmanager
def prefill_node(mesh: LocalMesh, number: int, engine: Sequence[str], arena_bytes: int) -> Iterator[None]:
    """One more node with a prefill instance in *mesh* for the length of the block: `up` puts all on one node.

    Raises RuntimeError when it takes no work within three minutes.
    """
    run_dir = Path(mesh.conductor.removeprefix("ipc://")).parent
    name, messenger = f"prefill{number}", f"ipc://{run_dir}/messenger{number}"
    place = [f"--node-id=node{number}", f"--conductor={mesh.conductor}", "--log-level=error"]
    roles = (
        ["messenger", f"--instance-id=messenger{number}", f"--bind={messenger}", f"--run-dir={run_dir}",
         f"--arena-bytes={arena_bytes}", *place],
        ["prefill", f"--instance-id={name}", f"--bind=ipc://{run_dir}/{name}", f"--messenger={messenger}", *engine,
         *place],
    )  # fmt: skip
    with ExitStack() as processes:
        for flags in roles:
            command = [sys.executable, "-m", "mooncake_mesh", *flags]
            processes.callback(_end, processes.enter_context(subprocess.Popen(command)))
        wait_until_working(mesh, [name])
        yield


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


def wait_until_working(mesh: LocalMesh, instance_ids: Collection[str]) -> None:
    """Until all of them take work: `up` says that it is ready when one of each role does. Raises RuntimeError after
    three minutes."""
    command = [sys.executable, "-m", "mooncake_mesh", "status", "--json", f"--conductor={mesh.conductor}"]
    deadline_s = monotonic() + _READY_S
    missing = set(instance_ids)
    while monotonic() < deadline_s:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        members = json.loads(answer.stdout)["cluster"]["members"] if answer.stdout else []
        missing = set(instance_ids) - {m["member"]["instance_id"] for m in members if m["takes_work"]}
        if not missing:
            return
        sleep(_ASK_EVERY_S)  # asking takes a process of its own, and processor time from those that start
    raise RuntimeError(f"{', '.join(sorted(missing))}: no work taken")
