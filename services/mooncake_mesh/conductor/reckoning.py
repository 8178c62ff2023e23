"""When a prefill instance has computed what it was given: reckoned from the placements, put right by its reports. Pure.

A report that agrees with the reckoning as far as times are known changes nothing. So decisions follow from what was
placed and when, not from the milliseconds by which a beat or a prompt was early or late; and a prompt that was placed
just before a beat is not counted twice.
"""

from collections.abc import Sequence
from typing import Final

_SHARE: Final = 0.1
_LEAST_S: Final = 0.01
"""How far reckoning and report may be apart: a share of the work in hand, or of the longest prompt since the instance
was idle, as its pace is not known better; and what messages take."""


class QueueReckoning:
    """One instance's queue. Times are seconds of the conductor's clock; ``busy_until_s`` may be past."""

    __slots__ = ("_longest_s", "busy_until_s")

    def __init__(self) -> None:
        self.busy_until_s = 0.0
        self._longest_s = 0.0

    def placed(self, prefill_s: float, now_s: float) -> None:
        """A prompt that takes *prefill_s* comes behind all others."""
        is_idle = self.busy_until_s <= now_s
        self._longest_s = prefill_s if is_idle else max(self._longest_s, prefill_s)
        self.busy_until_s = max(self.busy_until_s, now_s) + prefill_s

    def reported(self, queued_s: Sequence[float], elapsed_s: float, unseen_s: Sequence[float], now_s: float) -> int:
        """The instance says that prompts of *queued_s* are not computed yet, the first of them begun *elapsed_s* ago.

        Prompts of *unseen_s*, oldest first, were placed too shortly before to know whether the report counts them.
        Returns how many of these it does count, by what agrees best with the reckoning.
        """
        whole_s = sum(queued_s)
        soonest_s = now_s + (whole_s - min(elapsed_s, queued_s[0]) if queued_s else 0.0)
        reckoned_s = max(self.busy_until_s, now_s)
        left_s = sum(unseen_s)
        in_hand_s = max(whole_s + left_s, self._longest_s)
        n_counted, end_s = 0, soonest_s + left_s
        for n, one_s in enumerate(unseen_s, start=1):
            left_s -= one_s
            if abs(soonest_s + left_s - reckoned_s) < abs(end_s - reckoned_s):
                n_counted, end_s = n, soonest_s + left_s
        if abs(end_s - reckoned_s) > _LEAST_S + _SHARE * in_hand_s:
            self.busy_until_s = end_s
        return n_counted
