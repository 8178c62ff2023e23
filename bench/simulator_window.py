"""Steps of a decode instance between two decisions, taken at once: each takes equally much longer than the one before.

That is so while the same sequences are decoded, each with one more token a step, and chunks of one length are computed
beside them, each behind the one before.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from bench.nodes import NodeKind
from bench.simulator_results import Interval
from mooncake_mesh.decode.prompt_line import InlinePrompt

_STEP_MEMORY: Final = 0.9
_LOGGED_STEPS: Final = 4
"""Steps with a chunk become noticeably longer from one to the next: so many are logged as equal."""


@dataclass(frozen=True, slots=True)
class Window:
    """*sequences* of *context* tokens in all are decoded at its start, at *start_s*; the first step takes *first_s*,
    each one *growth_s* longer than the one before. ``chunk_tokens`` of a prompt are computed in each, 0: of none."""

    start_s: float
    first_s: float
    growth_s: float
    sequences: int
    context: int
    chunk_tokens: int

    def elapsed_s(self, steps: int) -> float:
        return steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_by(self, now_s: float) -> int:
        """Whole steps that are over at *now_s*, as if there were no end."""
        elapsed_s, a, b = now_s - self.start_s, self.growth_s / 2, self.first_s - self.growth_s / 2
        steps = int(elapsed_s / b) if a <= 0 else int((math.sqrt(b * b + 4 * a * elapsed_s) - b) / (2 * a))
        while self.elapsed_s(steps) > elapsed_s:
            steps -= 1
        while self.elapsed_s(steps + 1) <= elapsed_s:
            steps += 1
        return steps

    def step_s_after(self, steps: int, before_s: float) -> float:
        """The live worker's moving average after *steps*, which was *before_s* (0: not known) before them."""
        if not steps:
            return before_s
        memory = _STEP_MEMORY**steps
        average = memory * (before_s or self.first_s) + (1 - memory) * self.first_s
        return average + self.growth_s * (steps - (1 - memory) / (1 - _STEP_MEMORY))

    def intervals(self, steps: int) -> Sequence[Interval]:
        """The lengths of the first *steps*; some in a row as equal."""
        at_once = _LOGGED_STEPS if self.chunk_tokens else steps
        ends = [*range(0, steps, at_once), steps]
        return [
            ((self.elapsed_s(end) - self.elapsed_s(start)) / (end - start), end - start)
            for start, end in pairwise(ends)
        ]

    def sample(self, n: int, kind: NodeKind) -> tuple[int, int, float]:
        """The *n*-th step as a sample of decoding: sequences, tokens of KV, seconds that they take by themselves."""
        tokens = self.context + (n - 1) * self.sequences
        own_s = kind.decode_step_s(self.sequences, tokens) if self.chunk_tokens else None
        return self.sequences, tokens, self.first_s + (n - 1) * self.growth_s if own_s is None else own_s

    def chunks_s(self, steps: int, kind: NodeKind) -> float:
        """By how much chunks have made the first *steps* longer."""
        if not self.sequences:
            return self.elapsed_s(steps)
        decoding, _ = window_of(kind, self.start_s, self.sequences, self.context, None)
        return self.elapsed_s(steps) - decoding.elapsed_s(steps)

    def prompts(self, waiting: tuple[tuple[int, int], ...], steps: int) -> tuple[tuple[int, int], ...]:
        """(tokens to compute, tokens before them) of the prompts that were *waiting* at its start, after *steps*."""
        if not (waiting and steps and self.chunk_tokens):
            return waiting
        (left, before), *others = waiting
        computed = min(left, steps * self.chunk_tokens)
        return ((left - computed, before + computed), *others)


def window_of(
    kind: NodeKind, start_s: float, sequences: int, context: int, prompt: InlinePrompt | None
) -> tuple[Window, int]:
    """The window from *start_s* on, and how many steps of it are alike at most (0: any number)."""
    if prompt is None:
        first_s = kind.decode_step_s(sequences, context)
        growth_s = kind.decode_step_s(sequences, context + sequences) - first_s
        return Window(start_s, first_s, growth_s, sequences, context, 0), 0
    chunk, start = prompt.next_tokens, prompt.computed_tokens
    first_s = kind.mixed_step_s(sequences, context, chunk, start)
    growth_s = kind.mixed_step_s(sequences, context + sequences, chunk, start + chunk) - first_s
    alike = max(1, min(prompt.stretch, prompt.left_tokens // prompt.chunk_tokens))
    return Window(start_s, first_s, growth_s, sequences, context, chunk), alike
