"""Prompts that a decode instance computes itself: one chunk of one prompt before each step, in order of arrival."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import structlog

from mooncake_mesh.decode.prompt_line import InlinePrompt, PromptLine
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.engine.api import Drawn, Engine, PrefillChunk, SampleRequest
from mooncake_mesh.errors import InternalError, MooncakeError
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_mesh.policy.decode_gate import Batch
from mooncake_mesh.policy.stopping import banned_tokens
from mooncake_mesh.worker.station import Station
from mooncake_proto.serving import FinishReason, FirstToken
from mooncake_proto.transfer import Seal

log = structlog.get_logger(__name__)


class _Stopped(Exception):
    """Raised on the engine thread to leave a forward."""


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
        self._line = PromptLine(block_tokens=self._layout.block_tokens)

    @property
    def is_due(self) -> bool:
        return len(self._line) > 0

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """As :meth:`PromptLine.waiting`."""
        return self._line.waiting()

    def add(self, sequence: DecodeSequence, blocks: Sequence[int], cached_blocks: int) -> None:
        """As :meth:`PromptLine.add`."""
        self._line.add(sequence, blocks, cached_blocks)

    def drop(self, sequence: DecodeSequence) -> bool:
        """As :meth:`PromptLine.drop`; a chunk that is computed right now ends at its next layer, and :meth:`finish`
        tells."""
        return self._line.drop(sequence)

    def start(self, batch: Batch, waited_s: float) -> "asyncio.Future[Drawn | None] | None":
        """Compute the next chunk of the oldest prompt on the engine thread, before a step of *batch*, for which some
        have waited; None where that has no time for one."""
        prompt = self._line.begin(monotonic(), batch.jobs, batch.tokens, waited_s)
        if prompt is None:
            return None
        return self._station.on_engine_thread(_forward, self._engine, self._chunk(prompt), prompt.sequence)

    async def finish(self, forward: "asyncio.Future[Drawn | None]") -> PromptEnd | None:
        """Wait for the chunk that :meth:`start` began; the end of its prompt, if this was it."""
        prompt = self._line.oldest
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
        failure = prompt.sequence.stop or failure or self._share(prompt)
        if failure is None and drawn is None:
            return None
        self._line.pop()
        if failure is None and drawn is not None:
            return PromptEnd(prompt=prompt, result=drawn)
        return PromptEnd(prompt=prompt, result=failure or InternalError("the engine drew no token"))

    def _chunk(self, prompt: InlinePrompt) -> PrefillChunk:
        sequence, start = prompt.sequence, prompt.computed_tokens
        end = start + prompt.next_tokens
        tokens = sequence.prompt
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
            blocks=prompt.blocks,
            sample=sample,
            keys=list(split_keys(sequence.job.keys))[: start // self._layout.block_tokens],
        )

    def _share(self, prompt: InlinePrompt) -> MooncakeError | None:
        """A chunk is computed: share its whole blocks. Returns why the prompt cannot go on, if it cannot."""
        first, keys = self._line.computed()
        if not keys:
            return None
        try:
            self._station.messenger.post(
                Seal(job_id=prompt.sequence.job.job_id, first_block=first, keys=b"".join(keys))
            )
        except MooncakeError as error:
            return error
        return None


def first_token(prompt: InlinePrompt, drawn: Drawn, finish: FinishReason | None, now_s: float) -> FirstToken:
    """What the gateway hears of a prompt that is computed."""
    sequence = prompt.sequence
    return FirstToken(
        job_id=sequence.job.job_id,
        position=sequence.job.drawn_tokens,
        token=drawn.token,
        cached_tokens=prompt.cached_tokens,
        prefill_s=now_s - prompt.started_s,
        queue_s=prompt.started_s - sequence.admitted_s,
        logprob=drawn.logprob,
        finish=finish,
    )


def _forward(engine: Engine, chunk: PrefillChunk, sequence: DecodeSequence) -> Drawn | None:
    """One chunk; on the engine thread. Raises _Stopped, or what the engine raises."""

    def on_layer(_: int) -> None:
        if sequence.stop is not None:
            raise _Stopped

    return engine.prefill(chunk, on_layer)
