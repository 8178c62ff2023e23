"""How long a step with a chunk of a prompt takes, as six terms, and how long the chunk may be therefore. Pure.

The conductor takes the terms from its cost model; the decode worker knows, before each step, who is in it.
"""

from math import sqrt
from typing import Final

from mooncake_mesh.policy.cost_model import CostModel
from mooncake_proto.serving import MixedStep

CHUNK_GRAIN_TOKENS: Final = 16
"""Chunks are as many tokens or a multiple."""

LONGEST_CHUNK_TOKENS: Final = 2048

_CHUNK: Final = 256
_START: Final = 4096
_SEQUENCES: Final = 64
_CONTEXT: Final = 65_536
"""Where the terms are taken: far from where a step waits for the weights alone."""


def mixed_step(cost: CostModel, factor: float, limit_s: float) -> MixedStep:
    """The terms of an instance that is *factor* times as slow as *cost* says, whose steps may take *limit_s*.

    Exact for a cost that is a polynomial in these terms, as all fitted ones are.
    """

    def more_s(sequences: int = 0, context: int = 0, chunk: int = _CHUNK, start: int = 0) -> float:
        return factor * cost.mixed_step_s(1 + sequences, context, chunk, start)

    least_s = more_s()
    behind_s = more_s(start=_START) - least_s
    pair_s = more_s(chunk=2 * _CHUNK, start=_START) - more_s(chunk=2 * _CHUNK) - behind_s
    pair_s = max(0.0, pair_s / (2 * _CHUNK * _START))
    token_s = max(0.0, (more_s(chunk=2 * _CHUNK) - least_s) / _CHUNK - 3 * _CHUNK * pair_s)
    sequence_s = max(0.0, more_s(sequences=_SEQUENCES) - least_s) / _SEQUENCES
    return MixedStep(
        limit_s=limit_s,
        most_tokens=LONGEST_CHUNK_TOKENS,
        base_s=max(0.0, least_s - sequence_s - _CHUNK * token_s - _CHUNK * _CHUNK * pair_s),
        sequence_s=sequence_s,
        context_token_s=max(0.0, more_s(context=_CONTEXT) - least_s) / _CONTEXT,
        token_s=token_s,
        before_token_s=max(0.0, behind_s / _START - 2 * _CHUNK * pair_s),
        pair_s=pair_s,
    )


def step_s(step: MixedStep, sequences: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
    """A step of *sequences* with *context_tokens* of KV, and a chunk behind *chunk_start* tokens of its prompt."""
    end = chunk_start + chunk_tokens
    return (
        _without_chunk_s(step, sequences, context_tokens, chunk_start)
        + step.token_s * chunk_tokens
        + step.pair_s * (end * end - chunk_start * chunk_start)
    )


def longest_chunk(
    step: MixedStep, sequences: int, context_tokens: int, chunk_start: int, *, waited_s: float = 0.0
) -> int:
    """The longest chunk, in whole grains, that keeps the limit of such a step, less *waited_s*; 0 if not even one grain
    does."""
    left_s = step.limit_s - waited_s - _without_chunk_s(step, sequences, context_tokens, chunk_start)
    if left_s < 0:
        return 0
    token_s = step.token_s + 2 * step.pair_s * chunk_start
    root_s = token_s + sqrt(token_s * token_s + 4 * step.pair_s * left_s)
    if 2 * left_s >= root_s * step.most_tokens:
        return step.most_tokens
    return int(2 * left_s / root_s) // CHUNK_GRAIN_TOKENS * CHUNK_GRAIN_TOKENS


def _without_chunk_s(step: MixedStep, sequences: int, context_tokens: int, chunk_start: int) -> float:
    return (
        step.base_s
        + step.sequence_s * sequences
        + step.context_token_s * context_tokens
        + step.before_token_s * chunk_start
    )
