"""The supervisor around real processes: small scripts in place of the roles."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from mooncake_mesh.cli import readiness, up
from mooncake_mesh.cli.topology import ChildSpec, plan_mesh
from mooncake_mesh.config import UpConfig
from mooncake_mesh.errors import ConfigError

NAMES = ("conductor", "gateway0", "messenger0", "prefill0", "decode0")
STAY = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); record(); signal.pause()"
SERVE_READY = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server = socket.create_server(("127.0.0.1", int(port)))
record()
while True:
    peer, _ = server.accept()
    try:
        peer.recv(4096)
        peer.sendall(b"HTTP/1.1 200 OK\\r\\n\\r\\n{}")
    except OSError:
        pass  # whoever asked was not answered in time, and asks again
    peer.close()
"""


@pytest.fixture
def quiet_supervisor() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


class Scripts:
    """Command lines of children that run a script each, and append ``NAME PID`` to a file once they run."""

    def __init__(self, folder: Path, port: int, scripts: dict[str, str]) -> None:
        self.record = folder / "record"
        self.record.touch()
        self._port = port
        self._scripts = {"gateway0": SERVE_READY, **scripts}

    def __call__(self, spec: ChildSpec) -> Sequence[str]:
        head = f"""
        import os, signal, socket, sys
        port = {self._port}
        def record():
            with open({str(self.record)!r}, "a") as file:
                file.write(f"{spec.name} {{os.getpid()}}\\n")
        """
        return [sys.executable, "-ISc", textwrap.dedent(head) + self._scripts.get(spec.name, STAY)]

    def pids(self, name: str) -> list[int]:
        lines = [line.split() for line in self.record.read_text().splitlines()]
        return [int(pid) for child, pid in lines if child == name]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _mesh(tmp_path: Path, scripts: dict[str, str] | None = None) -> tuple[up.Supervisor, Scripts]:
    port = _free_port()
    (tmp_path / "logs").mkdir()
    config = UpConfig(port=port, log_dir=tmp_path / "logs")
    commands = Scripts(tmp_path, port, scripts or {})
    return up.Supervisor(config, plan_mesh(config, Path("/tmp/m"), port), commands), commands


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  what other processes do sets no event here
            await asyncio.sleep(0.01)


def test_ready_line_and_clean_stop(tmp_path: Path, quiet_supervisor: None, capsys: pytest.CaptureFixture[str]) -> None:
    supervisor, commands = _mesh(tmp_path)
    out = ""

    def announced() -> bool:
        nonlocal out
        out += capsys.readouterr().out
        return bool(out) and all(commands.pids(name) for name in NAMES)

    async def scenario() -> int:
        running = asyncio.ensure_future(supervisor.run())  # noqa: TID251
        await _until(announced)
        os.kill(os.getpid(), signal.SIGTERM)
        return await running

    assert asyncio.run(scenario()) == 0
    assert re.fullmatch(
        r"ready http://127\.0\.0\.1:\d+  model=smollm2-135m  dtype=bfloat16  sdk=ipc:///tmp/m/sdk\.ipc  "
        rf"conductor=ipc:///tmp/m/conductor\.ipc  pid={os.getpid()}\n",
        out,
    )
    for name in NAMES:
        (pid,) = commands.pids(name)
        assert not _alive(pid)


def test_killed_child_comes_back(tmp_path: Path, quiet_supervisor: None) -> None:
    supervisor, commands = _mesh(tmp_path)

    async def scenario() -> int:
        running = asyncio.ensure_future(supervisor.run())  # noqa: TID251
        await _until(lambda: all(commands.pids(name) for name in NAMES))
        os.kill(commands.pids("decode0")[0], signal.SIGKILL)
        await _until(lambda: len(commands.pids("decode0")) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        return await running

    assert asyncio.run(scenario()) == 0
    assert not any(_alive(pid) for pid in commands.pids("decode0"))
    assert len(commands.pids("prefill0")) == 1


def test_refusing_child_ends_the_mesh_with_its_words(
    tmp_path: Path, quiet_supervisor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    refuse = "sys.stderr.write('a log line\\nmooncake prefill: T5 is no decoder\\n\\n'); sys.exit(2)"
    supervisor, commands = _mesh(tmp_path, {"prefill0": refuse, "gateway0": STAY})
    assert asyncio.run(supervisor.run()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("mooncake up: prefill0 refused to start: mooncake prefill: T5 is no decoder\n")
    assert not any(_alive(pid) for name in ("conductor", "decode0") for pid in commands.pids(name))


def test_child_does_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    """A process that prepares its child as the supervisor does, and dies by SIGKILL."""
    program = textwrap.dedent(
        """
        import os, subprocess, sys
        from mooncake_mesh.cli.up import dies_with
        child = subprocess.Popen([sys.executable, "-ISc", "import signal; print(1, flush=True); signal.pause()"],
                                 start_new_session=True, preexec_fn=dies_with(os.getpid()))
        print(child.pid, flush=True)
        child.wait()
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = max(int(parent.stdout.readline()), int(parent.stdout.readline()))
        assert _alive(pid)
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == ""  # end of file: the child, which holds the pipe too, is gone


def test_port_in_use_is_refused(quiet_supervisor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up.telemetry, "configure", lambda *_: None)  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"^up\.port: cannot listen on 127\.0\.0\.1:{port}: Address already in use$"
        ):
            up.run(UpConfig(port=port), None)


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", None),
        (
            b'HTTP/1.1 503 X\r\n\r\n{"reasons": ["no prefill instance", "no decode instance"]}',
            "no prefill instance, no decode instance",
        ),
        (b"HTTP/1.1 503 X\r\n\r\nnonsense", "the mesh"),
        (b"", "the mesh"),
    ],
)
def test_readiness_is_what_the_gateway_says(answer: bytes, missing: str | None) -> None:
    async def scenario() -> str | None:
        async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready HTTP/1.1\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            return await readiness.ask("127.0.0.1", server.sockets[0].getsockname()[1])

    assert asyncio.run(scenario()) == missing


def test_no_gateway_is_missing() -> None:
    with socket.socket() as deaf:  # does not listen, and keeps the port from whoever would
        deaf.bind(("127.0.0.1", 0))
        assert asyncio.run(readiness.ask("127.0.0.1", deaf.getsockname()[1])) == "the gateway"
