"""The memory file of an arena: what pages it is made of, and mapping it.

The kernel copies from and to 2 MiB pages faster than 4 KiB ones, and a mapping of them has 512 times fewer entries to
be filled. There are two ways to them. Reserved ones (hugetlb) are set aside by the administrator, and are there or not.
Transparent ones the kernel finds when it can, for shared memory only where its policy says so.
"""

import mmap
import os
from pathlib import Path
from typing import Final

import structlog

from mooncake_mesh.config import CommitKind, PagesKind
from mooncake_mesh.errors import MeshError
from mooncake_mesh.mesh.arena_populate import Advice, Populating

log = structlog.get_logger(__name__)

HUGE_PAGE_BYTES: Final = 2 << 20
THP_POLICY: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGETLB_POOL: Final = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
WILLING: Final = ("advise", "within_size", "always", "force")


class Arena:
    """Mapped block memory, ``size_bytes`` of it.

    ``view`` is writable where the mapping is; close() fails while somebody holds slices of it. ``pages`` says what the
    memory was made of, never ``auto``, and ``commit`` whether it was made ready at start.
    """

    def __init__(
        self,
        fd: int,
        size_bytes: int,
        *,
        protection: int = mmap.PROT_READ | mmap.PROT_WRITE,
        pages: PagesKind = PagesKind.TRANSPARENT,
        commit: CommitKind = CommitKind.USE,
        advice: Advice = Advice.MAP,
    ) -> None:
        """*pages* other than ``transparent`` are not asked for again. The file may be larger, by part of a page.

        *commit* at ``start`` begins to make the memory ready as *advice* says, and does not wait for it.
        """
        self.fd = fd
        self.size_bytes = size_bytes
        self.pages = pages
        self.commit = commit
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED, prot=protection)
        if pages is PagesKind.TRANSPARENT:
            _ask_for_transparent(self._map)
        self.view = memoryview(self._map)[:size_bytes]
        self._populating = Populating(self.view, advice) if commit is CommitKind.START else None

    @classmethod
    def create(cls, size_bytes: int, pages: PagesKind = PagesKind.AUTO, commit: CommitKind = CommitKind.USE) -> "Arena":
        """A new zeroed arena. Reserved pages are taken at once, others when *commit* says.

        Raises MeshError when there are no such *pages*; ``auto`` takes what there is.
        """
        fd, found = _new_file(size_bytes, pages)
        return cls(fd, size_bytes, pages=found, commit=commit, advice=Advice.COMMIT)

    def close(self) -> None:
        if self._populating is not None:
            self._populating.stop()
        self.view.release()
        self._map.close()
        os.close(self.fd)


def _new_file(size_bytes: int, pages: PagesKind) -> tuple[int, PagesKind]:
    """A memory file of *pages*, and which they are. Raises MeshError."""
    has_reserved = free_huge_pages() >= huge_pages_of(size_bytes)
    if pages is PagesKind.HUGETLB or (pages is PagesKind.AUTO and has_reserved):
        try:
            return _huge_file(size_bytes), PagesKind.HUGETLB
        except OSError as error:
            if pages is PagesKind.HUGETLB:
                raise MeshError(_no_huge_pages(size_bytes, error)) from error
            log.warning("reserved_pages_unavailable", error=str(error))
    if pages is PagesKind.TRANSPARENT and not is_thp_willing():
        raise MeshError(f"the kernel has no 2 MiB pages for shared memory: echo advise > {THP_POLICY} (as root)")
    is_small = pages is PagesKind.SMALL or not is_thp_willing()
    fd = os.memfd_create("mooncake-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd, PagesKind.SMALL if is_small else PagesKind.TRANSPARENT


def is_thp_willing(policy: Path = THP_POLICY) -> bool:
    """Whether the kernel gives transparent 2 MiB pages to shared memory that asks for them."""
    try:
        words = policy.read_text().split()
    except OSError:
        return False
    return any(f"[{word}]" in words for word in WILLING)


def free_huge_pages(pool: Path = HUGETLB_POOL) -> int:
    """How many reserved 2 MiB pages nobody has taken yet."""
    try:
        return int((pool / "free_hugepages").read_text()) - int((pool / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0


def huge_pages_of(size_bytes: int) -> int:
    return -(-size_bytes // HUGE_PAGE_BYTES)


def _huge_file(size_bytes: int) -> int:
    """A memory file of whole reserved pages, all of them taken now: later a lack of them would kill who touches it."""
    fd = os.memfd_create("mooncake-arena", os.MFD_CLOEXEC | os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    try:
        os.posix_fallocate(fd, 0, huge_pages_of(size_bytes) * HUGE_PAGE_BYTES)
    except OSError:
        os.close(fd)
        raise
    return fd


def _no_huge_pages(size_bytes: int, error: OSError) -> str:
    wanted = huge_pages_of(size_bytes)
    return f"no {wanted} free 2 MiB pages ({error.strerror}): sysctl vm.nr_hugepages={wanted} (as root), or more"


def _ask_for_transparent(mapping: mmap.mmap) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:  # a wish only, and this mapping may be of reserved pages
        log.debug("no_huge_pages", error=str(error))
