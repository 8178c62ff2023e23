"""What an arena is made of: what was asked for by name, or the best there is."""

import errno
import os
from pathlib import Path

import pytest

from mooncake_mesh.config import CommitKind, PagesKind
from mooncake_mesh.errors import MeshError
from mooncake_mesh.mesh import arena_memory
from mooncake_mesh.mesh.arena_memory import HUGE_PAGE_BYTES, Arena, free_huge_pages, is_thp_willing

SIZE_BYTES = (2 << 20) + 4096


def no_reserved_pages(size_bytes: int) -> int:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def made_to_measure(size_bytes: int) -> int:
    """As :func:`_huge_file`, of ordinary pages."""
    fd = os.memfd_create("test-arena")
    os.ftruncate(fd, -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
    return fd


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """One without large pages of either kind."""
    monkeypatch.setattr(arena_memory, "free_huge_pages", lambda: 0)
    monkeypatch.setattr(arena_memory, "_huge_file", no_reserved_pages)
    monkeypatch.setattr(arena_memory, "is_thp_willing", lambda: False)
    return monkeypatch


def pages_of(wanted: PagesKind) -> PagesKind:
    """What an arena is made of that was asked to be of *wanted*; it is as large as it should be, and works."""
    arena = Arena.create(SIZE_BYTES, wanted)
    assert arena.size_bytes == len(arena.view) == SIZE_BYTES
    arena.view[-1] = 7
    again = Arena(os.dup(arena.fd), SIZE_BYTES, pages=arena.pages)
    assert again.view[-1] == 7
    again.close()
    arena.close()
    return arena.pages


def test_without_large_pages_auto_takes_ordinary_ones(machine: pytest.MonkeyPatch) -> None:
    assert pages_of(PagesKind.AUTO) is PagesKind.SMALL
    machine.setattr(arena_memory, "free_huge_pages", lambda: 1)
    assert pages_of(PagesKind.AUTO) is PagesKind.SMALL  # two are needed


def test_auto_takes_reserved_pages_before_transparent_ones(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(arena_memory, "is_thp_willing", lambda: True)
    assert pages_of(PagesKind.AUTO) is PagesKind.TRANSPARENT
    machine.setattr(arena_memory, "free_huge_pages", lambda: 2)
    assert pages_of(PagesKind.AUTO) is PagesKind.TRANSPARENT  # somebody else was faster
    machine.setattr(arena_memory, "_huge_file", made_to_measure)
    assert pages_of(PagesKind.AUTO) is PagesKind.HUGETLB
    assert pages_of(PagesKind.SMALL) is PagesKind.SMALL


def test_what_was_asked_for_by_name_is_not_replaced(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match=r"vm\.nr_hugepages=2"):
        Arena.create(SIZE_BYTES, PagesKind.HUGETLB)
    machine.setattr(arena_memory, "_huge_file", made_to_measure)
    with pytest.raises(MeshError, match="echo advise"):
        Arena.create(SIZE_BYTES, PagesKind.TRANSPARENT)


@pytest.mark.skipif(free_huge_pages() < 2, reason="no reserved 2 MiB pages: sysctl vm.nr_hugepages=2")
@pytest.mark.parametrize("commit", CommitKind)
def test_reserved_pages_come_from_the_kernel(commit: CommitKind) -> None:
    before = free_huge_pages()
    arena = Arena.create(SIZE_BYTES, PagesKind.HUGETLB, commit)
    assert free_huge_pages() == before - 2
    arena.close()
    assert free_huge_pages() == before


@pytest.mark.parametrize(
    ("policy", "is_willing"),
    [
        ("always within_size advise [never] deny force", False),
        ("always within_size [advise] never deny force", True),
        ("[always] within_size advise never deny force", True),
        ("always within_size advise never [deny] force", False),
    ],
)
def test_the_kernel_says_whether_it_has_transparent_pages(tmp_path: Path, policy: str, is_willing: bool) -> None:
    (tmp_path / "shmem_enabled").write_text(policy + "\n")
    assert is_thp_willing(tmp_path / "shmem_enabled") is is_willing
    assert not is_thp_willing(tmp_path / "no such file")
