"""The servers that bench.serving compares: their command lines, and how they start, rest and end.

All of them run on the same two cores, with the same weights in bfloat16, and one at a time: the others are frozen
(SIGSTOP) meanwhile. That lets single measurements alternate between servers, which a start of a minute in between would
not, and a frozen server costs nothing but its memory.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from bench import guard
from bench.peers.environments import NotInstalled
from bench.peers.serving_engines import PEERS, install
from bench.serving_client import RequestFailed, Target, complete

OURS: Final = "mooncake-mesh"
CORES: Final = 2
MODEL: Final = "bench"
CONTEXT_TOKENS: Final = 8192
_START_S: Final = 1800.0
_ASK_EVERY_S: Final = 1.0
_LAST_LINES: Final = 6
_OPENAI_EXTRA: Final[dict[str, object]] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class NotStarted(Exception):
    """The server did not answer in time, or ended; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """How to start a server. ``model`` is what its requests call the model, ``extra`` what they say beside."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    model: str = MODEL
    extra: dict[str, object] = field(default_factory=lambda: dict(_OPENAI_EXTRA))


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running one."""

    name: str
    target: Target
    guard_pid: int

    @contextmanager
    def awake(self) -> Iterator[Target]:
        """The only server that runs for the length of the block."""
        guard.thaw(self.guard_pid)
        try:
            yield self.target
        finally:
            guard.freeze(self.guard_pid)


def our_plan(port: int, model: Path, config: Path, flags: Sequence[str]) -> ServerPlan:
    """This project. *config* is a file that :func:`write_config` has written."""
    return ServerPlan(
        name=OURS,
        command=(
            sys.executable, "-m", "mooncake_mesh", "up", f"--port={port}", f"--model={model}", "--dtype=bfloat16",
            f"--config={config}", "--log-level=warning", *flags,
        ),
        model=str(model),
    )  # fmt: skip


def write_config(path: Path) -> Path:
    """A mesh that outlives being frozen, and that takes on whatever is asked: objectives are not what is measured."""
    path.write_text(
        "[conductor]\nttft_slo_s = 600\ntbt_slo_s = 60\nsuspect_after_s = 20\ndead_after_s = 60\n"
        "[up]\narena_bytes = '2GiB'\n"
    )
    return path


def vllm_plan(port: int, model: Path, home: Path, *, name: str = "vllm", flags: Sequence[str] = ()) -> ServerPlan:
    return ServerPlan(
        name=name,
        command=(
            str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1",
            f"--port={port}", f"--model={model}", f"--served-model-name={MODEL}", "--dtype=bfloat16",
            f"--max-model-len={CONTEXT_TOKENS}", *flags,
        ),
        variables={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
            "VLLM_NO_USAGE_STATS": "1",
        },
    )  # fmt: skip


def llamacpp_plan(port: int, home: Path) -> ServerPlan:
    """One KV cache for all its slots, with room for what the throughput rows keep in it."""
    return ServerPlan(
        name="llamacpp",
        command=(
            str(home / "build/bin/llama-server"), "--host", "127.0.0.1", "--port", str(port), "--model",
            str(home / "bf16.gguf"), "--alias", MODEL, "--threads", str(CORES), "--threads-batch", str(CORES),
            "--ctx-size", "32768", "--parallel", "16", "--kv-unified", "--no-webui",
        ),
    )  # fmt: skip


def transformers_plan(port: int, model: Path, home: Path) -> ServerPlan:
    """*model* must know no stop token: this server cannot be told to ignore it."""
    return ServerPlan(
        name="transformers",
        command=(
            str(home / "bin" / "transformers"), "serve", str(model), "--host=127.0.0.1", f"--port={port}",
            "--device=cpu", "--dtype=bfloat16", "--continuous-batching", "--cb-block-size=128", "--cb-num-blocks=256",
            "--cb-max-batch-tokens=512", "--log-level=error",
        ),
        model=str(model),
        extra={},
    )  # fmt: skip


def endless_copy(model: Path, folder: Path) -> Path:
    """The model folder *model* again in *folder*, by links, but for its stop token."""
    folder.mkdir()
    for source in model.iterdir():
        if source.suffix == ".json" and "config" in source.name and "tokenizer" not in source.name:
            settings = json.loads(source.read_text())
            settings.pop("eos_token_id", None)
            (folder / source.name).write_text(json.dumps(settings))
        else:
            (folder / source.name).symlink_to(source)
    return folder


def peer_plan(name: str, model: Path, folder: Path, log: Callable[[str], None]) -> ServerPlan:
    """Peer *name*, installed if need be, with a port of its own; *folder* is for what it needs beside. Raises
    NotInstalled."""
    if name not in PEERS:
        raise NotInstalled(f"there is no peer {name!r}, only {', '.join(PEERS)}")
    home = install(name, log)
    if name == "vllm":
        return vllm_plan(free_port(), model, home)
    if name == "llamacpp":
        return llamacpp_plan(free_port(), home)
    return transformers_plan(free_port(), endless_copy(model, folder / "endless"), home)


@contextmanager
def running(plan: ServerPlan, logs: Path, log: Callable[[str], None]) -> Iterator[Server]:
    """Start *plan* on the first cores that we may use, wait until it answers, and freeze it.

    Nothing of it is left behind, however this process ends. Raises NotStarted.
    """
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    began_s = monotonic()
    path = logs / f"{plan.name}.log"
    with path.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "--cpu-list", ",".join(map(str, cores)), sys.executable, "-m", "bench.guard", *plan.command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **plan.variables},
        )
    assert process.stdin is not None
    try:
        log(f"{plan.name}: starting")
        port = next(int(_value(plan.command, index)) for index, word in enumerate(plan.command) if "--port" in word)
        target = Target(host="127.0.0.1", port=port, model=plan.model, extra=plan.extra)
        _wait_until_it_answers(plan.name, target, process, path)
        log(f"{plan.name}: answers after {monotonic() - began_s:.0f} s")
        server = Server(name=plan.name, target=target, guard_pid=process.pid)
        guard.freeze(process.pid)
        yield server
    finally:
        process.stdin.close()
        process.wait()


def _value(command: Sequence[str], index: int) -> str:
    """That of the flag at *index*, in either spelling."""
    _, equals, value = command[index].partition("=")
    return value if equals else command[index + 1]


def _wait_until_it_answers(name: str, target: Target, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline_s = monotonic() + _START_S
    why = "it never listened"
    while monotonic() < deadline_s:
        if process.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise NotStarted("\n  ".join([f"{name} ended with exit code {process.returncode}; its last words:", *last]))
        try:
            asyncio.run(complete(target, "One two three", 4))
            return
        except (OSError, RequestFailed, TimeoutError) as error:
            why = str(error)
        sleep(_ASK_EVERY_S)  # asking keeps a server that is loading its model from its work
    raise NotStarted(f"{name} did not answer within {_START_S:g} s: {why}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
