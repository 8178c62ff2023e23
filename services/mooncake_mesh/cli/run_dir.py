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
        remove_abandoned(Path(tempfile.gettempdir()))
        path, ours = Path(tempfile.mkdtemp(prefix=PREFIX)), True
    else:
        path, ours = chosen.absolute(), not chosen.exists()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"run_dir: {path}: {error.strerror}") from error
    try:
        if chosen is None:
            fcntl.flock(lock, fcntl.LOCK_EX)  # waits for somebody who looks whether the folder is abandoned
        elif not _lock(lock):
            raise ValueError(f"run_dir: another mesh runs in {path}")
        try:
            yield path
        finally:
            _clean(path, whole=ours)
    finally:
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove this user's fresh folders of meshes that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR)
            try:
                if _lock(lock) and len(os.listdir(path)) > 1:  # not one that is just being made
                    shutil.rmtree(path)
            finally:
                os.close(lock)


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
