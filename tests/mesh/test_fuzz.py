"""A few rounds of bench.fuzz: nothing that a stranger or a broken peer sends ends, breaks or changes a process."""

from pathlib import Path

import pytest

from bench.fuzz import GROWTH_MIB, FuzzRun, fuzz_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(180)]

_ROUNDS = 4


def test_mutated_messages_bytes_and_requests_leave_the_mesh_as_it_was(tmp_path: Path) -> None:
    with fuzz_mesh(tmp_path) as mesh:
        run = FuzzRun(mesh, "test")
        run.begin()
        for number in range(_ROUNDS):
            run.round(number)
            if not number:
                run.take_memory()
        run.end(growth_mib=GROWTH_MIB)
        assert run.violations == []
        assert run.counts["messages"] >= _ROUNDS * 500
        assert {"malformed_message", "unknown_kind", "version_mismatch", "Ok", "HTTP 200", "HTTP 400"} <= set(
            run.answers
        )
