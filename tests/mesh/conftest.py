"""Meshes for tests, and the logs of their processes where a test fails."""

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.mesh.browser import lacking
from tests.mesh.fork_server import REAL_MODULES, ForkServer
from tests.mesh.harness import Mesh

_MOST_S: Final = 150.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of a mesh has longer than others, or what it says it needs: each of its waits has half a minute, and tells
    what did not come."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_MOST_S))


@pytest.fixture(autouse=True, scope="session")
def _forks_fake_meshes() -> Iterator[None]:
    """One process that outlives the meshes, and so is not among what they must leave clean."""
    with ForkServer() as server:
        Mesh.fork_servers["fake"] = server
        yield
        del Mesh.fork_servers["fake"]


@pytest.fixture(scope="session")
def _forks_real_meshes() -> Iterator[None]:
    """The same for meshes of the real engine, whose imports take longest."""
    with ForkServer(*REAL_MODULES) as server:
        Mesh.fork_servers["transformers"] = server
        yield
        del Mesh.fork_servers["transformers"]


@pytest.fixture(scope="module")
def fake_mesh() -> Iterator[Mesh]:
    """One mesh of fake engines for all tests of a module that do it no lasting harm."""
    with Mesh() as mesh:
        yield mesh


@pytest.fixture
def own_mesh() -> Iterator[Mesh]:
    """A mesh of fake engines for one test alone."""
    with Mesh() as mesh:
        yield mesh


@pytest.fixture(scope="session")
def chromium() -> None:
    """Skips where no browser starts."""
    reason = lacking()
    if reason is not None:
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for mesh in Mesh.alive:
            report.sections.append((f"last events of the mesh in {mesh.folder}", mesh.last_events()))
    return report
