"""One end of a connection that transfers go out on: a queue pair, what it carries, and what waits for its window."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake_mesh.messenger.transports.rdma.api import Verb
from mooncake_mesh.messenger.transports.rdma.batch import Batch, Slice
from mooncake_mesh.messenger.transports.rdma.memory import LocalMemory
from mooncake_mesh.messenger.transports.rdma.paths import Path
from mooncake_mesh.messenger.transports.rdma.verbs import QueuePair, Work
from mooncake_proto.rdma import RdmaMemory


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One transfer that runs. ``wake`` is set whenever one of its slices came to an end."""

    verb: Verb
    batch: Batch
    local: LocalMemory
    remote: RdmaMemory
    immediate: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    endpoints: set["Endpoint"] = field(default_factory=set)

    @property
    def in_flight(self) -> bool:
        """Whether a NIC may still touch its memory."""
        return any(endpoint.carries(self) for endpoint in self.endpoints)


class Endpoint:
    """A connected queue pair. At most *window* slices are posted at a time; the others wait their turn."""

    def __init__(self, path: Path, pair: QueuePair, window: int) -> None:
        self.path = path
        self.pair = pair
        self.is_broken = False
        self._window = window
        self._waiting: deque[tuple[Transfer, Slice]] = deque()
        self._posted: dict[int, tuple[Transfer, Slice]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._posted and not self._waiting

    def carries(self, transfer: Transfer) -> bool:
        return any(owner is transfer for owner, _ in self._posted.values())

    def add(self, transfer: Transfer, slices: Sequence[Slice]) -> None:
        self._waiting.extend((transfer, piece) for piece in slices)
        transfer.endpoints.add(self)

    def withdraw(self, transfer: Transfer) -> None:
        """Post no more of *transfer*."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not transfer)

    def pump(self, numbers: "Numbers") -> None:
        """Post what the window has room for. Raises TransferError; the endpoint is of no use then."""
        works = []
        while self._waiting and len(self._posted) < self._window:
            transfer, piece = self._waiting.popleft()
            number = numbers.next(self)
            self._posted[number] = (transfer, piece)
            works.append(self._work(number, transfer, piece))
        self.pair.post(works)

    def finished(self, number: int) -> tuple[Transfer, Slice]:
        return self._posted.pop(number)

    def abandon(self) -> tuple[list[int], list[tuple[Transfer, Slice]]]:
        """Close the queue pair, at once and for good; the numbers of what was posted, and all that was not finished."""
        self.is_broken = True
        self.pair.close()
        numbers = list(self._posted)
        left = [*self._posted.values(), *self._waiting]
        self._posted.clear()
        self._waiting.clear()
        return numbers, left

    def _work(self, number: int, transfer: Transfer, piece: Slice) -> Work:
        remote, local = transfer.remote, transfer.local
        key = next(key for key in (*remote.preferred, *remote.secondary) if key.nic == self.path.remote_nic)
        return Work(
            number=number,
            verb=transfer.verb,
            address=local.address + piece.local_offset,
            lkey=local.lkey(self.path.local_nic),
            remote_address=remote.address + piece.remote_offset,
            rkey=key.rkey,
            size_bytes=piece.size_bytes,
            immediate=transfer.immediate,
        )


class Numbers:
    """Numbers of work requests, unique in an engine, and the endpoint that each was posted on. 0 is never given."""

    def __init__(self) -> None:
        self._last = 0
        self._endpoints: dict[int, Endpoint] = {}

    def next(self, endpoint: Endpoint) -> int:
        self._last += 1
        self._endpoints[self._last] = endpoint
        return self._last

    def take(self, number: int) -> Endpoint | None:
        """None for a number of a closed queue pair: its completions may linger."""
        return self._endpoints.pop(number, None)
