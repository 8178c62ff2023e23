"""Steps that wait for sequences on their way, on a live mesh: the test is the other one that computes on its cores.

A prompt token takes the prefill instance 20 ms, so prompts land one after the other. Short ones lie in one block with
their answers, so that nobody stands still to grow.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mooncake_mesh.mesh.core_board import CoreBoard
from mooncake_proto.control import Load, Role
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

TOKENS = 6
FOREVER_S = 1000


@dataclass(frozen=True)
class Site:
    mesh: Mesh
    board: CoreBoard

    def load(self) -> Load:
        return next(s.load for s in self.mesh.status().cluster.members if s.member.role is Role.DECODE)

    def wait_queued(self, n_jobs: int) -> None:
        """Until the decode instance has told that so many wait for their KV."""
        self.mesh.wait(lambda: self.load().queued_jobs == n_jobs or None, what=f"{n_jobs} jobs to wait")


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("board") / "cores"
    board = CoreBoard(path, 1, now_ns=lambda: time.monotonic_ns() + 60 * 10**9)  # a mark outlasts the test
    flags = {
        "prefill": ["--fake-prefill-s-per-token=0.02"],
        "decode": [f"--core-board={path}", f"--forming-s={FOREVER_S}"],
    }
    with Mesh(flags=flags) as mesh:
        yield Site(mesh, board)
    board.close()


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    started.mesh.wait_healthy()
    started.mesh.wait_idle()
    started.board.begin()
    yield started
    started.board.rest()


def test_two_that_come_together_are_decoded_together_from_the_first_step_on(site: Site) -> None:
    before = site.load().steps
    prompts = ["earlier", "later"]
    site.mesh.stop("prefill0")
    with Stream(site.mesh.http, prompts[0], TOKENS) as one, Stream(site.mesh.http, prompts[1], TOKENS) as other:
        site.wait_queued(2)
        site.mesh.cont("prefill0")
        texts = [one.result(), other.result()]
    site.mesh.wait_idle()
    assert texts == [clients.expected_text(prompt, TOKENS) for prompt in prompts]
    assert site.load().steps - before == TOKENS - 1


def test_who_waits_goes_on_when_the_one_it_waits_for_leaves(site: Site) -> None:
    long = "one that takes the prefill instance long " * 6
    site.mesh.stop("prefill0")
    with Stream(site.mesh.http, "waits", TOKENS) as waits, Stream(site.mesh.http, long, TOKENS) as leaves:
        site.wait_queued(2)
        site.mesh.cont("prefill0")
        waits.wait_chunks(1)
        leaves.disconnect()
        assert waits.result() == clients.expected_text("waits", TOKENS)
    site.mesh.wait_idle()


def test_nobody_waits_while_no_other_computes(site: Site) -> None:
    site.board.rest()
    long = "one that takes the prefill instance long, and is not waited for " * 16
    site.mesh.stop("prefill0")
    with Stream(site.mesh.http, "goes on", TOKENS) as goes_on, Stream(site.mesh.http, long, TOKENS) as comes:
        site.wait_queued(2)
        site.mesh.cont("prefill0")
        assert goes_on.result() == clients.expected_text("goes on", TOKENS)
        assert comes.chunks == 0
        comes.disconnect()
    site.mesh.wait_idle()
