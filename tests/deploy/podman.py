"""Containers for tests, without a registry and beside whatever else runs on the machine.

Images, containers and networks lie in a folder of their own, ``mooncake-deploy`` in the user's cache folder; nothing in
``/etc/containers`` is read for that or changed. The base image is made once from Debian's packages, with this machine's
certificates and pip settings, so that an image can be built wherever pip works.

    python -m tests.deploy.podman    makes the images; exit code 3, with the reason, where containers cannot run
"""

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
BASE: Final = "localhost/mooncake-base:bookworm"
IMAGE: Final = "localhost/mooncake-mesh:test"
CANNOT: Final = 3
"""Exit code for where containers cannot be run."""
_PACKAGES: Final = "python3,python3-venv,systemd,systemd-sysv,dbus,ca-certificates"
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mooncake-deploy"
_STORAGE: Final = f"""\
[storage]
driver = "overlay"
runroot = "/run/mooncake-deploy/storage"
graphroot = "{_CACHE}/graph"
"""
# The kernel of a small virtual machine may allow neither systemd's cgroups nor higher limits than these.
_CONTAINERS: Final = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
cgroups = "enabled"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[network]
network_backend = "netavark"
"""
_BUILD_S: Final = 1500.0
_CALL_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.3


def lacking() -> str | None:
    """Why no containers can be run here, if so; MOONCAKE_NO_CONTAINERS has the reason of somebody who knows already."""
    if known := os.environ.get("MOONCAKE_NO_CONTAINERS"):
        return known
    if os.geteuid() != 0:
        return "needs root: containers get networks of their own"
    programs = ("podman", "runc", "debootstrap", "iptables", "/usr/lib/podman/netavark", "/usr/lib/podman/aardvark-dns")
    missing = [Path(name).name for name in programs if shutil.which(name) is None]
    if missing:
        return f"needs the packages {' '.join(missing)} (scripts/test-deploy --install)"
    return None


def unable() -> str | None:
    """Why no containers can be run here, if so, found out by running one. Makes the base image where there is none."""
    reason = lacking()
    if reason is not None:
        return reason
    try:
        _write_settings()
        if subprocess.run(("podman", "image", "exists", BASE), env=environment()).returncode != 0:
            _make_base()
        podman("run", "--rm", BASE, "true")
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return f"containers do not run here: {str(error).strip().splitlines()[-1]}"
    return None


def environment() -> dict[str, str]:
    """For podman and podman-compose."""
    return os.environ | {
        "CONTAINERS_STORAGE_CONF": str(_CACHE / "storage.conf"),
        "CONTAINERS_CONF": str(_CACHE / "containers.conf"),
    }


def run(*command: str, timeout_s: float = _CALL_S, check: bool = True, **more: Any) -> str:
    """The output of a command. Raises AssertionError with it where *check* asks for success and there is none."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        **more,
    )
    assert done.returncode == 0 or not check, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def podman(*arguments: str, timeout_s: float = _CALL_S, check: bool = True) -> str:
    return run("podman", *arguments, timeout_s=timeout_s, check=check)


def output_of(*arguments: str) -> str:
    """What ``podman`` says on stdout, without its complaints."""
    return subprocess.run(
        ("podman", *arguments), env=environment(), capture_output=True, timeout=_CALL_S, text=True, check=True
    ).stdout.strip()


def build_image() -> None:
    """IMAGE from the Dockerfile, without torch: a mesh of fake engines is all that the tests run. Needs BASE."""
    made_of = _content()
    label = '{{index .Labels "made-of"}}'
    if podman("image", "inspect", f"--format={label}", IMAGE, check=False).strip().endswith(made_of):
        return
    arguments = [f"--label=made-of={made_of}"]
    arguments += [f"--build-arg={name}" for name in (f"BASE_IMAGE={BASE}", "EXTRAS=", "MODEL_PACKAGE=", "COMPILER=")]
    build = ("nice", "podman", "build", "--isolation=chroot", "--network=host", f"--tag={IMAGE}", *arguments)
    run(*build, str(REPOSITORY), timeout_s=_BUILD_S)


def _write_settings() -> None:
    _CACHE.mkdir(parents=True, exist_ok=True)
    (_CACHE / "storage.conf").write_text(_STORAGE)
    (_CACHE / "containers.conf").write_text(_CONTAINERS)


def _content() -> str:
    """Digest of what the image is made of."""
    digest = hashlib.sha256()
    paths = [REPOSITORY / name for name in ("Dockerfile", "pyproject.toml", "constraints.txt")]
    for folder in ("services", "proto", "deploy/compose"):
        paths += sorted(path for path in (REPOSITORY / folder).rglob("*") if path.is_file() and path.suffix != ".pyc")
    for path in paths:
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _make_base() -> None:
    root = _CACHE / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    bootstrap = ("nice", "debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root))
    run(*bootstrap, timeout_s=_BUILD_S)
    for path in (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pip.conf")):
        if path.exists():
            shutil.copyfile(path, root / path.relative_to("/"))
    for archive in (root / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    run("sh", "-c", f"tar -C {root} -c . | podman import - {BASE}", timeout_s=_BUILD_S)
    shutil.rmtree(root)


def until(what: str, holds: Callable[[], object], timeout_s: float) -> None:
    """Ask until *holds* says yes. Raises AssertionError that names *what* never came."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(_LOOK_EVERY_S)


def tool(name: str) -> str | None:
    """A program of the environment that the tests run in, or of the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def main() -> int:
    reason = unable()
    if reason is not None:
        print(reason)  # noqa: T201
        return CANNOT
    build_image()
    return 0


if __name__ == "__main__":
    sys.exit(main())
