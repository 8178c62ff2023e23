"""Keeping a cost model true: what was observed over what was predicted, of late."""

from dataclasses import dataclass
from math import exp, log
from typing import Final

_LEAST_WEIGHT: Final = 0.1
_MOST: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """``factor`` times the model's prediction is the best guess after ``samples`` observations.

    ``error`` is how far off such guesses were of late, as a mean share of the observed time; each was made before the
    observation that it is compared with.
    """

    factor: float = 1.0
    error: float = 0.0
    samples: int = 0

    def observed(self, modelled_s: float, observed_s: float) -> "Correction":
        """After one more observation. A geometric mean: twice as long and half as long cancel out.

        The first samples count in full, so that a wrong model is found out quickly; later ones by a tenth. A single
        one is taken for at most a hundred times off. Times that are not positive say nothing.
        """
        if modelled_s <= 0 or observed_s <= 0:
            return self
        weight = max(1.0 / (self.samples + 1), _LEAST_WEIGHT)
        ratio = min(_MOST, max(1 / _MOST, observed_s / modelled_s))
        error = abs(self.factor * modelled_s - observed_s) / observed_s
        return Correction(
            factor=exp((1 - weight) * log(self.factor) + weight * log(ratio)),
            error=(1 - weight) * self.error + weight * error,
            samples=self.samples + 1,
        )
