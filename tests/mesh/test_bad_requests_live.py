"""The table of bad HTTP requests against a live gateway: the same answers as in the unit tests, and nothing is hurt."""

import pytest

from tests.mesh import clients
from tests.mesh.harness import Mesh
from tests.unit.bad_requests import BAD_REQUESTS, BadRequest

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("row", BAD_REQUESTS, ids=lambda row: row.name)
def test_a_bad_request_is_refused_and_the_next_one_is_answered(fake_mesh: Mesh, row: BadRequest) -> None:
    try:
        answer = clients.request(fake_mesh.http, row.method, row.path, row.body_for(fake_mesh.model), row.headers)
    except ConnectionError:  # the server answers 413 and closes before it has read the body: the answer may be lost
        assert row.status == 413
    else:
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (row.status, row.code, row.param), error
    assert clients.complete(fake_mesh.http, "next", 3) == clients.expected_text("next", 3)
