"""What a transport is, and the bytes both of them share: checksums."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from mooncake_mesh.messenger.sending import OutgoingSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSlice:
    """An outgoing slice with the checksum of its bytes, where checksums are on."""

    piece: OutgoingSlice
    checksum: int | None


class SendPath(Protocol):
    """The way out for one transfer, opened to one receiver."""

    @property
    def name(self) -> str:
        """As in the configuration: shm or tcp."""

    async def send(self, batch: Sequence[SealedSlice]) -> None:
        """Return when the receiver has acknowledged every slice as written and verified. Raises TransferError."""


def checksum(data: memoryview) -> int:
    """XXH3-64 of *data*."""
    return xxhash.xxh3_64_intdigest(data)
