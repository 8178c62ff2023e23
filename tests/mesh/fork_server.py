"""Starts the processes of a mesh by forking one that has imported what they need.

A role's imports cost a core most of a second, with torch six, and a test run starts hundreds of processes. A forked one
does what ``python -m mooncake_mesh ROLE FLAGS`` does from its ``main`` on, in a session of its own, and is as easily
killed.

The server is a process of its own, because the one that runs pytest has threads, and it ends with it. They talk over a
socket pair, a JSON object in each packet: ``{"argv", "environ", "log"}`` is answered by ``{"pid"}``; ``{"pid",
"returncode"}`` tells of each end, negative for a signal.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

_ROLES: Final = ("conductor", "messenger", "prefill", "decode", "gateway")
_MODULES: Final = (
    "mooncake_mesh.cli.app",
    "mooncake_mesh.cli.roles",
    "mooncake_mesh.mesh.key_folder",
    "mooncake_mesh.mesh.runtime",
    "mooncake_mesh.engine.fake",
    *(f"mooncake_mesh.{role}.service" for role in _ROLES),
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.httptools_impl",
)
REAL_MODULES: Final = ("mooncake_mesh.engine.runner", "mooncake_mesh.gateway.model_tokenizer")
"""For a ForkServer of meshes with the real engine, besides those of all roles."""

_PACKET_BYTES: Final = 1 << 16


# --- in the process that runs pytest ----------------------------------------------------------------------------------


class Forked:
    """A process that the server made; as much of ``subprocess.Popen`` as a mesh needs."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code as soon as the process has ended."""
        self._server.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.returncode is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self._server.hear(min(left_s, 1.0))
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As Popen's: nothing where the process has ended, heard of or not."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A context manager. For one thread, as meshes are. *modules* are imported besides those of all roles."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules

    def __enter__(self) -> "ForkServer":
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._forked: dict[int, Forked] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt is for pytest, which then stops its meshes
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # so numpy starts no thread, which a fork would lose
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._socket.close()
        self._process.wait()

    def start(self, argv: list[str], *, environ: dict[str, str], log: Path) -> Forked:
        """Start ``mooncake ARGV`` with *environ* added to ours, its output appended to *log*."""
        self._socket.send(json.dumps({"argv": argv, "environ": environ, "log": str(log)}).encode())
        while True:
            answer = self._receive()
            if "returncode" not in answer:
                break
        forked = Forked(self, answer["pid"])
        self._forked[forked.pid] = forked
        return forked

    def hear(self, timeout_s: float) -> None:
        """Take in who has ended; wait at most *timeout_s* for the first news."""
        while select.select([self._socket], [], [], timeout_s)[0]:
            self._receive()
            timeout_s = 0.0

    def _receive(self) -> dict[str, Any]:
        data = self._socket.recv(_PACKET_BYTES)
        if not data:
            raise RuntimeError("the fork server has ended")
        message: dict[str, Any] = json.loads(data)
        if "returncode" in message:
            self._forked.pop(message["pid"]).returncode = message["returncode"]
        return message


# --- in the server ----------------------------------------------------------------------------------------------------


def _serve(plug: socket.socket, modules: list[str]) -> None:
    """Fork whenever asked, and tell who has ended, until nobody asks any more."""
    from mooncake_mesh.cli.up import dies_with

    del os.environ["OPENBLAS_NUM_THREADS"]
    for name in (*_MODULES, *modules):
        importlib.import_module(name)
    gc.freeze()  # what all share: no process needs to look through it, least of all at its end
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    prepare = dies_with(os.getpid())
    watched: list[int | socket.socket] = [plug, read_end]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if read_end in ready:
            os.read(read_end, _PACKET_BYTES)
            _tell_ended(plug)
        if plug in ready:
            data = plug.recv(_PACKET_BYTES)
            if not data:
                return
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (plug.detach(), read_end, write_end):
                    os.close(end)
                prepare()
                _become(**request)
            plug.send(json.dumps({"pid": pid}).encode())


def _tell_ended(plug: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            told = json.dumps({"pid": pid, "returncode": os.waitstatus_to_exitcode(status)})
            with contextlib.suppress(BrokenPipeError):
                plug.send(told.encode())


def _become(argv: list[str], environ: dict[str, str], log: str) -> None:
    """Run the command line and end the process the way the interpreter would. Never returns."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.update(environ)
    random.seed()
    from mooncake_mesh.cli.app import main

    sys.argv[1:] = argv
    sys.exit(main(argv))


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
