"""Files that fail on order, for tests of the SSD tier."""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_mesh.messenger.store.block_file import BlockFile, SlotBytes, block_checksum, slot_bytes_of
from mooncake_mesh.messenger.store.records import Namespace, SlotRecord, record_offset
from mooncake_proto.ids import BlockKey

NAMESPACE: Final = Namespace(block_bytes=100, layout="fake")


class Crash(BaseException):
    """The process was killed in the middle of a system call."""


@dataclass(slots=True)
class FakeFile:
    """Bytes in memory. ``fault(operation, offset, size)`` says how many bytes the next call may move, or raises."""

    data: bytearray
    fault: Callable[[str, int, int], int] = field(default=lambda _operation, _offset, size: size)
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("read", buffers, offset)

    def write_from(self, buffers: Sequence[memoryview], offset: int) -> int:
        return self._move("write", buffers, offset)

    def _move(self, operation: str, buffers: Sequence[memoryview], offset: int) -> int:
        size = sum(map(len, buffers))
        self.calls.append((operation, offset, size))
        crash = None
        try:
            allowed = self.fault(operation, offset, size)
        except Crash as caught:
            crash, allowed = caught, int(caught.args[0])
        moved = 0
        for buffer in buffers:
            n = min(len(buffer), allowed - moved, len(self.data) - offset - moved)
            if n <= 0:
                break
            place = slice(offset + moved, offset + moved + n)
            if operation == "read":
                buffer[:n] = self.data[place]
            else:
                self.data[place] = buffer[:n]
            moved += n
        if crash is not None:
            raise crash
        return moved


def fake_files(n_slots: int) -> tuple[FakeFile, FakeFile]:
    """Blocks and table."""
    return FakeFile(bytearray(n_slots * slot_bytes_of(NAMESPACE.block_bytes))), FakeFile(
        bytearray(record_offset(n_slots))
    )


def block_file(blocks: FakeFile, table: FakeFile, n_slots: int) -> BlockFile:
    return BlockFile(blocks, table, NAMESPACE, n_slots)


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 16)


def content(number: int) -> bytes:
    """The bytes of the block under ``key(number)``."""
    return bytes((number * 31 + i) & 0xFF for i in range(NAMESPACE.block_bytes))


def slot_of(slot: int, number: int, seq: int = 1) -> SlotBytes:
    """The block ``number`` on its way to *slot*."""
    buffer = memoryview(bytearray(slot_bytes_of(NAMESPACE.block_bytes)))
    buffer[: NAMESPACE.block_bytes] = content(number)
    checksum = block_checksum(buffer[: NAMESPACE.block_bytes])
    return SlotBytes(record=SlotRecord(slot=slot, key=key(number), checksum=checksum, seq=seq), buffer=buffer)


def empty_slot(record: SlotRecord) -> SlotBytes:
    return SlotBytes(record=record, buffer=memoryview(bytearray(slot_bytes_of(NAMESPACE.block_bytes))))


def raises(number: int) -> OSError:
    return OSError(number, errno.errorcode[number])
