"""``mooncake up``: a whole mesh on this machine as child processes, kept alive, and stopped without leftovers.

The shell of :mod:`mooncake_mesh.cli.supervision`: starts, signals and reaps processes, asks the gateway whether the
mesh is ready, and tells it on stdout in one line.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, assert_never

import structlog

from mooncake_mesh import telemetry
from mooncake_mesh.cli import run_dir
from mooncake_mesh.cli.readiness import wait_until_ready
from mooncake_mesh.cli.supervision import (
    REFUSED_EXIT_CODE,
    Announce,
    ChildExited,
    Command,
    Event,
    Exit,
    Kill,
    MeshBecameReady,
    Start,
    StopAsked,
    Supervision,
    Terminate,
    TimePassed,
    UpAsked,
)
from mooncake_mesh.cli.topology import ChildSpec, MeshPlan, plan_mesh
from mooncake_mesh.config import UpConfig
from mooncake_mesh.errors import ConfigError

log = structlog.get_logger(__name__)

_PR_SET_PDEATHSIG: Final = 1


def run(config: UpConfig, config_file: Path | None) -> int:
    """Run the mesh until a signal ends it; the exit code. *config_file* is handed on to the children."""
    telemetry.configure("up", "up", config.log_level, config.log_format)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # until the loop takes over: leave nothing behind
    try:
        config = replace(config, port=_free_port(config.host, config.port))
        with run_dir.held(config.run_dir) as folder:
            plan = plan_mesh(config, folder, config.port)
            if config.log_dir is not None:
                _make_log_dir(config.log_dir)
            return asyncio.run(Supervisor(config, plan, partial(_command_line, config_file)).run())
    except ValueError as error:
        field, _, message = str(error).partition(": ")
        raise ConfigError(message, path=f"up.{field}") from error


def _command_line(config_file: Path | None, spec: ChildSpec) -> list[str]:
    config_flags = [] if config_file is None else [f"--config={config_file}"]
    return [sys.executable, "-P", "-m", "mooncake_mesh", spec.role, *config_flags, *spec.flags]


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"log_dir: {path}: {error.strerror}") from error


def _free_port(host: str, port: int) -> int:
    """*port* itself, or a free one for 0. Chosen here, so that a restarted gateway comes back on the same."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(f"port: cannot listen on {host}:{port}: {error.strerror}") from error
        free: int = probe.getsockname()[1]
        return free


class Supervisor:
    """Processes and signals around one Supervision. *command_line* says how a child is started."""

    def __init__(self, config: UpConfig, plan: MeshPlan, command_line: Callable[[ChildSpec], Sequence[str]]) -> None:
        self._config = config
        self._plan = plan
        self._command_line = command_line
        self._specs = {spec.name: spec for spec in plan.children}
        self._core = Supervision({spec.name: spec.stage for spec in plan.children})
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._events.put_nowait, StopAsked())
        try:
            async with asyncio.TaskGroup() as tasks:
                readiness = tasks.create_task(self._watch_readiness())
                code = await self._drive(tasks)
                readiness.cancel()
            return code
        finally:
            for name in self._processes:
                self._signal(name, signal.SIGKILL)  # there is nobody left, unless we failed

    async def _drive(self, tasks: asyncio.TaskGroup) -> int:
        """Feed events to the core and do what it says, until it says Exit."""
        loop = asyncio.get_running_loop()
        event: Event = UpAsked()
        while True:
            for command in self._core.handle(event, loop.time()):
                if isinstance(command, Exit):
                    self._explain(command)
                    return command.code
                await self._do(command, tasks)
            wake_at = self._core.wake_at()
            try:
                async with asyncio.timeout_at(wake_at):
                    event = await self._events.get()
            except TimeoutError:
                event = TimePassed()

    async def _do(self, command: Command, tasks: asyncio.TaskGroup) -> None:
        match command:
            case Start(name=name):
                await self._start(self._specs[name], tasks)
            case Terminate(name=name):
                self._signal(name, signal.SIGTERM)
            case Kill(name=name):
                log.warning("child_killed", child=name)
                self._signal(name, signal.SIGKILL)
            case Announce():
                self._announce()
            case Exit():
                raise AssertionError("handled by the caller")
            case _:
                assert_never(command)

    async def _start(self, spec: ChildSpec, tasks: asyncio.TaskGroup) -> None:
        with self._output(spec.name) as output:
            process = await asyncio.create_subprocess_exec(
                *self._command_line(spec),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches us only: the stop has an order
                preexec_fn=dies_with(os.getpid()),
            )
        if spec.name in self._processes:
            log.warning("child_restarted", child=spec.name, pid=process.pid)
        self._processes[spec.name] = process
        tasks.create_task(self._reap(spec.name, process))

    @contextmanager
    def _output(self, name: str) -> Iterator[int]:
        """Descriptor for what the child writes. Its stdout goes to our stderr too: our stdout has one line only."""
        if self._config.log_dir is None:
            yield sys.stderr.fileno()
            return
        with self._log_file(name).open("ab") as file:
            yield file.fileno()

    def _log_file(self, name: str) -> Path:
        return (self._config.log_dir or Path()) / f"{name}.log"

    async def _reap(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        log.log(_level_of(code), "child_exited", child=name, pid=process.pid, code=code)
        self._events.put_nowait(ChildExited(name=name, code=code))

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes[name]
        if process.returncode is None:
            process.send_signal(number)

    async def _watch_readiness(self) -> None:
        await wait_until_ready(self._config.host, self._config.port, progress=sys.stderr)
        self._events.put_nowait(MeshBecameReady())

    def _announce(self) -> None:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        facts = {
            "model": self._config.model,
            "dtype": self._config.dtype.value,
            "sdk": self._plan.sdk_endpoint,
            "conductor": self._plan.conductor_endpoint,
            "pid": os.getpid(),
        }
        words = "  ".join(f"{name}={value}" for name, value in facts.items())
        sys.stdout.write(f"ready http://{host}:{self._config.port}  {words}\n")
        sys.stdout.flush()

    def _explain(self, end: Exit) -> None:
        if end.culprit is None:
            return
        last = self._last_words(end.culprit)
        if end.code == REFUSED_EXIT_CODE:
            what = f"{end.culprit} refused to start: {last}"
        else:
            what = f"{end.culprit} failed: {last}"
        sys.stderr.write(f"mooncake up: {what}\n")

    def _last_words(self, name: str) -> str:
        if self._config.log_dir is None:
            return "see its message above"
        file = self._log_file(name)
        lines = file.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), f"see {file}")


def _level_of(code: int) -> int:
    """How loudly to tell of a child's end: an orderly one is no news."""
    return logging.DEBUG if code in (0, -signal.SIGTERM) else logging.WARNING


def dies_with(parent: int) -> Callable[[], None]:
    """Runs in the new process: the kernel kills it when *parent* dies, however that happens."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return prepare
