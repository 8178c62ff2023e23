"""The folder where a mesh on one machine has its sockets: made, locked against a second mesh, and cleaned up.

The lock lives as long as its holder, so that a folder left behind by a mesh that was killed is recognised and removed
by the next one.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "mooncake-up-"
_LOCK: Final = "lock"


@contextmanager
def held(chosen: Path | None) -> Iterator[Path]:
    """A folder of this mesh alone: *chosen*, or a fresh one.

    Afterwards its sockets are gone, and the folder too if it was made here. Raises ValueError (``run_dir: …``) where
    another mesh holds *chosen*, or where it cannot be made.
    """
    if chosen is None:
        parent = Path(tempfile.gettempdir())
        remove_abandoned(parent)
        path, ours = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent)), True
        lock = _locked_before_it_is_seen(path)
    else:
        path, ours = chosen.absolute(), not chosen.exists()
        lock = _lock_chosen(path)
    try:
        yield path
    finally:
        _clean(path, whole=ours)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's fresh folders of meshes that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                if _lock(lock):
                    shutil.rmtree(path)
            finally:
                os.close(lock)


def _locked_before_it_is_seen(path: Path) -> int:
    """Descriptor of the lock. It gets its name once it is held, so that nobody takes the folder for abandoned."""
    lock = os.open(path / "new-lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (path / "new-lock").rename(path / _LOCK)
    return lock


def _lock_chosen(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"run_dir: {path}: {error.strerror}") from error
    if not _lock(lock):
        os.close(lock)
        raise ValueError(f"run_dir: another mesh runs in {path}")
    return lock


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clean(path: Path, *, whole: bool) -> None:
    if whole:
        shutil.rmtree(path)
        return
    for entry in path.iterdir():
        if stat.S_ISSOCK(entry.lstat().st_mode):
            entry.unlink()
    (path / _LOCK).unlink()
