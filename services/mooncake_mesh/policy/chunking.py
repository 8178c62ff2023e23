"""How a prompt is cut into chunks that flow through a pipeline of stages. Pure.

Attention grows with the prefix, so equal chunks would take ever longer, and every stage would wait for the one that
has the longest in hand. Chunks get shorter instead, so that each takes a stage equally long. Many chunks fill the
pipeline sooner, but each costs its overhead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Final

from mooncake_mesh.policy.cost_fit import fit_terms

_LEAST_SAMPLES: Final = 6
_SMALLEST_BLOCKS: Final = 4
_LEAST_BASE_TOKENS: Final = 48
"""However few tokens a chunk has, its forward reads all weights: it costs no less than about so many tokens do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Time of a stage for the positions ``start`` .. ``end - 1``: its own, that of the tokens, that of attention.

    Only the ratios of the three matter to a plan.
    """

    base_s: float
    token_s: float
    pair_s: float

    def chunk_s(self, start: int, end: int) -> float:
        return self.base_s + self.work_s(end) - self.work_s(start)

    def work_s(self, tokens: int) -> float:
        """Of a whole prompt in one go, without the overhead."""
        return tokens * (self.token_s + tokens * self.pair_s)

    def tokens_in(self, work_s: float) -> float:
        """The prompt that takes *work_s*: the inverse of :meth:`work_s`."""
        return 2 * work_s / (self.token_s + sqrt(self.token_s**2 + 4 * self.pair_s * work_s))


UNMEASURED: Final = ChunkCost(base_s=5e-3, token_s=1e-4, pair_s=1e-8)
"""Attention as dear as the rest at 10,000 tokens, and an overhead of 50 tokens: about a small model on one core."""


def longest_chunk(chunk_tokens: int) -> int:
    """Most tokens of a chunk in a pipeline, where *chunk_tokens* is how long chunks are without one.

    The first chunk of a long prompt is several times as long as the last one, which must not become too short.
    """
    return 4 * chunk_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSample:
    """What the slowest stage took for one chunk."""

    start: int
    end: int
    elapsed_s: float


def fit_chunk_cost(samples: Sequence[ChunkSample]) -> ChunkCost:
    """The cost that explains *samples* best; UNMEASURED while they are too few to tell.

    An overhead that noise makes nothing of would cut prompts into the smallest chunks, so it has a least value.
    """
    if len(samples) < _LEAST_SAMPLES:
        return UNMEASURED
    terms = [(1.0, s.end - s.start, s.end * s.end - s.start * s.start) for s in samples]
    base_s, token_s, pair_s = fit_terms(terms, [s.elapsed_s for s in samples])
    if token_s == 0.0:  # nothing but overhead and attention: too noisy to plan by
        return UNMEASURED
    return ChunkCost(base_s=max(base_s, _LEAST_BASE_TOKENS * token_s), token_s=token_s, pair_s=pair_s)


def plan_chunks(
    start: int, end: int, *, stages: int, largest: int, block_tokens: int, cost: ChunkCost
) -> tuple[tuple[int, int], ...]:
    """(start, end) of each chunk: of equal time, in whole blocks but the last one, none above *largest* tokens.

    *start* falls between blocks, *largest* is whole blocks. How many there are is what makes the whole shortest.
    """
    if end - start <= block_tokens:
        return ((start, end),)
    most = max(1, (end - start) // min(largest, _SMALLEST_BLOCKS * block_tokens))
    work_s = cost.work_s(end) - cost.work_s(start)
    counts = range(ceil((end - start) / largest), most + 1) or (ceil((end - start) / largest),)
    wanted = min(counts, key=lambda n: (n + stages - 1) * (cost.base_s + work_s / n))
    for count in range(wanted, (end - start) // block_tokens + 2):
        chunks = _equal_chunks(start, end, count, block_tokens, cost)
        if max(last - first for first, last in chunks) <= largest:
            return chunks
    return tuple((at, min(at + largest, end)) for at in range(start, end, largest))


def _equal_chunks(start: int, end: int, count: int, block_tokens: int, cost: ChunkCost) -> tuple[tuple[int, int], ...]:
    first_s, last_s = cost.work_s(start), cost.work_s(end)
    bounds = [start]
    for index in range(1, count):
        at = cost.tokens_in(first_s + (last_s - first_s) * index / count)
        bound = round(at / block_tokens) * block_tokens
        if bounds[-1] < bound < end:
            bounds.append(bound)
    return tuple(zip(bounds, [*bounds[1:], end], strict=True))


def split_layers(
    layer_s: Sequence[float], *, stages: int, first_s: float = 0.0, last_s: float = 0.0
) -> tuple[int, ...]:
    """Layers of each stage such that the slowest stage is as quick as can be.

    *layer_s* are the times of the layers, *first_s* and *last_s* what the first and the last stage do besides (the
    embedding, the head). Among equally good splits the one whose stages differ least. Raises ValueError for more
    stages than layers.
    """
    n = len(layer_s)
    if not 1 <= stages <= n:
        raise ValueError(f"{n} layers make 1 to {n} stages, not {stages}")
    before = [0.0]
    for time_s in layer_s:
        before.append(before[-1] + time_s)

    def stage_s(stage: int, begin: int, stop: int) -> float:
        extra = (first_s if stage == 0 else 0.0) + (last_s if stage == stages - 1 else 0.0)
        return before[stop] - before[begin] + extra

    # best[stop]: (slowest, sum of squares, split) of the stages so far over the layers below stop
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in range(stage + 1, n - (stages - 1 - stage) + 1):
            candidates = []
            for begin, (slowest, squares, split) in best.items():
                if begin < stop:
                    time_s = stage_s(stage, begin, stop)
                    candidates.append((max(slowest, time_s), squares + time_s**2, (*split, stop - begin)))
            if candidates:
                following[stop] = min(candidates)
        best = following
    return best[n][2]
