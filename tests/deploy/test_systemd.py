"""The systemd units for real: installed in a container that systemd boots, started, hurt, drained and restarted."""

import socket
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.deploy import podman
from tests.deploy.mesh_door import Door, Load

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]

_NAME = "mooncake-test-node"
_LOOSEST = 4.0
"""Highest exposure level that systemd-analyze may find."""


class Machine:
    """A container with systemd as its first process, and two nodes of a mesh on it, a and b."""

    def __init__(self, image: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]
        podman.podman(
            "run",
            "--detach",
            f"--name={_NAME}",
            "--systemd=always",
            "--user=root",
            "--workdir=/",
            "--cap-add=SYS_ADMIN",  # so that the units' sandboxes are made
            "--security-opt=seccomp=unconfined",
            f"--volume={podman.REPOSITORY}/deploy/systemd:/deploy:ro",
            f"--publish=127.0.0.1:{self._port}:8000",
            "--entrypoint=/sbin/init",
            image,
        )

    @property
    def door(self) -> Door:
        return Door(url=f"http://127.0.0.1:{self._port}")

    def run(self, command: str, timeout_s: float = 120.0) -> str:
        return podman.podman("exec", _NAME, "sh", "-c", command, timeout_s=timeout_s)

    def boot(self) -> None:
        podman.until("systemd runs", lambda: "running" in self._asked("systemctl is-system-running"), 60)
        self.run("userdel mooncake; rm -rf /var/lib/mooncake /run/mooncake")  # the image's own, which units make anew
        self.run("/deploy/install --node a --prefill 1 --decode 1 --conductor here --gateway")
        self.run("/deploy/install --node b --prefill 1 --decode 1 --conductor here")
        self.run(
            r"""sed -i -e 's/^model = .*/model = "fake"\nengine = "fake"/' -e 's/1GiB/32MiB/'"""
            r""" -e 's/^host = .*/host = "0.0.0.0"\nallow_insecure_bind = true/' /etc/mooncake/mooncake.toml"""
        )
        self.run("systemctl start mooncake.target", timeout_s=240)
        podman.until("the mesh is ready", self.door.is_ready, 60)

    def stop(self) -> None:
        """The whole node. systemctl itself waits for the target only, not for what stops along with it."""
        self.run("systemctl stop mooncake.target", timeout_s=240)
        left = "systemctl list-units --plain --no-legend --state=active,deactivating 'mooncake-*.service'"
        podman.until("every unit has stopped", lambda: not self.run(left).strip(), 120)

    def pid(self, unit: str) -> int:
        return int(self.run(f"systemctl show --value --property=MainPID {unit}"))

    def restarts(self, unit: str) -> int:
        """How often systemd had to start it again by itself."""
        return int(self.run(f"systemctl show --value --property=NRestarts {unit}"))

    def ended_us(self, unit: str) -> int:
        """When it last stopped, on the machine's clock."""
        return int(self.run(f"systemctl show --value --property=InactiveEnterTimestampMonotonic {unit}"))

    def _asked(self, command: str) -> str:
        return podman.podman("exec", _NAME, "sh", "-c", command, check=False)


@pytest.fixture(scope="module")
def machine(image: str) -> Iterator[Machine]:
    try:
        booted = Machine(image)
        booted.boot()
        yield booted
    finally:
        podman.podman("rm", "--force", "--time=5", _NAME, check=False)


def test_a_chat_is_answered(machine: Machine) -> None:
    assert machine.door.chat("Hello, who is there?")["usage"]["completion_tokens"] == 8


def test_no_warning_of_a_unit(machine: Machine) -> None:
    """Such as an ordering cycle or a setting that systemd does not know."""
    assert "mooncake" not in machine.run("journalctl --no-pager --output=cat --priority=warning _PID=1")


@pytest.mark.parametrize("unit", ["conductor@0", "messenger@a", "prefill@a-0", "decode@a-0", "gateway@a"])
def test_units_are_locked_in(machine: Machine, unit: str) -> None:
    said = machine.run(f"systemd-analyze security --no-pager mooncake-{unit}.service | tail -n 1")
    level = float(said.split("exposure level for")[1].split(":")[1].split()[0])
    assert level <= _LOOSEST
    root = machine.run(f"awk '$5 == \"/\" {{ print $6 }}' /proc/{machine.pid(f'mooncake-{unit}')}/mountinfo")
    assert root.startswith("ro")


