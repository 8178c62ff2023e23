"""Bounded lives of holders: who must have renewed by when.

The clock is the caller's: ``until_s`` and ``now_s`` are readings of one monotonic clock. A lease is over when
``now_s >= until_s``.
"""

import heapq


class LeaseTable:
    """At most one lease per holder. Granting costs O(log n); what ended or was renewed is dropped lazily."""

    def __init__(self) -> None:
        self._until_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def grant(self, holder: str, until_s: float) -> None:
        """Give *holder* a lease, in place of the one it may have."""
        if self._until_s.get(holder) == until_s:
            return
        self._until_s[holder] = until_s
        heapq.heappush(self._heap, (until_s, holder))
        # Holders that come and go long before their leases end would otherwise pile up in the heap.
        if len(self._heap) > 64 + 4 * len(self._until_s):
            self._heap = [(until_s, name) for name, until_s in self._until_s.items()]
            heapq.heapify(self._heap)

    def end(self, holder: str) -> None:
        """Forget the lease of *holder*, if it has one."""
        self._until_s.pop(holder, None)

    def expired(self, now_s: float) -> list[str]:
        """Holders whose lease is over, in order of expiry, then of name. Their leases are forgotten."""
        over = []
        while self._heap and self._heap[0][0] <= now_s:
            until_s, holder = heapq.heappop(self._heap)
            if self._until_s.get(holder) == until_s:
                del self._until_s[holder]
                over.append(holder)
        return over

    def holders(self) -> list[str]:
        """Everybody who has a lease, ended ones included until :meth:`expired` takes them."""
        return list(self._until_s)
