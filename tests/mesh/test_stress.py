"""Real messengers under work and harm for a minute: what is read is what was put, and nothing stays held."""

from collections.abc import Iterator

import pytest
import uvloop
import zmq

from bench.stress import stress

pytestmark = pytest.mark.mesh

uvloop.new_event_loop().close()  # the first of a process makes a pipe that libuv keeps; it is no leak of the test

SECONDS = 60.0
SEED = "7"


@pytest.fixture(autouse=True, scope="module")
def _context() -> Iterator[None]:
    """This process plays clients and workers: its own context goes with them."""
    yield
    zmq.Context.instance().term()


@pytest.mark.timeout(300)
def test_a_minute_of_work_and_harm() -> None:
    """Not a byte is wrong, and the run is worth something: each kind of work succeeded, each kind of harm was done."""
    result, report = stress(SECONDS, SEED)
    assert result.violations == [], "\n".join([report, *result.violations])
    for outcome in ("put: done", "get: all found", "get from another node: all found", "transfer: done / done"):
        assert result.outcomes.get(outcome, 0) >= 10, f"{outcome}: {result.outcomes}"
    assert result.counts["  blocks found on SSD by audits"] >= 10
    assert result.counts["audits"] >= 1
    for fault in ("kill -9", "SIGSTOP", "a worker dies", "bytes flipped in the block file", "writes fail"):
        assert result.counts.get(f"fault: {fault}", 0) >= 1, f"{fault}: {result.counts}"
