"""Slots on one file, their records on another. Called from threads; every fault is an outcome of its slot.

A write first empties the slot's record, then writes the block, then the record. So whenever the process is killed, a
record that stands belongs to a block that is whole. After a loss of power this order proves nothing, and a medium may
change bytes at any time: a block counts only once its checksum was compared, at start and again at every read.
"""

import enum
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol

import xxhash

from mooncake_mesh.messenger.store.records import (
    EMPTY_RECORD,
    PAGE_BYTES,
    RECORD_BYTES,
    Namespace,
    SlotRecord,
    pack_record,
    record_offset,
    unpack_record,
)

_MAX_BUFFERS: Final = 512
"""Slots of one system call; the kernel takes 1024 buffers."""

_TABLE_RECORDS: Final = 16_384
"""Records read at once: 1 MiB."""


class RandomFile(Protocol):
    """A file that is read and written at offsets. Both may transfer less than asked for, and raise OSError."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int: ...

    def write_from(self, buffers: Sequence[memoryview], offset: int) -> int: ...


class OsFile:
    """An open descriptor. ``read_into`` and ``write_from`` release the GIL."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(self._fd, buffers, offset)

    def write_from(self, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(self._fd, buffers, offset)


class Mismatch(enum.Enum):
    """A slot was read, and holds other bytes than were written."""

    CHECKSUM = "checksum"


Fault = OSError | Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBytes:
    """A slot's record and the buffer of one whole slot (``slot_bytes``, aligned) to read into or write from."""

    record: SlotRecord
    buffer: memoryview


class BlockFile:
    """``n_slots`` slots of ``slot_bytes``: a block and padding up to the next page, for direct I/O."""

    def __init__(self, blocks: RandomFile, table: RandomFile, namespace: Namespace, n_slots: int) -> None:
        self.namespace = namespace
        self.n_slots = n_slots
        self.slot_bytes = slot_bytes_of(namespace.block_bytes)
        self._blocks = blocks
        self._table = table

    def records(self) -> list[SlotRecord]:
        """What the table says, newest first; torn records are left out. Raises OSError."""
        found: list[SlotRecord] = []
        for first in range(0, self.n_slots, _TABLE_RECORDS):
            data = bytearray(min(_TABLE_RECORDS, self.n_slots - first) * RECORD_BYTES)
            n_read = _read_some(self._table, memoryview(data), record_offset(first))
            if data.count(0) == len(data):
                continue
            view = memoryview(data)
            for place in range(n_read // RECORD_BYTES):
                packed = view[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]
                record = unpack_record(packed, first + place, self.namespace)
                if record is not None:
                    found.append(record)
        return sorted(found, key=lambda record: -record.seq)

    def write(self, slots: Sequence[SlotBytes]) -> list[OSError | None]:
        """Write blocks and records; for each its fault, or None. ``record.checksum`` must be that of the block."""
        return self._each_run(slots, self._write_run)

    def read(self, slots: Sequence[SlotBytes]) -> list[Fault | None]:
        """Fill the buffers; for each its fault, or None where the block is what its record says."""
        faults: list[Fault | None] = list(self._each_run(slots, self._read_run))
        for i, slot in enumerate(slots):
            if faults[i] is None and block_checksum(self._block_of(slot.buffer)) != slot.record.checksum:
                faults[i] = Mismatch.CHECKSUM
        return faults

    def erase(self, slot: int) -> OSError | None:
        """Empty the record of *slot*, so that the next start does not find it."""
        return self._attempt(lambda: _write_all(self._table, [memoryview(EMPTY_RECORD)], record_offset(slot)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _block_of(self, buffer: memoryview) -> memoryview:
        return buffer[: self.namespace.block_bytes]

    def _each_run(
        self, slots: Sequence[SlotBytes], transfer: Callable[[Sequence[SlotBytes]], None]
    ) -> list[OSError | None]:
        """Transfer neighbouring slots at once; where that fails, each by itself, so that one bad slot costs one."""
        faults: dict[int, OSError | None] = {}
        for run in _runs(slots):
            if self._attempt(lambda run=run: transfer(run)) is None:  # type: ignore[misc]
                continue
            for one in run:
                faults[one.record.slot] = self._attempt(lambda one=one: transfer([one]))  # type: ignore[misc]
        return [faults.get(slot.record.slot) for slot in slots]

    def _write_run(self, run: Sequence[SlotBytes]) -> None:
        first = run[0].record.slot
        _write_all(self._table, [memoryview(EMPTY_RECORD * len(run))], record_offset(first))
        _write_all(self._blocks, [slot.buffer for slot in run], first * self.slot_bytes)
        records = b"".join(pack_record(slot.record, self.namespace) for slot in run)
        _write_all(self._table, [memoryview(records)], record_offset(first))

    def _read_run(self, run: Sequence[SlotBytes]) -> None:
        _transfer_all(self._blocks.read_into, [slot.buffer for slot in run], run[0].record.slot * self.slot_bytes)

    def _attempt(self, work: Callable[[], None]) -> OSError | None:
        try:
            work()
        except OSError as error:
            return error
        return None


def slot_bytes_of(block_bytes: int) -> int:
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


def block_checksum(block: memoryview) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(block)


def _runs(slots: Sequence[SlotBytes]) -> Iterator[list[SlotBytes]]:
    """*slots* by slot number, cut where neighbours are not neighbours on the file."""
    ordered = sorted(slots, key=lambda slot: slot.record.slot)
    if not ordered:
        return
    run = [ordered[0]]
    for before, slot in pairwise(ordered):
        if slot.record.slot != before.record.slot + 1 or len(run) == _MAX_BUFFERS:
            yield run
            run = []
        run.append(slot)
    yield run


def _read_some(file: RandomFile, buffer: memoryview, offset: int) -> int:
    """Fill *buffer* as far as the file goes; how many bytes that was."""
    n_read = 0
    while n_read < len(buffer):
        n = file.read_into([buffer[n_read:]], offset + n_read)
        if n <= 0:
            break
        n_read += n
    return n_read


def _write_all(file: RandomFile, buffers: Sequence[memoryview], offset: int) -> None:
    _transfer_all(file.write_from, buffers, offset)


def _transfer_all(
    transfer: Callable[[Sequence[memoryview], int], int], buffers: Sequence[memoryview], offset: int
) -> None:
    """Repeat until all is transferred. Raises OSError; the end of the file is one (EIO)."""
    left = list(buffers)
    while left:
        n = transfer(left, offset)
        if n <= 0:
            raise OSError(errno.EIO, "the file ends too early")
        offset += n
        while left and n >= len(left[0]):
            n -= len(left.pop(0))
        if n:
            left[0] = left[0][n:]
