"""When a decode instance lets a step wait for sequences that are about to join its batch. Pure.

A step costs nearly as much over one sequence as over sixteen. Where decoding has cores of its own that is no matter:
what is not used is lost. Where it shares them with the instances that compute the prompts, each step over the first few
of a burst makes all others come later. So while at least as many are on their way as would step now, steps keep a slow
pace, and the cores are left to those who bring the others.

As soon as more run than come they go on without a pause, and so they do when nobody has come for a while: a stream does
not stand back for a prompt that takes long.
"""

from collections.abc import Sequence
from typing import Final

from mooncake_mesh.decode.sequences import DecodeSequence

_OBJECTIVE_SHARE: Final = 0.5
"""Of the time between tokens that a sequence may have: the step comes on top of the pause."""

_PATIENCE: Final = 5
"""How many times the longest pause steps are slow for those on their way, if none of them comes."""


class Forming:
    """The pace of steps: *most_s* from one to the next, or from when there was somebody to decode."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s: float | None = None
        self._joined_s = float("-inf")

    def began(self, now_s: float) -> None:
        """A step begins."""
        self._since_s = now_s

    def idle(self) -> None:
        """There is nobody to decode."""
        self._since_s = None

    def until_s(self, batch: Sequence[DecodeSequence], n_coming: int, now_s: float) -> float | None:
        """Until when a step over *batch*, which is somebody, may wait while *n_coming* are about to join it; None: it
        should begin now."""
        if self._since_s is None:
            self._since_s = now_s
        if any(seq.decoded == 0 for seq in batch):
            self._joined_s = now_s
        until_s = min(self._since_s + self._pace_s(batch), self._joined_s + _PATIENCE * self._most_s)
        return until_s if n_coming >= len(batch) and now_s < until_s else None

    def _pace_s(self, batch: Sequence[DecodeSequence]) -> float:
        objectives_s = [seq.job.gate.tbt_s for seq in batch if seq.job.gate is not None]
        return min([self._most_s, *(_OBJECTIVE_SHARE * tbt_s for tbt_s in objectives_s)])
