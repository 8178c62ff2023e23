"""Instances of one machine share its cores by a board."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_mesh.errors import MeshError
from mooncake_mesh.mesh import core_board
from mooncake_mesh.mesh.core_board import CoreBoard

OTHER_PROCESS = """
import sys, time
from pathlib import Path
from mooncake_mesh.mesh.core_board import CoreBoard
board = CoreBoard(Path(sys.argv[1]), 2, n_cores=2)
orders = {"begin": board.begin, "end": board.end}
for line in sys.stdin:
    before = time.monotonic()
    orders[line.strip()]()
    print(before, time.monotonic(), flush=True)
"""


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def now_ns(self) -> int:
        return int(self.s * 1e9)


class Other:
    """Another process with a place on the board. It computes, and ``last_s`` is when it has begun at the latest."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER_PROCESS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _, self.last_s = self.order("begin")

    def order(self, what: str) -> tuple[float, float]:
        """The moments before and after it did that, by the clock of the machine: either process may have stalled."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        before, after = self.process.stdout.readline().split()
        return float(before), float(after)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def test_who_is_alone_has_all_its_threads(path: Path) -> None:
    for most, n_cores, threads in ((1, 8, 1), (4, 8, 4), (8, 4, 4), (3, 1, 1), (0, 8, 8)):
        board = CoreBoard(path, most, n_cores=n_cores)
        assert board.threads == threads
        board.begin()
        assert board.threads == threads, "its own mark does not count"
        board.close()


def test_cores_that_are_taken_away_are_seen(path: Path) -> None:
    before = os.sched_getaffinity(0)
    board = CoreBoard(path, 0)
    assert board.threads == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert board.threads == 1
    finally:
        os.sched_setaffinity(0, before)
    assert board.threads == len(before)
    board.close()


def test_cores_are_divided_while_another_process_computes(path: Path) -> None:
    clock = Clock()
    board = CoreBoard(path, 2, n_cores=2, now_ns=clock.now_ns)
    other = Other(path)
    try:
        clock.s = other.last_s
        assert board.threads == 1
        clock.s, ended_s = other.order("end")
        assert board.threads == 1, "it may be between two steps"
        clock.s = ended_s + 0.05
        assert board.threads == 2
        clock.s, begun_s = other.order("begin")
        assert board.threads == 1
    finally:
        other.kill()
    assert board.threads == 1, "its mark is left"
    clock.s = begun_s + 5.1
    assert board.threads == 2
    board.close()


def test_a_dead_process_leaves_its_place_to_the_next(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_board, "SLOTS", 1)
    other = Other(path)
    with pytest.raises(MeshError, match=r"all 1 places on the board of cores at .* are taken"):
        CoreBoard(path, 2)
    other.kill()
    board = CoreBoard(path, 2, n_cores=2)
    board.end()
    assert board.threads == 2
    board.close()


@pytest.mark.parametrize(("computing", "threads"), [(0, 8), (1, 5), (2, 3), (3, 2), (4, 2), (9, 1), (20, 1)])
def test_everybody_gets_as_much(path: Path, computing: int, threads: int) -> None:
    """Of ten cores for at most eight threads. Locks are a process's, so here the others are marks only."""
    clock = Clock()
    board = CoreBoard(path, 8, n_cores=10, now_ns=clock.now_ns)
    for slot in range(1, computing + 1):
        board._marks[slot] = clock.now_ns() + 1
    assert board.threads == threads
    clock.s += 1
    assert board.threads == 8
    board.close()


def test_cores_are_contended_while_others_compute(path: Path) -> None:
    clock = Clock()
    one, other = (CoreBoard(path, 2, n_cores=2, now_ns=clock.now_ns) for _ in range(2))
    other._slot = one._slot + 1  # locks are a process's
    assert not one.is_contended
    one.begin()
    assert (one.is_contended, other.is_contended) == (False, True)
    other.begin()
    assert (one.is_contended, other.is_contended) == (True, True)
    one.end()
    assert other.is_contended, "it may be between two steps"
    one.rest()
    assert (one.is_contended, other.is_contended) == (True, False)
    assert other.threads == 2
    one.begin()
    assert other.threads == 1
    one.close()
    other.close()


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"no board of cores at .*missing/cores: .*No such file"):
        CoreBoard(tmp_path / "missing" / "cores", 2)
