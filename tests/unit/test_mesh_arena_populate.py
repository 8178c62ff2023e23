"""An arena's memory is made ready ahead of its use: what that does to real memory, and what it must not do."""

import errno
import mmap
import os
import platform
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from mooncake_mesh.config import CommitKind, PagesKind
from mooncake_mesh.mesh import arena_populate
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.arena_populate import PIECE_BYTES, THREAD_NAME, Advice, madvise, populate

SIZE_BYTES = 3 * PIECE_BYTES + 4096
NEVER = threading.Event()


def knows_populate() -> bool:
    """Whether the kernel is 5.14 or later."""
    arena = new_arena(CommitKind.USE)
    try:
        return populate(arena.view, Advice.MAP, NEVER) == SIZE_BYTES
    finally:
        arena.close()


def new_arena(commit: CommitKind, size_bytes: int = SIZE_BYTES) -> Arena:
    return Arena.create(size_bytes, PagesKind.SMALL, commit)


def mapped_again(arena: Arena, commit: CommitKind, protection: int) -> Arena:
    """As another process does it."""
    return Arena(os.dup(arena.fd), arena.size_bytes, pages=arena.pages, commit=commit, protection=protection)


def committed_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def mapped_bytes(arena: Arena) -> int:
    """How much of the arena stands in this mapping's page tables."""
    start = f"{np.frombuffer(arena.view, np.uint8).ctypes.data:x}-"
    smaps = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(start) for line in smaps), "a mapping of its own"
    return 1024 * next(int(line.split()[1]) for line in smaps if line.startswith("Rss:"))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


def all_ready() -> None:
    for thread in threads():
        thread.join(timeout=30.0)
    assert threads() == []


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


needs_populate = pytest.mark.skipif(not knows_populate(), reason="a kernel before Linux 5.14")
writable = mmap.PROT_READ | mmap.PROT_WRITE


@needs_populate
def test_from_the_start_on_all_memory_is_there() -> None:
    arena = new_arena(CommitKind.START)
    all_ready()
    assert committed_bytes(arena) == mapped_bytes(arena) == SIZE_BYTES
    assert not any(arena.view), "memory starts as zeros"
    arena.close()


def test_on_use_memory_comes_page_by_page() -> None:
    arena = new_arena(CommitKind.USE)
    other = mapped_again(arena, arena.commit, writable)
    assert threads() == []
    assert committed_bytes(arena) == 0
    other.view[0] = 1
    assert committed_bytes(arena) == mapped_bytes(other) == mmap.PAGESIZE
    other.close()
    arena.close()


@needs_populate
@pytest.mark.parametrize("owner", CommitKind)
@pytest.mark.parametrize("protection", [writable, mmap.PROT_READ])
def test_who_attaches_has_its_page_tables_filled_whether_the_owner_is_done_or_not(
    owner: CommitKind, protection: int
) -> None:
    arena = new_arena(owner)
    arena.view[5] = 7
    other = mapped_again(arena, CommitKind.START, protection)
    all_ready()
    assert mapped_bytes(other) == committed_bytes(arena) == SIZE_BYTES
    assert other.view[5] == 7
    other.close()
    arena.close()


@needs_populate
@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere the first write may be a fault")
def test_a_page_that_was_only_mapped_is_written_without_a_fault() -> None:
    """Else ``MAP`` would not do for those who write."""
    arena = new_arena(CommitKind.START)
    other = mapped_again(arena, CommitKind.START, writable)
    all_ready()
    bytes_of = np.frombuffer(other.view, np.uint8)
    before = faults()
    bytes_of[:: mmap.PAGESIZE] += 1
    assert faults() - before < SIZE_BYTES // mmap.PAGESIZE // 10
    del bytes_of
    other.close()
    arena.close()


def faults() -> int:
    """Minor page faults of this thread so far."""
    return int(Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()[7])


