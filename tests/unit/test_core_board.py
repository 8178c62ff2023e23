"""Instances of one machine share its cores by a board."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


class Sharing:
    """Two places on the board of two cores; each pause of the first one takes a millisecond, and then *pause* is
    called."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.pauses = 0
        self.pause: Callable[[], object] = lambda: None
        self.one = CoreBoard(path, 2, n_cores=2, now_ns=self.clock.now_ns, sleep=self._sleep)
        self.other = CoreBoard(path, 2, n_cores=2, now_ns=self.clock.now_ns, sleep=self._sleep)
        self.other._slot = self.one._slot + 1  # locks are a process's

    def _sleep(self, _: float) -> None:
        self.pauses += 1
        self.clock.s += 0.001
        self.pause()


@pytest.fixture
def sharing(path: Path) -> Iterator[Sharing]:
    made = Sharing(path)
    yield made
    made.one.close()
    made.other.close()


def test_cores_are_contended_while_others_compute(sharing: Sharing) -> None:
    one, other = sharing.one, sharing.other
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


def test_who_begins_waits_until_the_other_has_looked_again(sharing: Sharing) -> None:
    assert sharing.other.begin() == 2
    sharing.pause = lambda: sharing.pauses == 3 and sharing.other.begin()
    assert sharing.one.begin() == 1
    assert sharing.pauses == 3, "the other has one thread since then"
    assert (sharing.one.begin(), sharing.other.begin()) == (1, 1)
    assert sharing.pauses == 3, "in a forward nobody waits"


@pytest.mark.parametrize("how", ["end", "rest"])
def test_who_has_done_is_not_waited_for(how: str, sharing: Sharing) -> None:
    sharing.other.begin()
    getattr(sharing.other, how)()
    assert sharing.one.begin() == (1 if how == "end" else 2)
    assert sharing.pauses == 0


def test_one_that_was_stopped_is_waited_for_a_moment_only(sharing: Sharing) -> None:
    sharing.other.begin()
    assert sharing.one.begin() == 1
    assert sharing.pauses == 20
    sharing.one.end()
    sharing.clock.s += 5.1  # what it wrote expires
    assert sharing.one.begin() == 2
    assert sharing.pauses == 20


def test_nobody_waits_for_those_with_their_share(path: Path) -> None:
    """More instances than cores have one thread each."""
    clock, pauses = Clock(), list[float]()
    board = CoreBoard(path, 2, n_cores=2, now_ns=clock.now_ns, sleep=pauses.append)
    for slot in range(1, 5):
        board._marks[slot], board._threads[slot] = clock.now_ns() + 1, 1
    assert board.begin() == 1
    assert pauses == []
    board.close()


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=r"no board of cores at .*missing/cores: .*No such file"):
        CoreBoard(tmp_path / "missing" / "cores", 2)
