"""Prefixes that placed requests will want soon, and which of them is read from SSD next. Pure.

An announcement waits, is read, and is kept in the arena until its job has its blocks, ends or never comes. All of them
together are allowed a share of the arena only, and so many at a time; what is beyond that is read when its job comes.
"""

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_proto.ids import BlockKey, JobId

MAX_ANNOUNCED: Final = 64
ARENA_SHARE: Final = 0.5
_REMEMBERED_ENDS: Final = 1024


class AnnouncedState(enum.Enum):
    WAITING = "waiting"
    READING = "reading"
    KEPT = "kept"
    OVER = "over"


class Unannounced(enum.Enum):
    """Why a prefix is not read ahead. OVER: its job came, or ended, before the announcement."""

    FULL = "full"
    KNOWN = "known"
    OVER = "over"


@dataclass(slots=True)
class Announcement:
    """``until_s`` is when its user ends it, whatever becomes of the job. OVER tells who reads for it to stop."""

    job_id: JobId
    keys: Sequence[BlockKey]
    tenant: str
    until_s: float
    state: AnnouncedState = AnnouncedState.WAITING


class AnnouncedPrefixes:
    """Oldest first. Mutated only by its methods; keeps no clock."""

    def __init__(self, n_blocks: int) -> None:
        """For an arena of *n_blocks*."""
        self._most_blocks = int(n_blocks * ARENA_SHARE)
        self._blocks = 0
        self._known: dict[JobId, Announcement] = {}
        self._ended: OrderedDict[JobId, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def announce(
        self, job_id: JobId, keys: Sequence[BlockKey], *, tenant: str, until_s: float
    ) -> Announcement | Unannounced:
        if job_id in self._ended:
            return Unannounced.OVER
        if job_id in self._known:
            return Unannounced.KNOWN
        if len(self._known) >= MAX_ANNOUNCED or self._blocks + len(keys) > self._most_blocks:
            return Unannounced.FULL
        entry = self._known[job_id] = Announcement(job_id=job_id, keys=keys, tenant=tenant, until_s=until_s)
        self._blocks += len(keys)
        return entry

    def next(self) -> Announcement | None:
        """The oldest that waits; it is read from now on, until :meth:`was_read`."""
        entry = next((entry for entry in self._known.values() if entry.state is AnnouncedState.WAITING), None)
        if entry is not None:
            entry.state = AnnouncedState.READING
        return entry

    def arrived(self, job_id: JobId) -> None:
        """The job has come: what was not begun for it is its own to read."""
        entry = self._known.get(job_id)
        if entry is not None and entry.state is AnnouncedState.WAITING:
            entry.state = AnnouncedState.KEPT

    def was_read(self, entry: Announcement) -> None:
        """As far as it could be. One that is over stays so."""
        if entry.state is AnnouncedState.READING:
            entry.state = AnnouncedState.KEPT

    def end(self, job_id: JobId) -> bool:
        """The job has its blocks, or is over, announced or not; whether anything was announced for it."""
        self._ended[job_id] = None
        if len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        entry = self._known.pop(job_id, None)
        if entry is None:
            return False
        entry.state = AnnouncedState.OVER
        self._blocks -= len(entry.keys)
        return True
