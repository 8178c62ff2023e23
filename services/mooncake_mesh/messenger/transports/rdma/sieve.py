"""A bounded map that evicts by SIEVE: a queue in order of insertion, a mark for what was used, and a hand; pure.

The hand walks from the oldest entry to the newest. An entry that was used since the hand last came by loses its mark
and stays where it is; the first one without a mark goes. A hit only sets a mark, so nothing is reordered.
(Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024.)
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SieveMap(Generic[K, V]):
    """At most *capacity* entries, more only while *may_evict* refuses every one of them."""

    def __init__(self, capacity: int, *, may_evict: Callable[[V], bool] = lambda _: True) -> None:
        self._capacity = capacity
        self._may_evict = may_evict
        self._entries: dict[K, V] = {}
        self._visited: set[K] = set()
        self._passed: set[K] = set()
        """What the hand has passed in this round: always the oldest entries, because the dict keeps their order."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        return iter(self._entries.values())

    def items(self) -> Iterator[tuple[K, V]]:
        return iter(self._entries.items())

    def get(self, key: K) -> V | None:
        """The entry, marked as used."""
        value = self._entries.get(key)
        if value is not None:
            self._visited.add(key)
        return value

    def put(self, key: K, value: V) -> list[V]:
        """Add an entry; what had to go for it (an older one under the same key first)."""
        gone = []
        replaced = self.pop(key)
        if replaced is not None:
            gone.append(replaced)
        while len(self._entries) >= self._capacity:
            victim = self._advance()
            if victim is None:
                break
            gone.append(self._entries.pop(victim))
            self._passed.discard(victim)
        self._entries[key] = value
        return gone

    def pop(self, key: K) -> V | None:
        """Take an entry out."""
        self._visited.discard(key)
        self._passed.discard(key)
        return self._entries.pop(key, None)

    def _advance(self) -> K | None:
        """Move the hand to the entry that goes; None when all are in use. A round and a rest clear every mark."""
        for _ in range(3):
            for key, value in self._entries.items():
                if key in self._passed:
                    continue
                if key not in self._visited and self._may_evict(value):
                    return key
                self._visited.discard(key)
                self._passed.add(key)
            self._passed.clear()
        return None
