"""The folder of the SSD tier: whose it is, what it holds, and when it is refused."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.store.block_file import SlotBytes
from mooncake_mesh.messenger.store.folder import StoreFolder
from mooncake_mesh.messenger.store.records import PAGE_BYTES, Namespace
from mooncake_proto.ids import BlockKey
from tests.unit.store_doubles import NAMESPACE, content, empty_slot, key, slot_of

SIZE_BYTES = 8 * PAGE_BYTES


def _reopened(path: Path, size_bytes: int = SIZE_BYTES) -> list[tuple[int, BlockKey]]:
    """What a new life finds, as slot and key."""
    folder = StoreFolder.lock(path)
    folder.check(NAMESPACE)
    found = [(record.slot, record.key) for record in folder.open(NAMESPACE, size_bytes).records()]
    folder.close()
    return found


def test_blocks_outlive_the_process(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path / "new" / "folder")
    file = folder.open(NAMESPACE, SIZE_BYTES + 17)
    assert file.n_slots == 8
    assert file.write([_aligned(slot_of(3, 1, seq=1)), _aligned(slot_of(7, 2, seq=2))]) == [None, None]
    folder.close()
    assert _reopened(tmp_path / "new" / "folder") == [(7, key(2)), (3, key(1))]
    folder = StoreFolder.lock(tmp_path / "new" / "folder")
    file = folder.open(NAMESPACE, SIZE_BYTES)
    wanted = _aligned(empty_slot(file.records()[1]))
    assert file.read([wanted]) == [None]
    assert bytes(wanted.buffer[: NAMESPACE.block_bytes]) == content(1)
    folder.close()


def test_all_space_is_taken_at_once_and_a_smaller_file_keeps_what_fits(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path)
    file = folder.open(NAMESPACE, SIZE_BYTES)
    assert os.stat(tmp_path / "blocks.dat").st_blocks * 512 >= SIZE_BYTES
    file.write([_aligned(slot_of(1, 1, seq=1)), _aligned(slot_of(7, 2, seq=2))])
    folder.close()
    assert _reopened(tmp_path, 4 * PAGE_BYTES) == [(1, key(1))]
    assert _reopened(tmp_path, 2 * SIZE_BYTES) == [(1, key(1))]


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path)
    with pytest.raises(ConfigError, match=r"messenger\.ssd_dir: .* in use by another messenger"):
        StoreFolder.lock(tmp_path)
    folder.close()
    StoreFolder.lock(tmp_path).close()


def test_blocks_of_another_model_and_files_of_others_are_refused(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path)
    folder.open(NAMESPACE, SIZE_BYTES)
    for other in (Namespace(block_bytes=200, layout="fake"), Namespace(block_bytes=100, layout="real")):
        with pytest.raises(ConfigError, match=r"messenger\.ssd_dir: .* holds blocks of 100 bytes of 'fake'"):
            folder.check(other)
    (tmp_path / "slots.tbl").write_bytes(b"somebody's notes")
    with pytest.raises(ConfigError, match="no slot table"):
        folder.check(NAMESPACE)
    folder.close()


def test_a_damaged_first_page_starts_a_new_table(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path)
    folder.open(NAMESPACE, SIZE_BYTES).write([_aligned(slot_of(0, 1))])
    folder.close()
    with (tmp_path / "slots.tbl").open("r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    assert _reopened(tmp_path) == []
    assert _reopened(tmp_path) == [], "and the new one is whole"


def test_what_does_not_fit_takes_nothing(tmp_path: Path) -> None:
    folder = StoreFolder.lock(tmp_path)
    with pytest.raises(OSError, match="do not fit") as full:
        folder.open(NAMESPACE, 1 << 50)
    assert full.value.errno == errno.ENOSPC
    assert os.stat(tmp_path / "blocks.dat").st_blocks == 0
    with pytest.raises(OSError, match="hold no block"):
        folder.open(NAMESPACE, 100)
    folder.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        StoreFolder.lock(tmp_path / "file" / "below")


def _aligned(slot: SlotBytes) -> SlotBytes:
    """The same in memory that direct I/O takes."""
    buffer = memoryview(mmap.mmap(-1, len(slot.buffer)))
    buffer[:] = slot.buffer
    return SlotBytes(record=slot.record, buffer=buffer)
