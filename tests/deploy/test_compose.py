"""docker-compose.yml for real: brought up by podman-compose, used, hurt and taken down."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy import podman
from tests.deploy.mesh_door import Door

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]

_PROJECT = "mooncake-test"
_SERVICES = ("conductor", "gateway", "messenger-prefill", "messenger-decode", "prefill", "decode")


class Stack:
    """The compose project, scaled to two prefill instances."""

    def __init__(self, compose: str, folder: Path) -> None:
        self._port = _free_port()
        settings = folder / "env"
        settings.write_text(
            "COMPOSE_PROFILES=cpu\nENGINE=fake\nMODEL=fake\nARENA_BYTES=32MiB\nSSD_BYTES=32MiB\nPREFILL_REPLICAS=2\n"
            f"IMAGE={podman.IMAGE}\nHTTP_PORT={self._port}\nSDK_PORT={_free_port()}\n"
        )
        files = [podman.REPOSITORY / "docker-compose.yml"]
        if not Path("/run/systemd/private").exists():  # podman's clock for health checks; the test asks by itself
            files.append(folder / "no-health-checks.json")
            files[-1].write_text(
                json.dumps({"services": {name: {"healthcheck": {"disable": True}} for name in _SERVICES}})
            )
        given = [f"--file={file}" for file in files]
        self._compose = (compose, f"--env-file={settings}", f"--project-name={_PROJECT}", *given)

    def up(self) -> None:
        podman.run(*self._compose, "up", "--detach", "--no-build", "--scale=prefill=2", timeout_s=240)
        podman.until("the mesh is ready", Door(url=self.url).is_ready, 120)

    def down(self) -> None:
        podman.run(*self._compose, "down", "--volumes", timeout_s=240)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def door(self) -> Door:
        return Door(url=self.url, api_key=self.inside("gateway", "cat", "/keys/api-key"))

    def inside(self, service: str, *command: str, number: int = 1) -> str:
        return podman.output_of("exec", f"{_PROJECT}_{service}_{number}", *command)

    def kill(self, service: str) -> None:
        """As the kernel does when memory is short."""
        os.kill(int(podman.output_of("inspect", "--format={{.State.Pid}}", f"{_PROJECT}_{service}_1")), signal.SIGKILL)

    def members(self) -> dict[str, str]:
        """Health by instance, of those that the conductor knows."""
        asked = ("status", "--json", "--conductor=tcp://conductor:7700", "--keys=/keys/mesh")
        listed = podman.podman("exec", f"{_PROJECT}_gateway_1", "mooncake", *asked, check=False)
        report = json.loads(listed[listed.index("{") :])
        return {member["member"]["instance_id"]: member["health"] for member in report["cluster"]["members"]}


@pytest.fixture(scope="module")
def stack(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    compose = podman.tool("podman-compose")
    if compose is None:
        pytest.skip("needs podman-compose (scripts/test-deploy installs it)")
    running = Stack(compose, tmp_path_factory.mktemp("compose"))
    try:
        running.up()
        yield running
    finally:
        running.down()
    kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
    assert [left for kind in kinds if _PROJECT in (left := podman.output_of(*kind))] == []


def test_a_chat_is_answered_over_tcp_with_keys(stack: Stack) -> None:
    door = stack.door()
    question = "What is a KVCache, and who holds it while a conversation goes on?"
    first, second = door.chat(question), door.chat(question)
    assert first["usage"]["completion_tokens"] == 8
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_strangers_are_not_let_in(stack: Stack) -> None:
    door = Door(url=stack.url)
    assert door.status_of("/health") == 200
    assert door.status_of("/v1/models") == 401
    assert door.status_of("/metrics") == 401


def test_a_scaled_service_has_two_instances(stack: Stack) -> None:
    def n_alive() -> int:
        return sum(name.startswith("prefill-") and health == "alive" for name, health in stack.members().items())

    podman.until("two instances are alive", lambda: n_alive() == 2, 60)


def test_every_service_passes_its_health_check(stack: Stack) -> None:
    for service in _SERVICES:
        stack.inside(service, "healthcheck", service.split("-")[0])


def test_prometheus_has_a_key_of_its_own(stack: Stack) -> None:
    """In a volume that it can read, and that holds nothing else."""
    mount = podman.output_of("volume", "inspect", "--format={{.Mountpoint}}", f"{_PROJECT}_metrics-key")
    assert [path.name for path in Path(mount).iterdir()] == ["api-key"]
    key = Path(mount, "api-key")
    assert key.stat().st_mode & 0o004
    door = Door(url=stack.url, api_key=key.read_text().strip())
    assert "mooncake_placements_total" in door.get("/metrics")


@pytest.mark.parametrize("service", ["decode", "messenger-prefill", "conductor"])
def test_a_killed_process_comes_back(stack: Stack, service: str) -> None:
    incarnation = stack.inside(service, "healthcheck", service.split("-")[0])
    stack.kill(service)

    def is_back() -> bool:
        said = podman.podman("exec", f"{_PROJECT}_{service}_1", "healthcheck", service.split("-")[0], check=False)
        return "incarnation=" in said and incarnation not in said

    podman.until(f"{service} is back", is_back, 60)
    podman.until("the mesh is ready", Door(url=stack.url).is_ready, 60)
    podman.until("a chat is answered", lambda: stack.door().answers(f"Is {service} back?"), 60)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
