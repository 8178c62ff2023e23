"""Meshes for tests, and the logs of their processes where a test fails."""

from collections.abc import Generator, Iterator

import pytest

from tests.mesh.harness import Mesh


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for mesh in Mesh.alive:
            report.sections.append((f"last events of the mesh in {mesh.folder}", mesh.last_events()))
    return report
