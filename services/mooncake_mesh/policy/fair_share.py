"""Each tenant's share of an instance: start-time fair queueing (Goyal, Vin, Cheng 1996).

Virtual time is the service every busy tenant has had. A prompt starts where its tenant's last one ended, or at the
present virtual time if that is later: who was idle has no claim to the past, and who floods the queue is far ahead of
the others, by as much as it has queued. Prompts with an earlier start go first.
"""

from collections.abc import Hashable


class FairShares:
    """What every tenant was given of one instance. Mutated by :meth:`start` and :meth:`served`.

    Memory grows with the tenants that are ahead of virtual time, not with all there ever were.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}

    def start(self, tenant: Hashable, service_s: float) -> float:
        """Note a prompt of *tenant* that takes *service_s*; its virtual start, comparable with those of others."""
        begin = max(self._now, self._ends.get(tenant, self._now))
        self._ends[tenant] = begin + service_s
        return begin

    def served(self, share_start: float) -> None:
        """A prompt with that virtual start is served now. Tenants whose share has been used up by then are forgotten:
        their next prompt starts at the present virtual time."""
        if share_start > self._now:
            self._now = share_start
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

    def idle(self) -> None:
        """Nobody waits: the past is settled, all start as equals."""
        self._ends.clear()
