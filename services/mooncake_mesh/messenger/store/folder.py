"""The folder of one messenger's SSD tier: locked by it, of one namespace, with all its space taken in advance.

::

    lock         held (flock) as long as the messenger lives; the kernel frees it, however the process ends
    blocks.dat   the slots, preallocated
    slots.tbl    which slot holds what: records.py
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

import structlog

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.store.block_file import BlockFile, OsFile, slot_bytes_of
from mooncake_mesh.messenger.store.records import (
    PAGE_BYTES,
    BadSuperblock,
    ForeignFile,
    Namespace,
    pack_superblock,
    record_offset,
    unpack_superblock,
)

log = structlog.get_logger(__name__)

_PATH: Final = "messenger.ssd_dir"


class StoreFolder:
    """A locked folder. Make one with :meth:`lock`; :meth:`close` gives it up."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._fds = [lock_fd]

    @classmethod
    def lock(cls, path: Path) -> "StoreFolder":
        """Raises ConfigError where another process has the folder, OSError where it cannot be used."""
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{path} is in use by another messenger; give each its own folder", path=_PATH) from None
        except OSError:
            os.close(fd)
            raise
        return cls(path, fd)

    def check(self, namespace: Namespace) -> None:
        """Raise ConfigError if the folder holds blocks of another namespace, or files that are not ours.

        A table that cannot be read is :meth:`open`'s affair.
        """
        try:
            found = unpack_superblock(self._first_page())
        except BadSuperblock as error:
            log.warning("ssd_table_damaged", path=str(self.path), error=str(error))
            return
        except OSError:
            return
        except ForeignFile as error:
            raise ConfigError(f"{self._table_path} {error}; give another folder", path=_PATH) from error
        if found is not None and found != namespace:
            raise ConfigError(
                f"{self.path} holds blocks of {found.block_bytes} bytes of {found.layout!r}, this node has blocks of "
                f"{namespace.block_bytes} bytes of {namespace.layout!r}; give another folder, or empty it",
                path=_PATH,
            )

    def open(self, namespace: Namespace, size_bytes: int) -> BlockFile:
        """The block file, of at most *size_bytes*, with what it held before. Blocks; raises OSError.

        Call :meth:`check` before. A table of which the first page is damaged starts anew.
        """
        slot_bytes = slot_bytes_of(namespace.block_bytes)
        n_slots = size_bytes // slot_bytes
        if n_slots < 1:
            raise OSError(errno.ENOSPC, f"ssd_bytes {size_bytes} hold no block of {slot_bytes} bytes")
        blocks = self._open_blocks(n_slots * slot_bytes)
        table = self._open("slots.tbl", 0)
        if not self._is_ours(namespace):
            os.ftruncate(table, 0)
            os.pwrite(table, pack_superblock(namespace), 0)
        os.ftruncate(table, record_offset(n_slots))
        return BlockFile(OsFile(blocks), OsFile(table), namespace, n_slots)

    def close(self) -> None:
        """No read or write may be under way."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    # --- inside -------------------------------------------------------------------------------------------------------

    @property
    def _table_path(self) -> Path:
        return self.path / "slots.tbl"

    def _first_page(self) -> bytes:
        try:
            with self._table_path.open("rb") as file:
                return file.read(PAGE_BYTES)
        except FileNotFoundError:
            return b""

    def _is_ours(self, namespace: Namespace) -> bool:
        try:
            return unpack_superblock(self._first_page()) == namespace
        except BadSuperblock:
            return False

    def _open(self, name: str, flags: int) -> int:
        fd = os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
        self._fds.append(fd)
        return fd

    def _open_blocks(self, size_bytes: int) -> int:
        """Preallocate, then open for direct I/O where the file system has it."""
        plain = self._open("blocks.dat", 0)
        _preallocate(plain, size_bytes)
        try:
            direct = self._open("blocks.dat", os.O_DIRECT)
            with mmap.mmap(-1, PAGE_BYTES) as page:
                os.preadv(direct, [page], 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.info("ssd_not_direct", path=str(self.path), reason="the file system has no direct I/O")
            return plain
        return direct


def _preallocate(fd: int, size_bytes: int) -> None:
    """Exactly *size_bytes*, all of them on the disk. Raises OSError, having taken nothing, where they do not fit."""
    now = os.fstat(fd)
    space = os.fstatvfs(fd)
    if size_bytes - now.st_blocks * 512 > space.f_bavail * space.f_frsize:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {size_bytes} bytes do not fit")
    try:
        os.ftruncate(fd, size_bytes)
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.ftruncate(fd, now.st_size)
        raise
