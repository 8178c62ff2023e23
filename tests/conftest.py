"""What every test shares: Hypothesis profiles, golden files, and a check that mesh tests leave nothing behind."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=300, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("nightly", max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") == "true" else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files from today's code")


@pytest.fixture(scope="session")
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For pytest-xdist with ``--dist loadgroup``: what belongs together runs in one worker, the longest groups first.

    A file is a group: its tests share fixtures. So are all tests of the real model: two models at once are too much
    for a small machine.
    """
    if not hasattr(config, "workerinput"):
        return
    groups = {
        item: "model" if item.get_closest_marker("model") else f"{item.path.parent.name}/{item.path.stem}"
        for item in items
    }
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (groups[item] != "model", "property" not in item.path.parts))


@pytest.fixture(autouse=True, scope="module")
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a module of mesh tests: no process, shared-memory name or descriptor that was not there before it.

    The module is the unit because its tests may share one running mesh and one client with open connections.
    """
    if "mesh" not in request.path.parts:
        yield
        return
    before = _processes(), _shm_names(), _descriptors()
    yield
    gc.collect()
    after = _processes(), _shm_names(), _descriptors()
    left = [found - known for found, known in zip(after, before, strict=True)]
    assert left == [set(), set(), set()], f"left behind (processes, shared memory, descriptors): {left}"


def _processes() -> set[psutil.Process]:
    """This process's running descendants. Not their command lines: one that has just been started has none yet."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # ended while we looked
            if child.status() != psutil.STATUS_ZOMBIE:
                found.add(child)
    return found


def _shm_names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "mooncake" in path.name}


def _descriptors() -> set[str]:
    """This process's open sockets, pipes, event queues and memory files."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            target = os.readlink(link)
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/dev/shm/", "/memfd:")):
                found.add(f"{link.name} {target}")
    return found
