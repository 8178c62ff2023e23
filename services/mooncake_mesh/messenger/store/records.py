"""Bytes of the slot table, ``slots.tbl``: a superblock of one page, then 64 bytes for each slot.

Each record carries its own XXH3-64, its slot number and the store's namespace: one that was torn, moved or left over
from another store is none. Little-endian.
"""

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

PAGE_BYTES: Final = 4096
RECORD_BYTES: Final = 64
EMPTY_RECORD: Final = bytes(RECORD_BYTES)
MAGIC: Final = b"MOONSLOT"
VERSION: Final = 1

_RECORD: Final = struct.Struct(f"<{BLOCK_KEY_BYTES}sQQQQQ")
_SUPERBLOCK: Final = struct.Struct("<8sIIQ")
_CHECKSUM: Final = struct.Struct("<Q")
_MAX_NAMESPACE_BYTES: Final = 1024

assert _RECORD.size + _CHECKSUM.size == RECORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Whose blocks these are. A store takes no block of another namespace: it could not tell what the bytes mean."""

    block_bytes: int
    layout: str

    @property
    def tag(self) -> int:
        """64 bits that stand for the namespace in every record."""
        return xxhash.xxh3_64_intdigest(f"{self.block_bytes} {self.layout}".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """``slot`` holds the block under ``key``; ``checksum`` is XXH3-64 of its bytes. ``seq`` grows with every write."""

    slot: int
    key: BlockKey
    checksum: int
    seq: int


class BadSuperblock(ValueError):
    """The first page is damaged: it is ours, but nothing in the table can be trusted."""


class ForeignFile(ValueError):
    """The file was not written by this store, or by another version of it."""


def pack_record(record: SlotRecord, namespace: Namespace) -> bytes:
    body = _RECORD.pack(record.key, record.seq, record.checksum, record.slot, namespace.block_bytes, namespace.tag)
    return body + _checksum(body)


def unpack_record(data: bytes | memoryview, slot: int, namespace: Namespace) -> SlotRecord | None:
    """The record of *slot*; None for one that is empty, torn, misplaced or of another namespace."""
    if len(data) != RECORD_BYTES:
        return None
    body = bytes(data[: _RECORD.size])
    if bytes(data[_RECORD.size :]) != _checksum(body):
        return None
    key, seq, checksum, own_slot, block_bytes, tag = _RECORD.unpack(body)
    if own_slot != slot or block_bytes != namespace.block_bytes or tag != namespace.tag:
        return None
    return SlotRecord(slot=slot, key=BlockKey(key), checksum=checksum, seq=seq)


def record_offset(slot: int) -> int:
    return PAGE_BYTES + slot * RECORD_BYTES


def pack_superblock(namespace: Namespace) -> bytes:
    """One page."""
    layout = namespace.layout.encode()
    if len(layout) > _MAX_NAMESPACE_BYTES:
        raise ValueError(f"layout: {len(layout)} bytes exceed {_MAX_NAMESPACE_BYTES}")
    body = _SUPERBLOCK.pack(MAGIC, VERSION, len(layout), namespace.block_bytes) + layout
    body += bytes(PAGE_BYTES - _CHECKSUM.size - len(body))
    return body + _checksum(body)


def unpack_superblock(page: bytes) -> Namespace | None:
    """The namespace; None for a page of zeros (or none at all). Raises BadSuperblock or ForeignFile."""
    if not page.strip(b"\0"):
        return None
    if page[: len(MAGIC)] != MAGIC:
        raise ForeignFile("is no slot table of this program")
    body, found = page[: -_CHECKSUM.size], page[-_CHECKSUM.size :]
    if len(page) != PAGE_BYTES or found != _checksum(body):
        raise BadSuperblock("the first page of the slot table is damaged")
    _, version, layout_bytes, block_bytes = _SUPERBLOCK.unpack_from(body)
    if version != VERSION:
        raise ForeignFile(f"was written in format {version}, this program reads {VERSION}")
    layout = body[_SUPERBLOCK.size : _SUPERBLOCK.size + layout_bytes].decode()
    return Namespace(block_bytes=block_bytes, layout=layout)


def _checksum(body: bytes) -> bytes:
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))
