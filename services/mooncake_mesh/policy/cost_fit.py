"""Cost models from measurements: least squares over the terms that the work is made of.

Prefill of *n* tokens of which *p* are cached is polynomial: a constant, the *n - p* tokens through the weights, the
*n² - p²* pairs of attention, and *p* tokens of KV to load. A decode step has a constant, its sequences and its KV.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mooncake_mesh.policy.cost_model import one_after_the_other_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSample:
    uncached_tokens: int
    cached_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    batch: int
    context_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    n_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolynomialCost:
    """A CostModel with one coefficient, not negative, for each term."""

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    cached_token_s: float
    step_base_s: float
    step_sequence_s: float
    step_context_token_s: float
    transfer_base_s: float
    transfer_byte_s: float
    ssd_base_s: float = 0.0005
    ssd_byte_s: float = 1e-9

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        pairs = uncached_tokens * (uncached_tokens + 2 * cached_tokens)
        return (
            self.prefill_base_s
            + uncached_tokens * self.prefill_token_s
            + pairs * self.prefill_pair_s
            + cached_tokens * self.cached_token_s
        )

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_base_s + batch * self.step_sequence_s + context_tokens * self.step_context_token_s

    def transfer_s(self, n_bytes: int) -> float:
        return self.transfer_base_s + n_bytes * self.transfer_byte_s

    def ssd_read_s(self, n_bytes: int) -> float:
        return self.ssd_base_s + n_bytes * self.ssd_byte_s

    def mixed_step_s(self, batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
        return one_after_the_other_s(self, batch, context_tokens, chunk_tokens, chunk_start)


def fit_cost(
    prefills: Sequence[PrefillSample], steps: Sequence[StepSample], transfers: Sequence[TransferSample]
) -> PolynomialCost:
    """The model with the least squared relative error over the samples; each kind needs at least one.

    Relative, so that the short prompts are met as well as the long ones.
    """
    prefill = fit_terms(
        [
            (1.0, s.uncached_tokens, s.uncached_tokens * (s.uncached_tokens + 2 * s.cached_tokens), s.cached_tokens)
            for s in prefills
        ],
        [s.elapsed_s for s in prefills],
    )
    step = fit_terms([(1.0, s.batch, s.context_tokens) for s in steps], [s.elapsed_s for s in steps])
    transfer = fit_terms([(1.0, s.n_bytes) for s in transfers], [s.elapsed_s for s in transfers])
    return PolynomialCost(
        prefill_base_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_pair_s=prefill[2],
        cached_token_s=prefill[3],
        step_base_s=step[0],
        step_sequence_s=step[1],
        step_context_token_s=step[2],
        transfer_base_s=transfer[0],
        transfer_byte_s=transfer[1],
    )


def prefill_error(cost: PolynomialCost, samples: Sequence[PrefillSample]) -> float:
    """Mean relative error of *cost* over *samples*, at least one."""
    errors = [abs(cost.prefill_s(s.uncached_tokens, s.cached_tokens) - s.elapsed_s) / s.elapsed_s for s in samples]
    return sum(errors) / len(errors)


def fit_terms(terms: Sequence[Sequence[float]], elapsed_s: Sequence[float]) -> list[float]:
    """Coefficients of *terms*, none negative. Raises ValueError without samples, or for a time that is not positive.

    A term whose coefficient comes out negative is left out and the others fitted again: the worst first.
    """
    if not elapsed_s or min(elapsed_s) <= 0:
        raise ValueError("samples: at least one is needed, and every time must be positive")
    target = np.asarray(elapsed_s, dtype=np.float64)
    matrix = np.asarray(terms, dtype=np.float64) / target[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(np.float64).tiny)
    coefficients: npt.NDArray[np.float64] = np.zeros(matrix.shape[1])
    kept = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept] / scale[kept], np.ones(len(target)), rcond=None)[0]
        if solution.min() >= 0:
            coefficients[kept] = solution / scale[kept]
            break
        del kept[int(solution.argmin())]
    return [float(value) for value in coefficients]