@pytest.mark.parametrize("unit", ["mooncake-decode@a-0", "mooncake-messenger@a", "mooncake-conductor@0"])
def test_a_killed_process_comes_back(machine: Machine, unit: str) -> None:
    pid, restarts = machine.pid(unit), machine.restarts(unit)
    machine.run(f"kill -9 {pid}")
    podman.until(f"{unit} is started again", lambda: machine.restarts(unit) > restarts, 60)
    podman.until(f"{unit} is up", lambda: machine.run(f"systemctl is-active {unit} || true").strip() == "active", 60)
    podman.until("the mesh is ready", machine.door.is_ready, 60)
    podman.until("a chat is answered", lambda: machine.door.answers(f"Is {unit} back?"), 60)


def test_a_process_that_stands_still_is_replaced(machine: Machine) -> None:
    unit = "mooncake-decode@b-0"
    machine.run(f"mkdir -p /run/systemd/system/{unit}.service.d")
    machine.run(f"printf '[Service]\\nWatchdogSec=8\\n' >/run/systemd/system/{unit}.service.d/soon.conf")
    machine.run(f"systemctl daemon-reload; systemctl restart {unit}")
    time.sleep(18)  # twice its patience: a process that is well keeps its watchdog quiet
    assert machine.restarts(unit) == 0
    machine.run(f"kill -STOP {machine.pid(unit)}")
    podman.until(f"{unit} is started again", lambda: machine.restarts(unit) == 1, 60)
    podman.until("it is up", lambda: machine.run(f"systemctl is-active {unit} || true").strip() == "active", 60)


def test_nodes_restart_under_load_without_a_failed_request(machine: Machine) -> None:
    units = [f"mooncake-{role}@{node}" for node in "ab" for role in ("messenger",)]
    units += [f"mooncake-{role}@{node}-0" for node in "ab" for role in ("prefill", "decode")]
    before = {unit: machine.pid(unit) for unit in units}
    with Load(door=machine.door) as load:
        podman.until("requests are answered", lambda: load.answered > 3, 60)
        said = machine.run("mooncake-rolling-restart", timeout_s=400)
        answered = load.answered
        podman.until("requests are answered", lambda: load.answered > answered + 3, 60)
    assert load.failures == []
    assert [unit for unit in units if machine.pid(unit) == before[unit]] == []
    assert [line for line in said.splitlines() if line.endswith(": back")] == ["a: back", "b: back"]


def test_conductor_and_gateways_follow_when_asked(machine: Machine) -> None:
    units = ("mooncake-prefill@b-0", "mooncake-conductor@0", "mooncake-gateway@a")
    before = {unit: machine.pid(unit) for unit in units}
    machine.run("mooncake-rolling-restart --all b", timeout_s=400)
    assert [unit for unit in units if machine.pid(unit) == before[unit]] == []
    podman.until("the mesh is ready", machine.door.is_ready, 60)
    assert machine.door.chat("Is everybody back?")["usage"]["completion_tokens"] == 8


def test_the_target_stops_in_order(machine: Machine) -> None:
    """Whoever takes requests first, the conductor last."""
    stages = (
        ["mooncake-gateway@a"],
        [f"mooncake-{role}@{node}-0" for node in "ab" for role in ("prefill", "decode")],
        ["mooncake-messenger@a", "mooncake-messenger@b"],
        ["mooncake-conductor@0"],
    )
    machine.stop()
    ended_us = [[machine.ended_us(unit) for unit in stage] for stage in stages]
    for earlier, later in pairwise(ended_us):
        assert max(earlier) <= min(later)


def test_nodes_with_addresses_talk_with_keys(machine: Machine) -> None:
    """As on two machines: prefill on one address, decoding on another, and CURVE between them."""
    keys = "/opt/mooncake/bin/mooncake keys"
    machine.stop()
    machine.run(f"{keys} init --keys /root/mesh --name a")
    api_key = machine.run(f"{keys} api add app --tenant acme --keys /root/mesh 2>/dev/null").strip()
    install = "/deploy/install --keys /root/mesh"
    machine.run(f"{install} --node a --prefill 1 --gateway --conductor here --address 127.0.0.1")
    machine.run(f"{install} --node b --decode 1 --conductor 127.0.0.1 --address 127.0.0.2")
    machine.run("systemctl start mooncake.target", timeout_s=240)
    podman.until("the mesh is ready", machine.door.is_ready, 60)
    units = machine.run(
        "systemctl list-units --plain --no-legend 'mooncake-prefill@*' 'mooncake-decode@*'"
    ).splitlines()
    assert [unit.split()[0] for unit in units] == ["mooncake-decode@b-0.service", "mooncake-prefill@a-0.service"]
    assert machine.door.status_of("/v1/models") == 401
    door = Door(url=machine.door.url, api_key=api_key)
    assert door.chat("Who is on the other machine?")["usage"]["completion_tokens"] == 8
