"""What a service manager such as systemd hears from a process."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_mesh.mesh import runtime
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_mesh.mesh.service_manager import Progress, ServiceManager, service_manager


class Manager:
    """The other end: a datagram socket."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        words = []
        while True:
            try:
                words.append(self._socket.recv(256).decode())
            except BlockingIOError:
                return words

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "notify")


@pytest.fixture
def manager(address: str) -> Iterator[Manager]:
    listening = Manager(address)
    yield listening
    listening.close()


def test_readiness_and_the_stop_are_told_once(manager: Manager, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def service(lifecycle: Lifecycle) -> None:
        assert manager.heard() == []
        lifecycle.ready(endpoint="ipc://somewhere")
        assert manager.heard() == ["READY=1"]
        lifecycle.stop("asked")
        lifecycle.stop("asked again")

    monkeypatch.setenv("NOTIFY_SOCKET", address)
    assert runtime.main(service) == 0
    assert manager.heard() == ["STOPPING=1"]


def test_a_process_that_gets_nowhere_falls_silent(manager: Manager, address: str) -> None:
    """Idle, working and stuck, a quarter of the watchdog's patience after the other."""

    async def watched() -> list[list[str]]:
        telling = ServiceManager(address, watchdog_s=0.02)
        states = iter([(3, 0), (4, 2), (4, 2), (4, 2), (5, 1)])
        heard = []
        over = asyncio.Event()

        def progress() -> Progress:
            heard.append(manager.heard())  # what the question before has led to
            done, pending = next(states, (5, 0))
            if len(heard) > 5:
                over.set()
            return Progress(done=done, pending=pending)

        telling.watch(progress)
        await over.wait()
        telling.close()
        return heard

    word = ["WATCHDOG=1"]
    assert asyncio.run(watched())[:6] == [[], word, word, [], [], word]


def test_nobody_is_told_where_nobody_listens(address: str) -> None:
    async def alone() -> None:
        for telling in (ServiceManager(None, 1.0), ServiceManager(address)):  # the second one's socket does not exist
            telling.ready()
            telling.watch(lambda: Progress(done=0, pending=0))
            telling.stopping()
            telling.close()

    asyncio.run(alone())


def test_an_abstract_socket_is_reached(manager: Manager) -> None:
    listening = Manager(f"\0mooncake-test-{os.getpid()}")
    ServiceManager(f"@mooncake-test-{os.getpid()}").ready()
    assert listening.heard() == ["READY=1"]
    listening.close()


@pytest.mark.parametrize(
    ("pid", "period_us", "is_watched"), [(None, "40000", True), ("me", "40000", True), ("1", "40000", False)]
)
def test_only_the_process_that_is_watched_says_that_it_lives(
    manager: Manager, address: str, pid: str | None, period_us: str, is_watched: bool
) -> None:
    environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": period_us}
    if pid is not None:
        environ["WATCHDOG_PID"] = str(os.getpid()) if pid == "me" else pid

    async def told() -> None:
        telling = service_manager(environ)
        telling.watch(lambda: Progress(done=0, pending=0))
        telling.close()

    asyncio.run(told())
    assert manager.heard() == (["WATCHDOG=1"] if is_watched else [])


def test_an_engine_that_hangs_makes_no_progress() -> None:
    async def engine() -> None:
        crew, go_on = Crew(1, name="engine"), threading.Event()
        await crew.run(int)
        hanging, waiting = crew.run(go_on.wait), crew.run(int)
        assert crew.progress() == Progress(done=1, pending=2)
        go_on.set()
        await asyncio.gather(hanging, waiting)
        assert crew.progress() == Progress(done=3, pending=0)
        crew.close()

    asyncio.run(engine())
