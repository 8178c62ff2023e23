"""A whole mesh of real processes for tests: started through the command line, watched, hurt, stopped without leftovers.

::

    node0: messenger0, prefill0      node1: messenger1, decode0      and one gateway, one conductor

Everything but HTTP goes through Unix sockets in a folder of this mesh alone. Whether something has happened is found
out by asking, with a deadline, never by waiting for a fixed time.

A machine that runs several meshes at once lets a process stand still for seconds now and then. So a conductor is more
patient here than by default, in leases and objectives: neither is a process that slept given up, nor a request refused
because the mesh looks slow. A test of just that sets them itself.

Start meshes from the main thread: the kernel ties a child's life to the thread that made it.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeVar

from mooncake_mesh.cli.up import dies_with
from mooncake_mesh.mesh.curve import MeshKeys
from mooncake_proto.control import Health, Member, MemberState, Ping, Pong, Role, StatusQuery, StatusReport
from mooncake_proto.ids import Incarnation
from tests.mesh import clients
from tests.mesh.clients import NoAnswer
from tests.mesh.fork_server import Forked, ForkServer
from tests.mesh.ports import held_port

T = TypeVar("T")

MODEL: Final = "fake"
_ASK_EVERY_S: Final = 0.02
_READY_S: Final = 30.0
_STOP_S: Final = 40.0
_PATIENT: Final = ("--suspect-after-s=5", "--dead-after-s=8", "--ttft-slo-s=600", "--tbt-slo-s=60")
_LAST_EVENTS: Final = 20
_WORKERS: Final = (Role.PREFILL, Role.DECODE)
_STOP_ORDER: Final = ("gateway", "decode", "prefill", "messenger", "conductor")


@dataclass(slots=True)
class _Child:
    """One process of the mesh; ``log_start`` is where the log of its current life begins, in bytes."""

    name: str
    role: str
    endpoint: str
    flags: list[str]
    environ: dict[str, str]
    log: Path
    process: "subprocess.Popen[bytes] | Forked | None" = None
    log_start: int = 0
    is_paused: bool = False
    killed: set[int] = field(default_factory=set)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Start(Enum):
    """How processes are started."""

    COMMAND = "by the command line, each in a new interpreter"
    FORK = "by the fork server of their engine, where there is one: the same from the command's main on, and sooner"


class Mesh:
    """Context manager of one mesh. Names are those of the instances: gateway0, conductor, prefill0, messenger1 …

    ``prefill_nodes`` and ``decode_nodes`` hold the node of each instance, so ``decode_nodes=(1, 2)`` makes decode0 on
    node1 and decode1 on node2. Each prefill instance has ``prefill_stages`` processes: all on its node, or those behind
    the head on ``stage_nodes``.

    ``flags`` and ``environ`` add to a role's or an instance's command line (a flag that is given twice counts as its
    last value). With ``engine="transformers"`` say which model by ``model`` and ``dtype``.
    """

    alive: ClassVar[list["Mesh"]] = []
    fork_servers: ClassVar[dict[str, ForkServer]] = {}
    """By engine."""
    keys: MeshKeys | None = None

    def __init__(
        self,
        *,
        engine: str = "fake",
        model: str = MODEL,
        dtype: str = "bfloat16",
        prefill_nodes: Sequence[int] = (0,),
        prefill_stages: int = 1,
        stage_nodes: Sequence[int] = (),
        decode_nodes: Sequence[int] = (1,),
        arena_bytes: str = "64MiB",
        flags: Mapping[str, Sequence[str]] | None = None,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        ready_s: float = _READY_S,
        start: Start = Start.FORK,
        conductors: Sequence[str] = ("conductor",),
    ) -> None:
        self.model = model
        self.folder = Path(tempfile.mkdtemp(prefix="mm-", dir="/tmp"))
        self._flags, self._environ = flags or {}, environ or {}
        self._ready_s = ready_s
        self._fork_server = Mesh.fork_servers.get(engine) if start is Start.FORK else None
        self._children: dict[str, _Child] = {}
        self._used_shm: set[str] = set()
        self._held_ports: list[socket.socket] = []
        self._first_flags: dict[str, list[str]] = {}
        worker = [f"--engine={engine}", f"--model={model}", f"--dtype={dtype}"]
        conductor = f"--conductor={','.join(map(self._ipc, conductors))}"
        for name in conductors:
            publish = self._ipc(name.replace("conductor", "cluster"))
            self._add("conductor", name, [f"--publish={publish}", "--heartbeat-s=0.2", *_PATIENT])
        for node in sorted({*prefill_nodes, *stage_nodes, *decode_nodes}):
            store = [f"--node-id=node{node}", f"--run-dir={self.folder}", f"--arena-bytes={arena_bytes}"]
            self._add("messenger", f"messenger{node}", [conductor, *store])
        for role, nodes in (("prefill", prefill_nodes), ("decode", decode_nodes)):
            for number, node in enumerate(nodes):
                stages = prefill_stages if role == "prefill" else 1
                places = [[conductor, *self._place(at)] for at in (node, *(stage_nodes or [node] * stages))[:stages]]
                self._add_stages(role, f"{role}{number}", places, worker)
        tokenizer = [f"--engine={engine}", f"--model={model}"]
        stream = f"--stream-bind={self._ipc('tokens')}"
        self._add("gateway", "gateway0", [conductor, "--port=0", stream, *tokenizer], endpoint=self._ipc("sdk"))

    def __enter__(self) -> Self:
        Mesh.alive.append(self)
        try:
            for name in self._children:
                self.start(name)
            self.wait_healthy(self._ready_s)
        except BaseException:
            print(self.last_events())  # noqa: T201
            self.end_by_force()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            print(self.last_events())  # noqa: T201
        try:
            self.close()
        finally:
            self.end_by_force()

    # --- where it is --------------------------------------------------------------------------------------------------

    @property
    def http(self) -> str:
        """Base URL of the OpenAI endpoint."""
        ready = self.wait_log("gateway0", "ready")
        return str(ready["http"])

    @property
    def sdk(self) -> str:
        return self.endpoint("gateway0")

    @property
    def tokens(self) -> str:
        """The gateway's ROUTER where workers deliver tokens."""
        return self._ipc("tokens")

    @property
    def conductor(self) -> str:
        return self.endpoint("conductor")

    def endpoint(self, name: str) -> str:
        return self._children[name].endpoint

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._children)

    def is_running(self, name: str) -> bool:
        return self._children[name].is_running

    def is_paused(self, name: str) -> bool:
        return self._children[name].is_paused

    def pid(self, name: str) -> int:
        process = self._children[name].process
        assert process is not None
        return process.pid

    # --- how it fares -------------------------------------------------------------------------------------------------

    def status(self, *, timeout_s: float = 15.0) -> StatusReport:
        """The conductor's report. Raises NoAnswer."""
        return clients.ask(self.conductor, StatusQuery(), StatusReport, timeout_s=timeout_s, keys=self.keys)

    def member(self, name: str) -> Member:
        """The instance as the conductor knows it."""
        return next(state.member for state in self.status().cluster.members if state.member.instance_id == name)

    def incarnation(self, name: str, *, timeout_s: float = 15.0) -> Incarnation:
        return clients.ask(self.endpoint(name), Ping(), Pong, timeout_s=timeout_s, keys=self.keys).incarnation

    def wait_healthy(self, timeout_s: float = _READY_S) -> StatusReport:
        """Wait until every running process is known, alive and in its current life, and the gateway takes requests."""
        return self.wait(self._healthy, timeout_s=timeout_s, what="the mesh to be healthy")

    def wait(
        self, look: Callable[[], T | None], *, timeout_s: float = 30.0, what: str, tell: Callable[[], object] = str
    ) -> T:
        """The first result of *look* that is not None. After *timeout_s* AssertionError, with what *tell* says."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            result = look()
            if result is not None:
                return result
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {timeout_s:g} s for {what}: {tell()}")
            time.sleep(_ASK_EVERY_S)

    def wait_idle(self, timeout_s: float = 30.0) -> StatusReport:
        """Wait until the members report that no job is left anywhere and no block is held. What has ended holds none,
        whatever it last said."""

        def busy(report: StatusReport) -> dict[str, dict[str, int]]:
            states = {str(state.member.instance_id): held(state) for state in report.cluster.members}
            return {name: left for name, left in states.items() if left and not self._has_ended(name)}

        def look() -> StatusReport | None:
            report = self.status()
            return None if busy(report) else report

        def tell() -> object:
            return busy(self.status())

        return self.wait(look, timeout_s=timeout_s, what="all jobs and blocks to be given back", tell=tell)

    # --- logs ---------------------------------------------------------------------------------------------------------

    def wait_busy(self, role: str) -> str:
        """Wait until an instance of *role* works, and say which."""

        def look() -> str | None:
            for state in self.status().cluster.members:
                if state.member.role.value == role and state.load.running_jobs:
                    return str(state.member.instance_id)
            return None

        return self.wait(look, what=f"a {role} instance to work")

    def logs(self, name: str) -> list[dict[str, Any]]:
        """Events that a process logged in its current life, oldest first."""
        child = self._children[name]
        if not child.log.exists():  # it has only just been started
            return []
        with child.log.open("rb") as file:
            file.seek(child.log_start)
            lines = file.read().split(b"\n")[:-1]
        return [event for event in map(_event, lines) if event is not None]

    def find_log(self, name: str, event: str, **match: object) -> dict[str, Any] | None:
        """The first *event* of the current life whose fields equal *match*."""
        return next((entry for entry in self.logs(name) if _matches(entry, event, match)), None)

    def wait_log(self, name: str, event: str, *, timeout_s: float = 30.0, **match: object) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = self.find_log(name, event, **match)
            child = self._children[name]
            if found is None and not child.is_running:
                raise AssertionError(f"{name} has ended without {event!r}")
            return found

        return self.wait(look, timeout_s=timeout_s, what=f"{name} to log {event!r}")

    def last_events(self) -> str:
        """The end of every process' log, for people."""
        parts = []
        for child in self._children.values():
            text = child.log.read_text(errors="replace") if child.log.exists() else ""
            state = "running" if child.is_running else f"ended {child.process.returncode if child.process else ''}"
            parts.append("\n".join([f"--- {child.name} ({state})", *text.splitlines()[-_LAST_EVENTS:]]))
        return "\n".join(parts)

    # --- hurting it ---------------------------------------------------------------------------------------------------

    def start_missing(self) -> None:
        """Start every process that is gone."""
        for name in self.names:
            if not self.is_running(name):
                self.start(name)

    def mended(self) -> Self:
        """Whole again whatever a test did to it, and idle."""
        self.start_missing()
        self.wait_healthy()
        self.wait_idle()
        return self

    def start(self, name: str) -> None:
        """Start a process, again if it is gone, with the same flags."""
        child = self._children[name]
        assert not child.is_running, f"{name} runs already"
        child.is_paused = False
        child.log_start = child.log.stat().st_size if child.log.exists() else 0
        argv = [child.role, *child.flags]
        if self._fork_server is not None:
            child.process = self._fork_server.start(argv, environ=child.environ, log=child.log)
            return
        with child.log.open("ab") as log:
            child.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mooncake_mesh", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **child.environ},
                start_new_session=True,
                preexec_fn=dies_with(os.getpid()),  # an interrupted test run leaves nothing
            )

    def kill(self, name: str) -> None:
        """SIGKILL; returns when the process is gone. A gateway keeps its port for the next start."""
        child = self._children[name]
        port = self.http.rsplit(":", 1)[1] if child.role == "gateway" else ""
        assert child.process is not None
        child.killed.add(child.process.pid)
        child.process.kill()
        child.process.wait()
        if port:
            child.flags.append(f"--port={port}")
            self._held_ports.append(held_port(int(port)))

    def restart(self, name: str, *flags: str) -> None:
        """End a process and start it again with *flags* more than at first, which win over those of the mesh."""
        child = self._children[name]
        first = self._first_flags.setdefault(name, list(child.flags))
        self.kill(name)
        child.flags[:] = [*first, *flags]
        self.start(name)

    def stop(self, name: str) -> None:
        """SIGSTOP: the process stalls with all its connections open."""
        self._children[name].is_paused = True
        self._signal(name, signal.SIGSTOP)

    def cont(self, name: str) -> None:
        self._children[name].is_paused = False
        self._signal(name, signal.SIGCONT)

    def terminate(self, name: str) -> None:
        """SIGTERM, without waiting."""
        self._signal(name, signal.SIGTERM)

    def exit_code(self, name: str, *, timeout_s: float = _STOP_S) -> int:
        """Wait for a process to end."""
        process = self._children[name].process
        assert process is not None
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} still runs after {timeout_s:g} s") from None

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop all in order and check that nothing is left. A process that was killed and not started again is fine."""
        codes = {}
        for role in _STOP_ORDER:
            stage = [child for child in self._children.values() if child.role == role and child.is_running]
            for child in stage:
                self._note_shm(child)
                if child.is_paused:
                    self.cont(child.name)
                self.terminate(child.name)
            for child in stage:
                codes[child.name] = self.exit_code(child.name)
        assert not any(codes.values()), f"exit codes {codes}\n{self.last_events()}"
        was_killed = any(child.killed for child in self._children.values())
        sockets = [path.name for path in self.folder.iterdir() if path.is_socket()]
        assert was_killed or not sockets, f"socket files left: {sockets}"
        left = [name for name in self._used_shm if Path(name).exists()]
        assert not left, f"shared memory left: {left}"

    def end_by_force(self) -> None:
        """After a failure: no process may survive the mesh."""
        for child in self._children.values():
            if child.process is not None and child.process.poll() is None:
                child.process.kill()
                child.process.wait()
        for holder in self._held_ports:
            holder.close()
        if self in Mesh.alive:
            Mesh.alive.remove(self)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _place(self, node: int) -> list[str]:
        return [f"--node-id=node{node}", f"--messenger={self._ipc(f'messenger{node}')}"]

    def _add_stages(self, role: str, name: str, places: Sequence[list[str]], flags: list[str]) -> None:
        """One worker, or the processes of a prefill instance: the further stages of prefill0 are prefill0-1 …"""
        stages = len(places)
        if stages == 1:
            self._add(role, name, [*places[0], *flags])
            return
        further = [f"{name}-{stage}" for stage in range(1, stages)]
        shape = [*flags, f"--pipeline-stages={stages}", f"--pipeline-run-dir={self.folder}"]
        self._add(role, name, [*places[0], *shape, f"--pipeline-endpoints={','.join(map(self._ipc, further))}"])
        for stage, each in enumerate(further, 1):
            self._add(role, each, [*places[stage], *shape, f"--pipeline-stage={stage}"])

    def _add(self, role: str, name: str, flags: list[str], *, endpoint: str = "") -> None:
        endpoint = endpoint or self._ipc(name)
        extra = [*self._flags.get(role, ()), *(self._flags.get(name, ()) if name != role else ())]
        own = [f"--instance-id={name}", f"--bind={endpoint}", "--log-format=json", *flags, *extra]
        self._children[name] = _Child(
            name=name,
            role=role,
            endpoint=endpoint,
            flags=own,
            environ={**self._environ.get(role, {}), **self._environ.get(name, {})},
            log=self.folder / f"{name}.log",
        )

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.folder}/{name}.ipc"

    def _has_ended(self, name: str) -> bool:
        """Whether it is one of this mesh, and not there."""
        return name in self._children and not self._children[name].is_running

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._children[name].process
        assert process is not None
        process.send_signal(number)

    def _healthy(self) -> StatusReport | None:
        running = [child for child in self._children.values() if child.is_running and not child.is_paused]
        for child in self._children.values():
            if child.process is not None and child.process.returncode not in (None, 0, -signal.SIGKILL):
                raise AssertionError(f"{child.name} ended with {child.process.returncode}")
        try:
            report = self.status(timeout_s=1.0)
            known = {
                state.member.instance_id: state.member.incarnation
                for state in report.cluster.members
                if state.health is Health.ALIVE and (state.takes_work or state.member.role not in _WORKERS)
            }
            wanted = {child.name: self.incarnation(child.name, timeout_s=1.0) for child in running}
            is_ready = clients.get(self.http, "/ready").status == 200
        except (NoAnswer, OSError):
            return None
        members = {name: life for name, life in wanted.items() if self._children[name].role != "conductor"}
        return report if report.healthy and is_ready and members.items() <= known.items() else None

    def _note_shm(self, child: _Child) -> None:
        assert child.process is not None
        self._used_shm |= set(_shm_of(child.process.pid))


def held(state: MemberState) -> dict[str, int]:
    """What a member that is alive still works on or keeps for somebody."""
    load = state.load
    counts = {
        "running_jobs": load.running_jobs,
        "queued_jobs": load.queued_jobs,
        "running_tokens": load.running_tokens,
        "queued_tokens": load.queued_tokens,
        "blocks": load.blocks_total - load.blocks_free - load.blocks_evictable,
    }
    return {} if state.health is Health.DEAD else {name: count for name, count in counts.items() if count}


def _shm_of(pid: int) -> Iterator[str]:
    """Named shared memory that a process has mapped; none where it has just ended."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return
    for line in maps.splitlines():
        path = line.partition("/dev/shm/")
        if path[1]:
            yield "/dev/shm/" + path[2].removesuffix(" (deleted)")


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:  # a traceback, or what a library wrote
        return None
    return event if isinstance(event, dict) else None


def _matches(entry: Mapping[str, Any], event: str, match: Mapping[str, object]) -> bool:
    return entry.get("event") == event and all(entry.get(name) == value for name, value in match.items())
