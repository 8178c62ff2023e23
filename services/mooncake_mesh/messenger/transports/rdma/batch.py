"""One transfer: pieces of memory cut into slices, each on its way over some path until all have arrived; pure.

A slice waits, is in flight on one path, and is done; or it failed there and waits again, for another path, until its
attempts are used up. The transfer then ends with the reason of that last failure; nothing more is sent, and what is in
flight is waited for, because a NIC may still touch its memory.
"""

import enum
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mooncake_mesh.messenger.transports.rdma.paths import Path, PathHealth, Tiers

_MERGE_PART: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """``size_bytes`` at ``local_offset`` of the registered memory here and at ``remote_offset`` of that there."""

    local_offset: int
    remote_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a piece; ``number`` is its place in the transfer."""

    number: int
    local_offset: int
    remote_offset: int
    size_bytes: int


class Blame(enum.Enum):
    """Whose fault it was that a slice did not arrive.

    Its path's: another one is tried, and this one rests. The request's, which was refused: no other path helps. That of
    a neighbour on the same queue pair, which was closed for it: the slice is tried again as if nothing had happened.
    """

    PATH = "path"
    REQUEST = "request"
    NEIGHBOUR = "neighbour"


def cut(pieces: Sequence[Piece], slice_bytes: int) -> list[Slice]:
    """Slices of about *slice_bytes*, piece by piece. A last part of up to a quarter of that joins the one before it."""
    slices: list[Slice] = []
    for piece in pieces:
        at = 0
        while at < piece.size_bytes:
            size = min(slice_bytes, piece.size_bytes - at)
            if piece.size_bytes - at - size <= slice_bytes // _MERGE_PART:
                size = piece.size_bytes - at
            slices.append(
                Slice(
                    number=len(slices),
                    local_offset=piece.local_offset + at,
                    remote_offset=piece.remote_offset + at,
                    size_bytes=size,
                )
            )
            at += size
    return slices


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """*pieces* by local offset, with those that lie side by side at both ends made one."""
    done: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.local_offset):
        last = done[-1] if done else None
        if (
            last is not None
            and last.local_offset + last.size_bytes == piece.local_offset
            and last.remote_offset + last.size_bytes == piece.remote_offset
        ):
            done[-1] = replace(last, size_bytes=last.size_bytes + piece.size_bytes)
        else:
            done.append(piece)
    return done


class Batch:
    """The slices of one transfer. Mutated only by its methods; *health* is shared with other transfers."""

    def __init__(
        self, slices: Sequence[Slice], paths: Tiers, health: PathHealth, *, window: int, attempts: int
    ) -> None:
        self._slices = slices
        self._paths = paths
        self._health = health
        self._window = window
        self._attempts = attempts
        self._waiting = deque(range(len(slices)))
        self._left = len(slices)
        self._tries: Counter[int] = Counter()
        self._failed_on: dict[int, frozenset[Path]] = {}
        self._load: Counter[Path] = Counter()
        self.failure: str | None = None

    @property
    def in_flight(self) -> int:
        return self._load.total()

    @property
    def all_sent(self) -> bool:
        """Nothing waits."""
        return not self._waiting

    @property
    def is_over(self) -> bool:
        """Done or failed, and nothing in flight."""
        return (self._left == 0 or self.failure is not None) and self.in_flight == 0

    def take(self, now_s: float) -> list[tuple[Path, list[Slice]]]:
        """What to send now, by path: as many slices as the paths' windows hold, on the path with the least in flight.

        They count as in flight from here on.
        """
        taken: dict[Path, list[Slice]] = {}
        while self._waiting and self.failure is None:
            number = self._waiting[0]
            usable = self._health.usable(self._paths, self._failed_on.get(number, frozenset()), now_s)
            if not usable:
                self.failure = "there is no path"
                break
            path = min(usable, key=lambda path: self._load[path])
            if self._load[path] >= self._window:
                break
            self._waiting.popleft()
            self._load[path] += 1
            self._tries[number] += 1
            taken.setdefault(path, []).append(self._slices[number])
        return list(taken.items())

    def arrived(self, number: int, path: Path) -> None:
        self._load[path] -= 1
        self._left -= 1
        self._health.worked(path)

    def failed(self, number: int, path: Path, blame: Blame, why: str, now_s: float) -> None:
        """A slice that was taken did not arrive."""
        self._load[path] -= 1
        if blame is Blame.NEIGHBOUR:
            self._tries[number] -= 1
            self._waiting.append(number)
            return
        if blame is Blame.PATH:
            self._health.failed(path, now_s)
            self._failed_on[number] = self._failed_on.get(number, frozenset()) | {path}
            if self._tries[number] < self._attempts:
                self._waiting.append(number)
                return
        if self.failure is None:
            self.failure = f"{path.local_nic} → {path.remote_nic}: {why}"

    def give_up(self, why: str) -> None:
        """Send nothing more."""
        if self.failure is None:
            self.failure = why
