"""A part of `python -m bench.faults` that fits into every test run: each process, each stage, kill and restart.

The whole matrix, with SIGSTOP for ten seconds, is run on demand (docs/faults.md).
"""

from collections.abc import Iterator

import pytest

from bench.fault_matrix import Cell, Fault, Target, run_cell
from bench.fault_mesh import Books, fault_mesh
from bench.fault_stages import Stage
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

CELLS = [
    Cell(target=Target.CONDUCTOR, fault=Fault.RESTART, stage=Stage.PLACING),
    Cell(target=Target.DECODE_MESSENGER, fault=Fault.KILL, stage=Stage.PREFIX),
    Cell(target=Target.PREFILL, fault=Fault.RESTART, stage=Stage.QUEUED),
    Cell(target=Target.PREFILL, fault=Fault.KILL, stage=Stage.BETWEEN_CHUNKS),
    Cell(target=Target.PREFILL_MESSENGER, fault=Fault.RESTART, stage=Stage.TRANSFER),
    Cell(target=Target.DECODE, fault=Fault.KILL, stage=Stage.DECODING),
    Cell(target=Target.GATEWAY, fault=Fault.RESTART, stage=Stage.DECODING),
    Cell(target=Target.DECODE, fault=Fault.KILL, stage=Stage.FINISHING),
]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with fault_mesh() as mesh:
        yield mesh


@pytest.fixture(scope="module")
def books(mesh: Mesh) -> Books:
    """Field report P24: counters and descriptors that leak one for each loss are seen (vllm-project/router#215)."""
    books = Books(mesh)
    books.open()
    return books


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(len(CELLS)), ids=[str(cell) for cell in CELLS])
def test_nothing_is_lost_and_nothing_is_left(mesh: Mesh, books: Books, number: int) -> None:
    outcome = run_cell(mesh, books, CELLS[number], "#" * number)
    assert outcome.violations == []
    assert outcome.ends.total() >= 2
