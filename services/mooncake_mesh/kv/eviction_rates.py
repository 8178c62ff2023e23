"""How soon blocks are used again: one law for all kinds of blocks, learned while the pool works.

A block of kind k that was last used *age* ago is used again at the rate ``tendency(k) / (scale + age)``: the longer
nothing came, the less is to be expected, in the way of a Lomax (shifted Pareto) distribution. A kind has one number to
learn, so a few hundred blocks teach it; its estimate is uses divided by exposure, where a block that was watched up to
*age* adds ``log(1 + age / scale)`` to the exposure, used in the end or not. Both start from a prior.

Ages are counted in uses of blocks of the whole pool. So there is no clock, and since the scale is learned too (half
the median age at which blocks are used), it does not matter how large blocks are or how busy the pool is.
"""

import enum
from collections import deque
from math import log1p
from typing import Final

_FIRST_SCALE: Final = 6_000.0
_SCALE_OF_MEDIAN: Final = 0.5
_MEDIAN_STEP: Final = 1.001
_PRIOR_EXPOSURE: Final = 2_000.0
_MEMORY_EXPOSURE: Final = 100_000.0
_CHECKPOINTS: Final = tuple(1 << bits for bits in range(8, 21))


class Circumstance(enum.Enum):
    """What a block was when it was last used."""

    OPENING = "opening"
    """In a chain of which nothing was known."""
    BRANCH = "branch"
    """In a chain of which only a prefix was known that many chains share, such as a system prompt."""
    CONTINUED = "continued"
    """In a chain that continued an earlier one."""
    LAST = "last"
    """Last of its chain: often partial or followed by other tokens the next time."""
    LEFT = "left"
    """In the tail of a chain whose continuation took another way."""
    SHARED = "shared"
    """Itself in the prefix of many chains."""


Kind = tuple[Circumstance, int]
"""A circumstance, and how much of it: octave of the length of a new chain, uses of a continued one; else 0."""


def prior_tendency(kind: Kind) -> float:
    """What is believed of *kind* before anything was seen."""
    match kind:
        case (Circumstance.CONTINUED, times):
            return 0.15 + 0.075 * (times - 1)
        case (Circumstance.LAST | Circumstance.LEFT, _):
            return 0.015
        case (Circumstance.SHARED, _):
            return 1.5
        case _:
            return 0.1


class Tally:
    """What was seen of one kind."""

    __slots__ = ("_exposure", "_uses", "kind")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._uses = _PRIOR_EXPOSURE * prior_tendency(kind)
        self._exposure = _PRIOR_EXPOSURE

    @property
    def tendency(self) -> float:
        return self._uses / self._exposure

    def add(self, uses: int, exposure: float) -> None:
        self._uses += uses
        self._exposure += exposure
        if self._exposure > _MEMORY_EXPOSURE:  # what was learned long ago counts for less and less
            self._uses /= 2
            self._exposure /= 2


class Watched:
    """Blocks of one kind that were used together, seen from the law."""

    __slots__ = ("blocks", "exposed", "since", "tally")

    def __init__(self, tally: Tally, since: int) -> None:
        self.tally = tally
        self.since = since
        self.blocks = 0
        self.exposed = 0.0  # of each block, what the tally has of it already


class ReuseLaw:
    """The rates of all kinds. O(1) for each group of blocks told of."""

    def __init__(self) -> None:
        self._tallies: dict[Kind, Tally] = {}
        self._median = _FIRST_SCALE / _SCALE_OF_MEDIAN
        self._stages: list[deque[tuple[int, Watched]]] = [deque() for _ in _CHECKPOINTS]

    @property
    def scale(self) -> float:
        return self._median * _SCALE_OF_MEDIAN

    def tally(self, kind: Kind) -> Tally:
        tally = self._tallies.get(kind)
        if tally is None:
            tally = self._tallies[kind] = Tally(kind)
        return tally

    def rate(self, tally: Tally, age: int) -> float:
        """Uses of a block to be expected in the next unit of age."""
        return tally.tendency / (self.scale + age)

    def used(self, watched: Watched, n: int, now: int) -> None:
        """*n* blocks of *watched*, which no longer counts them, were used again."""
        age = now - watched.since
        watched.tally.add(n, n * (log1p(age / self.scale) - watched.exposed))
        if watched.tally.kind[0] is not Circumstance.SHARED:  # used all the time, they would be the median
            self._median *= _MEDIAN_STEP ** (n if age > self._median else -n)

    def watch(self, watched: Watched) -> None:
        """Count the exposure of *watched* from its ``since`` on, until that changes or no blocks are left in it."""
        self._stages[0].append((watched.since, watched))

    def advance(self, now: int) -> None:
        """Count the exposure of all groups that have come to the next checkpoint by *now*."""
        for i, checkpoint in enumerate(_CHECKPOINTS):
            stage = self._stages[i]
            while stage and stage[0][0] + checkpoint <= now:
                entry = stage.popleft()
                since, watched = entry
                if watched.since != since or not watched.blocks:
                    continue
                exposed = log1p(checkpoint / self.scale)
                watched.tally.add(0, watched.blocks * (exposed - watched.exposed))
                watched.exposed = exposed
                if i + 1 < len(_CHECKPOINTS):
                    self._stages[i + 1].append(entry)
