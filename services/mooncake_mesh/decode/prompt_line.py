"""The line of prompts that a decode instance computes: one chunk with each step, in order of arrival. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.mixed_step import CHUNK_GRAIN_TOKENS, longest_chunk
from mooncake_proto.ids import BlockKey
from mooncake_proto.serving import MixedStep

_NOT_STARTED: Final = -1.0

STRETCH_CHUNKS: Final = 4
"""So many chunks in a row are equally long, unless the batch changes: the last of them keeps the limit, too."""


@dataclass(slots=True, kw_only=True)
class InlinePrompt:
    """A prompt whose blocks are there; the KV of its first ``computed_tokens``, of which the first ``cached_tokens``
    were in the pool, is valid in them. ``started_s`` is when its first chunk began. Its next ``stretch`` chunks have
    ``chunk_tokens``, beside ``sequences`` that are decoded."""

    sequence: DecodeSequence
    blocks: Sequence[int]
    step: MixedStep
    cached_tokens: int
    computed_tokens: int
    chunk_tokens: int = 0
    stretch: int = 0
    sequences: int = 0
    started_s: float = _NOT_STARTED

    @property
    def left_tokens(self) -> int:
        return self.sequence.prompt_tokens - self.computed_tokens

    @property
    def next_tokens(self) -> int:
        """Length of its next chunk."""
        return min(self.chunk_tokens, self.left_tokens)


class PromptLine:
    """Mutated by its owner only, who computes: :meth:`begin`, :meth:`computed`, and :meth:`pop` at a prompt's end."""

    def __init__(self, *, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._queue: deque[InlinePrompt] = deque()
        self._is_computing = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def oldest(self) -> InlinePrompt:
        """Whose turn it is. Raises IndexError without any."""
        return self._queue[0]

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """(tokens still to compute, tokens before them) of each prompt, oldest first."""
        return tuple((prompt.left_tokens, prompt.computed_tokens) for prompt in self._queue)

    def add(self, sequence: DecodeSequence, blocks: Sequence[int], cached_blocks: int) -> None:
        """Compute the prompt of *sequence*, whose job says so, in *blocks*: the first *cached_blocks* are valid."""
        inline = sequence.job.inline_prefill
        assert inline is not None, "the job says who computes its prompt"
        cached_tokens = cached_blocks * self._block_tokens
        self._queue.append(
            InlinePrompt(
                sequence=sequence,
                blocks=blocks,
                step=inline.step,
                cached_tokens=cached_tokens,
                computed_tokens=cached_tokens,
            )
        )

    def drop(self, sequence: DecodeSequence) -> bool:
        """Take a prompt out of the line. False when it is not in it, or a chunk of it is computed right now."""
        for index, prompt in enumerate(self._queue):
            if prompt.sequence is sequence:
                if index == 0 and self._is_computing:
                    return False
                del self._queue[index]
                return True
        return False

    def begin(self, now_s: float, sequences: int, context_tokens: int, waited_s: float = 0.0) -> InlinePrompt | None:
        """The next chunk of the oldest prompt is computed from now on, with a step of *sequences* that have
        *context_tokens* of KV; None where the step has no time for one.

        Some of the sequences may have waited for the step for *waited_s*, as the one before had a chunk: this step is
        shorter by as much, where that keeps the limit from one token to the next.
        """
        prompt = self._queue[0]
        if 0.0 < waited_s < prompt.step.limit_s:
            prompt.stretch = 0
            start = prompt.computed_tokens
            chunk_tokens = longest_chunk(prompt.step, sequences, context_tokens, start, waited_s=waited_s)
            if not chunk_tokens:
                return None
            prompt.chunk_tokens, prompt.stretch, prompt.sequences = chunk_tokens, 1, sequences
        elif not prompt.stretch or prompt.sequences != sequences:
            prompt.chunk_tokens = _chunk_tokens(prompt, sequences, context_tokens)
            prompt.stretch, prompt.sequences = STRETCH_CHUNKS, sequences
        if prompt.started_s == _NOT_STARTED:
            prompt.started_s = now_s
        self._is_computing = True
        return prompt

    def computed(self, chunks: int = 1) -> tuple[int, list[BlockKey]]:
        """So many chunks of it are computed: the index of the first block that became whole, and the keys of all."""
        prompt = self._queue[0]
        self._is_computing = False
        prompt.stretch -= chunks
        first = prompt.computed_tokens // self._block_tokens
        prompt.computed_tokens = min(
            prompt.computed_tokens + chunks * prompt.chunk_tokens, prompt.sequence.prompt_tokens
        )
        return first, list(split_keys(prompt.sequence.job.keys))[first : prompt.computed_tokens // self._block_tokens]

    def pop(self) -> InlinePrompt:
        """The oldest prompt is over, computed or not."""
        self._is_computing = False
        return self._queue.popleft()


def _chunk_tokens(prompt: InlinePrompt, sequences: int, context_tokens: int) -> int:
    """How long the chunks of its next stretch are. One grain at least: it has to end some time."""
    longest = longest_chunk(prompt.step, sequences, context_tokens, prompt.computed_tokens)
    more = STRETCH_CHUNKS - 1
    last_start = min(prompt.computed_tokens + more * longest, max(0, prompt.sequence.prompt_tokens - longest))
    context_tokens += more * sequences
    longest = longest_chunk(prompt.step, sequences, context_tokens, max(prompt.computed_tokens, last_start))
    return max(longest, min(CHUNK_GRAIN_TOKENS, prompt.step.most_tokens))
