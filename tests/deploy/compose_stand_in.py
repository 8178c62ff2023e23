"""``docker compose`` where there is neither Docker nor a registry: podman-compose, over the image of these tests.

    python -m tests.deploy.compose_stand_in up --detach --build --scale prefill=2

Run in a checkout with an ``.env``; HTTP_PORT and SDK_PORT of the environment win. What is not as with Docker: the base
image comes from Debian's packages, engines are fake and arenas small (an image without torch), nobody runs the health
checks, and ``down`` takes the volumes along. Exit code 3, with the reason, where this machine cannot run containers.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.deploy import podman

PROJECT: Final = "mooncake-newcomer"
_SERVICES: Final = ("conductor", "gateway", "messenger-prefill", "messenger-decode", "prefill", "decode")
_SETTINGS_FILE: Final = ".env.stand-in"
_OVERRIDE: Final = ".compose.stand-in.json"
_NO_HEALTH_CHECK: Final = {"healthcheck": {"disable": True}}  # podman runs them by systemd, which may not be there
_SETTINGS: Final = {
    "IMAGE": podman.IMAGE,
    "ENGINE": "fake",
    "MODEL": "fake",
    "ARENA_BYTES": "32MiB",
    "SSD_BYTES": "32MiB",
}


def main(argv: Sequence[str]) -> int:
    compose = podman.tool("podman-compose")
    reason = podman.lacking() or ("needs podman-compose (scripts/test-deploy installs it)" if compose is None else None)
    if reason is None and "--build" in argv:
        reason = podman.unable()
    if reason is not None:
        print(reason)  # noqa: T201
        return podman.CANNOT
    if "--build" in argv:
        podman.build_image()
    folder = Path.cwd()
    write_files(folder, argv)
    command = translated(compose or "", argv, folder)
    return subprocess.run(command, env=podman.environment(), check=False).returncode


def write_files(folder: Path, argv: Sequence[str]) -> None:
    """What podman-compose reads. Later commands have to know of a ``--scale``: they would leave an instance behind."""
    (folder / _OVERRIDE).write_text(json.dumps({"services": dict.fromkeys(_SERVICES, _NO_HEALTH_CHECK)}))
    settings = folder / _SETTINGS_FILE
    if settings.exists() and argv[0] != "up":
        return
    ports = {name: os.environ[name] for name in ("HTTP_PORT", "SDK_PORT") if name in os.environ}
    scales = (word.split("=") for flag, word in itertools.pairwise(argv) if flag == "--scale")
    replicas = {f"{service.upper()}_REPLICAS": number for service, number in scales}
    changed = {**_SETTINGS, **ports, **replicas}
    settings.write_text((folder / ".env").read_text() + "".join(f"{name}={value}\n" for name, value in changed.items()))


def translated(compose: str, argv: Sequence[str], folder: Path) -> list[str]:
    """What does as ``docker compose ARGV`` would."""
    action, *rest = argv
    if action == "exec":
        service, *inside = rest
        return ["podman", "exec", f"{PROJECT}_{service}_1", *inside]
    files = [f"--file={path}" for path in (folder / "docker-compose.yml", folder / _OVERRIDE)]
    head = [compose, f"--env-file={folder / _SETTINGS_FILE}", f"--project-name={PROJECT}", *files, action]
    if action == "up":
        words = " ".join(word for word in rest if word != "--build").replace("--scale ", "--scale=").split()
        return [*head, "--no-build", *words]
    return [*head, "--volumes", *rest] if action == "down" else [*head, *rest]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