def test_what_is_written_meanwhile_stays() -> None:
    shuffled = random.Random(3)
    for _ in range(5):
        arena = new_arena(CommitKind.START, 16 * PIECE_BYTES)
        other = mapped_again(arena, CommitKind.START, writable)
        pattern = np.frombuffer(shuffled.randbytes(arena.size_bytes), np.uint8)
        blocks = list(range(0, arena.size_bytes, PIECE_BYTES // 4))
        shuffled.shuffle(blocks)
        for number, start in enumerate(blocks):
            memory = np.frombuffer((arena if number % 2 else other).view, np.uint8)
            memory[start : start + PIECE_BYTES // 4] = pattern[start : start + PIECE_BYTES // 4]
            del memory
        all_ready()
        assert bytes(arena.view) == bytes(other.view) == pattern.tobytes()
        other.close()
        arena.close()


def test_an_arena_may_be_closed_at_any_time() -> None:
    shuffled = random.Random(5)
    for _ in range(100):
        arena = new_arena(CommitKind.START, 8 * PIECE_BYTES)
        other = mapped_again(arena, CommitKind.START, mmap.PROT_READ)
        for page in range(shuffled.randrange(64)):
            arena.view[page * mmap.PAGESIZE] = 1
        other.close()
        arena.close()
        assert threads() == []


class Kernel:
    """A stand-in for madvise that is held up in its first call until it is let go on."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Advice]] = []
        self.entered, self.may_return = threading.Event(), threading.Event()

    def madvise(self, _: int, size_bytes: int, advice: Advice) -> None:
        self.calls.append((size_bytes, advice))
        self.entered.set()
        assert self.may_return.wait(30.0)


def test_closing_waits_for_the_piece_under_way_and_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(arena_populate, "madvise", kernel.madvise)
    arena = new_arena(CommitKind.START)
    assert kernel.entered.wait(30.0)
    closing = threading.Thread(target=arena.close)
    closing.start()
    (worker,) = threads()
    assert arena._populating is not None
    assert arena._populating._stopping.wait(30.0)
    assert closing.is_alive(), "the memory must not go while the kernel works on it"
    arena.view[0] = 1
    kernel.may_return.set()
    closing.join(30.0)
    assert not worker.is_alive()
    assert kernel.calls == [(PIECE_BYTES, Advice.COMMIT)]


def test_memory_in_use_is_not_unmapped_and_can_be_later() -> None:
    arena = new_arena(CommitKind.START)
    block = arena.view[:10]
    with pytest.raises(BufferError):
        arena.close()
    block.release()
    arena.close()


def test_pieces_cover_the_memory_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    kernel.may_return.set()
    monkeypatch.setattr(arena_populate, "madvise", kernel.madvise)
    arena = new_arena(CommitKind.USE)
    assert populate(arena.view, Advice.MAP, NEVER) == SIZE_BYTES
    assert kernel.calls == [(PIECE_BYTES, Advice.MAP)] * 3 + [(4096, Advice.MAP)]
    stopped = threading.Event()
    stopped.set()
    assert populate(arena.view, Advice.MAP, stopped) == 0
    arena.close()


def test_a_kernel_that_cannot_do_it_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int, __: int, ___: Advice) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(arena_populate, "madvise", unknown)
    with capture_logs() as events:
        arena = new_arena(CommitKind.START)
        all_ready()
    assert [event["log_level"] for event in events] == ["debug"]
    arena.view[-1] = 3
    assert arena.view[-1] == 3
    arena.close()


def test_memory_that_the_system_does_not_have_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    given = iter(range(2))

    def scarce(_: int, __: int, ___: Advice) -> None:
        if next(given, None) is None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(arena_populate, "madvise", scarce)
    arena = new_arena(CommitKind.USE)
    with capture_logs() as events:
        assert populate(arena.view, Advice.COMMIT, NEVER) == 2 * PIECE_BYTES
    (warning,) = events
    assert warning["log_level"] == "warning"
    assert (warning["committed_bytes"], warning["size_bytes"]) == (2 * PIECE_BYTES, SIZE_BYTES)
    assert "on use" in warning["outlook"]
    arena.close()


@needs_populate
@pytest.mark.parametrize("advice", Advice)
def test_the_kernels_own_refusal_is_warned_of(advice: Advice) -> None:
    arena = new_arena(CommitKind.USE)
    os.ftruncate(arena.fd, PIECE_BYTES)
    with capture_logs() as events:
        assert populate(arena.view, advice, NEVER) == PIECE_BYTES
    assert [event["log_level"] for event in events] == ["warning"]
    os.ftruncate(arena.fd, SIZE_BYTES)
    arena.close()


def test_errors_of_the_kernel_are_raised() -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        madvise(mmap.PAGESIZE, mmap.PAGESIZE, Advice.MAP)  # where nothing is mapped
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        madvise(mmap.PAGESIZE + 1, mmap.PAGESIZE, Advice.MAP)
