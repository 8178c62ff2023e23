"""One mesh whose conductor is told another policy now and then: engines load their weights once for all policies.

The conductor is soft state, so it is simply restarted with other settings; it knows the blocks of the nodes again when
their messengers have told it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

import psutil

from bench.load import StreamTimes
from bench.mesh import LocalMesh, keep_on, local_mesh, prefill_node

_ARENA_BYTES: Final = 256 << 20
_DECODE: Final = "decode0"
_READY_S: Final = 60.0
_ASK_EVERY_S: Final = 0.2


class PolicyMesh:
    """A mesh of *workers* under any policy in turn."""

    def __init__(self, mesh: LocalMesh, config: Path, workers: Sequence[str]) -> None:
        self.mesh = mesh
        self._workers = workers
        self._config = config
        self._profile = config.with_name("cost.json")
        self._up = next(iter(mesh.processes.values())).parent()

    def measure(self, *, largest_batch: int) -> None:
        """What work takes here; every conductor from now on goes by it. Raises RuntimeError when measuring fails."""
        command = [sys.executable, "-m", "mooncake_mesh", "profile", f"--conductor={self.mesh.conductor}",
                   f"--gateway={self.mesh.sdk}", f"--output={self._profile}", "--longest-prompt-tokens=512",
                   f"--largest-batch={largest_batch}", "--repeats=1"]  # fmt: skip
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            raise RuntimeError("the mesh could not be measured")

    def use(self, settings: Mapping[str, str | float]) -> None:
        """Restart the conductor with *settings* of its table; returns when it knows instances and blocks again."""
        known = sum(self._status()["indexed_blocks"].values())
        table = {**settings, "cost_profile": str(self._profile)} if self._profile.exists() else settings
        write_conductor(self._config, table)
        conductor = self._conductor()
        conductor.terminate()
        conductor.wait()
        deadline_s = monotonic() + _READY_S
        while monotonic() < deadline_s:
            sleep(_ASK_EVERY_S)
            status = self._status()
            working = {m["member"]["instance_id"] for m in status["cluster"]["members"] if m["takes_work"]}
            if working.issuperset(self._workers) and sum(status["indexed_blocks"].values()) >= known:
                return
        raise RuntimeError("the restarted conductor does not know the mesh again")

    def body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        """A request for exactly *max_tokens*."""
        return {"model": self.mesh.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0,
                "ignore_eos": True}  # fmt: skip

    def _conductor(self) -> psutil.Process:
        """The one that runs now: `mooncake up` starts another when it ends."""
        assert self._up is not None
        return next(child for child in self._up.children() if "conductor" in child.cmdline())

    def _status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "mooncake_mesh", "status", "--json", f"--conductor={self.mesh.conductor}"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        empty: dict[str, Any] = {"cluster": {"members": []}, "indexed_blocks": {}}
        report: dict[str, Any] = json.loads(answer.stdout) if answer.stdout else empty
        return report


def write_conductor(config: Path, table: Mapping[str, str | float]) -> None:
    """*config* with a table for the conductor and nothing else."""
    config.write_text("[conductor]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()))


@contextmanager
def shared_cores(args: argparse.Namespace, first: Mapping[str, str | float]) -> Iterator[PolicyMesh]:
    """Two prefill instances on nodes of their own and one decode instance on a third, for the length of the block;
    *first* are the conductor's settings to begin with."""
    with (
        _configured(args, first) as (mesh, config),
        prefill_node(mesh, 2, _engine(args), _ARENA_BYTES),
    ):
        yield PolicyMesh(mesh, config, ("prefill0", "prefill2", _DECODE))


@contextmanager
def own_cores(args: argparse.Namespace, first: Mapping[str, str | float]) -> Iterator[PolicyMesh]:
    """One prefill and one decode instance for the length of the block: the decode instance alone on the last core, all
    else, this process too, on the others. With one core only, all share it."""
    cores = os.sched_getaffinity(0)
    others = cores - {max(cores)} or cores
    os.sched_setaffinity(0, others)  # `mooncake up` and all that it starts again are born there
    try:
        with _configured(args, first) as (mesh, config):
            keep_on(mesh.processes[_DECODE], {max(cores)})
            yield PolicyMesh(mesh, config, ("prefill0", _DECODE))
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _configured(args: argparse.Namespace, first: Mapping[str, str | float]) -> Iterator[tuple[LocalMesh, Path]]:
    with tempfile.TemporaryDirectory(prefix="mooncake-policies-") as folder:
        config = Path(folder) / "mooncake.toml"
        write_conductor(config, first)
        with local_mesh(
            ["--nodes=2", *_engine(args), "--arena-bytes", str(_ARENA_BYTES), "--config", str(config)]
        ) as mesh:
            yield mesh, config


def _engine(args: argparse.Namespace) -> list[str]:
    flags = ["--engine", args.engine]
    if args.engine == "fake":
        flags += ["--fake-prefill-s-per-token", "0.001", "--fake-decode-s-base", "0.02"]
        flags += ["--fake-decode-s-per-slot", "0.01"]
    return flags


def failed(times: StreamTimes) -> bool:
    """Ended otherwise than well, and not by a refusal."""
    return bool(times.error) and not refused(times)


def refused(times: StreamTimes) -> bool:
    """The mesh let it not in, or took it back before its first token."""
    return "429" in times.error or "503" in times.error


def tell(progress: str) -> None:
    """One line for who waits."""
    sys.stderr.write(f"bench.policies: {progress}\n")
