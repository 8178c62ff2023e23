"""Keeping a cost model true: what was observed over what was predicted, of late."""

from dataclasses import dataclass, replace
from math import exp, log
from typing import Final

_LEAST_WEIGHT: Final = 0.1
_MOST: Final = 100.0
_WIDEST: Final = log(1.5)
_STEP: Final = log(1.1)
_STEPS_OFF: Final = 0.8
_EVIDENCE: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """``factor`` times the model's prediction is the best guess after ``samples`` observations.

    ``error`` is how far off such guesses were of late, as a mean share of the observed time; each was made before the
    observation that it is compared with.

    ``pace`` is the factor to compare instances by: *guess*, what was taken for it before anything was observed, or some
    steps of 10 % from it. It changes once what was learned has been off for long: by three times for one sample, by two
    for two, by 12 % for twenty (a cumulative sum). Instances that are equally fast must not look different because
    something else kept one of them busy for a second.
    """

    factor: float = 1.0
    guess: float = 1.0
    steps: int = 0
    evidence: float = 0.0
    error: float = 0.0
    samples: int = 0

    @property
    def pace(self) -> float:
        return self.guess * exp(_STEP * self.steps) if self.steps else self.guess

    def observed(self, modelled_s: float, observed_s: float) -> "Correction":
        """After one more observation. A geometric mean: twice as long and half as long cancel out.

        The first samples count in full, so that a wrong model is found out quickly, but for at most a hundred times
        off; later ones by a tenth, and for at most half as long again as expected, or two thirds of that. Times that
        are not positive say nothing.
        """
        if modelled_s <= 0 or observed_s <= 0:
            return self
        weight = max(1.0 / (self.samples + 1), _LEAST_WEIGHT)
        ratio = min(_MOST, max(1 / _MOST, observed_s / modelled_s))
        error = abs(self.factor * modelled_s - observed_s) / observed_s
        off = log(ratio / self.factor)
        if weight == _LEAST_WEIGHT:
            off = min(_WIDEST, max(-_WIDEST, off))
        factor = self.factor * exp(weight * off)
        steps = log(factor / self.guess) / _STEP
        evidence = max(0.0, self.evidence + abs(steps - self.steps) - _STEPS_OFF)
        is_off = evidence > _EVIDENCE
        return Correction(
            factor=factor,
            guess=self.guess,
            steps=round(steps) if is_off else self.steps,
            evidence=0.0 if is_off else evidence,
            error=(1 - weight) * self.error + weight * error,
            samples=self.samples + 1,
        )

    def unseen(self) -> "Correction":
        """After a while without a sample: the pace is what was guessed, until samples say again that it is not. Who
        looks slow is given nothing, and would never be seen to be quick again."""
        return replace(self, steps=0, evidence=0.0) if self.steps else self
