"""Prompts that a decode instance computes itself: one chunk of one prompt before each step, in order of arrival."""

import asyncio
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import Drawn, Engine, PrefillChunk, SampleRequest
from mooncake_mesh.errors import InternalError, MooncakeError
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.stopping import banned_tokens
from mooncake_mesh.worker.station import Station
from mooncake_proto.serving import FinishReason, FirstToken
from mooncake_proto.transfer import Seal

log = structlog.get_logger(__name__)

_NOT_STARTED: Final = -1.0


class _Stopped(Exception):
    """Raised on the engine thread to leave a forward."""


@dataclass(slots=True, kw_only=True)
class InlinePrompt:
    """A prompt whose blocks are there; the KV of its first ``computed_tokens``, of which the first ``cached_tokens``
    were in the pool, is valid in them. ``started_s`` is when its first chunk began."""

    sequence: DecodeSequence
    blocks: tuple[int, ...]
    chunk_tokens: int
    cached_tokens: int
    computed_tokens: int
    started_s: float = _NOT_STARTED

    def first_token(self, drawn: Drawn, finish: FinishReason | None, now_s: float) -> FirstToken:
        """What the gateway hears of it once it is computed."""
        return FirstToken(
            job_id=self.sequence.job.job_id,
            position=self.sequence.job.drawn_tokens,
            token=drawn.token,
            cached_tokens=self.cached_tokens,
            prefill_s=now_s - self.started_s,
            queue_s=self.started_s - self.sequence.admitted_s,
            logprob=drawn.logprob,
            finish=finish,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEnd:
    """A prompt is computed, or will not be: its first token, or why there is none."""

    prompt: InlinePrompt
    result: Drawn | MooncakeError


class InlinePrompts:
    """Mutated on the loop only. Whoever steps calls :meth:`start` and :meth:`finish` in turn while ``is_due``."""

    def __init__(self, station: Station, engine: Engine) -> None:
        self._station = station
        self._engine = engine
        self._layout = engine.spec.layout
        self._queue: deque[InlinePrompt] = deque()
        self._is_computing = False

    @property
    def is_due(self) -> bool:
        return bool(self._queue)

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """(tokens still to compute, tokens before them) of each prompt, oldest first."""
        return tuple(
            (prompt.sequence.prompt_tokens - prompt.computed_tokens, prompt.computed_tokens) for prompt in self._queue
        )

    def add(self, sequence: DecodeSequence, blocks: tuple[int, ...], cached_blocks: int) -> None:
        """Compute the prompt of *sequence*, whose job says so, in *blocks*: the first *cached_blocks* are valid."""
        inline = sequence.job.inline_prefill
        assert inline is not None, "the job says who computes its prompt"
        cached_tokens = cached_blocks * self._layout.block_tokens
        self._queue.append(
            InlinePrompt(
                sequence=sequence,
                blocks=blocks,
                chunk_tokens=inline.chunk_tokens,
                cached_tokens=cached_tokens,
                computed_tokens=cached_tokens,
            )
        )

    def drop(self, sequence: DecodeSequence) -> bool:
        """Take a prompt out of the line. False when it is not in it, or a chunk of it is computed right now: that ends
        at its next layer, and :meth:`finish` tells."""
        for index, prompt in enumerate(self._queue):
            if prompt.sequence is sequence:
                if index == 0 and self._is_computing:
                    return False
                del self._queue[index]
                return True
        return False

    def start(self) -> "asyncio.Future[Drawn | None]":
        """Compute the next chunk of the oldest prompt on the engine thread."""
        prompt = self._queue[0]
        if prompt.started_s == _NOT_STARTED:
            prompt.started_s = monotonic()
        self._is_computing = True
        return self._station.on_engine_thread(_forward, self._engine, self._chunk(prompt), prompt.sequence)

    async def finish(self, forward: "asyncio.Future[Drawn | None]") -> PromptEnd | None:
        """Wait for the chunk that :meth:`start` began; the end of its prompt, if this was it."""
        prompt = self._queue[0]
        failure, drawn = None, None
        try:
            drawn = await forward
        except _Stopped:
            failure = prompt.sequence.stop
        except Exception as error:  # the failure of one job is reported, and the next one is computed
            log.error("engine_failed", job_id=prompt.sequence.job.job_id, exc_info=error)
            failure = InternalError(f"prefill failed: {type(error).__name__}")
        finally:
            del forward  # its error's traceback would hold this frame, and that the error, and so the arena's pages
        self._is_computing = False
        failure = prompt.sequence.stop or failure or self._advance(prompt)
        if failure is None and drawn is None:
            return None
        self._queue.popleft()
        if failure is None and drawn is not None:
            return PromptEnd(prompt=prompt, result=drawn)
        return PromptEnd(prompt=prompt, result=failure or InternalError("the engine drew no token"))

    def _chunk(self, prompt: InlinePrompt) -> PrefillChunk:
        sequence, start = prompt.sequence, prompt.computed_tokens
        end = self._end(prompt)
        tokens = sequence.tokens[: sequence.prompt_tokens]
        sample = None
        if end == sequence.prompt_tokens:
            job = sequence.job
            sample = SampleRequest(
                sampling=job.sampling,
                position=job.drawn_tokens,
                history=tokens,
                banned=banned_tokens(job.drawn_tokens, job.stopping),
                filter=sequence.filter,
            )
        return PrefillChunk(
            sequence=sequence.job.job_id,
            tokens=tokens[start:end],
            start=start,
            blocks=prompt.blocks[: self._layout.blocks_for(end)],
            sample=sample,
        )

    def _end(self, prompt: InlinePrompt) -> int:
        return min(prompt.computed_tokens + prompt.chunk_tokens, prompt.sequence.prompt_tokens)

    def _advance(self, prompt: InlinePrompt) -> MooncakeError | None:
        """A chunk is computed: share its whole blocks. Returns why the prompt cannot go on, if it cannot."""
        first, end = prompt.computed_tokens // self._layout.block_tokens, self._end(prompt)
        prompt.computed_tokens = end
        keys = list(split_keys(prompt.sequence.job.keys))[first : end // self._layout.block_tokens]
        if not keys:
            return None
        try:
            self._station.messenger.post(
                Seal(job_id=prompt.sequence.job.job_id, first_block=first, keys=b"".join(keys))
            )
        except MooncakeError as error:
            return error
        return None


def _forward(engine: Engine, chunk: PrefillChunk, sequence: DecodeSequence) -> Drawn | None:
    """One chunk; on the engine thread. Raises _Stopped, or what the engine raises."""

    def on_layer(_: int) -> None:
        if sequence.stop is not None:
            raise _Stopped

    return engine.prefill(chunk, on_layer)
