"""The harness itself: a mesh comes up, answers, tells what it does, and goes without a trace."""

import pytest

from tests.mesh import clients
from tests.mesh.harness import Mesh, Start

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("start", Start, ids=lambda start: start.name)
def test_a_mesh_comes_up_answers_and_stops(start: Start) -> None:
    with Mesh(start=start) as mesh:
        assert clients.complete(mesh.http, "hello mesh", 20) == clients.expected_text("hello mesh", 20)
        assert mesh.wait_log("prefill0", "prefill_sent")["sent_bytes"] > 0
        folder = mesh.folder
    assert Mesh.alive == []
    assert not folder.exists()
