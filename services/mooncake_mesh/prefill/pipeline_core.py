"""What a head makes of its stages: whether they are one model, what each is told of a chunk, what came of it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from mooncake_mesh.engine.api import Drawn, ModelSpec, PrefillChunk
from mooncake_mesh.errors import Aborted, InternalError, ModelError, MooncakeError
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.prefill.stage_core import StagedPrompt
from mooncake_proto.ids import Incarnation
from mooncake_proto.pipeline import StageChunk, StageChunkDone, StageJoined

_BREAKING: Final = frozenset({"peer_unreachable", "call_timeout", "slice_lost", "transfer_error", "checksum_mismatch"})


def check_stages(spec: ModelSpec, stages: Sequence[StageJoined]) -> None:
    """Raises ModelError unless *stages*, behind a head of *spec*, are one model."""
    layout = spec.layout
    expected = spec.layers.end
    for stage in stages:
        if (stage.fingerprint, stage.dtype) != (spec.fingerprint, layout.dtype.value):
            raise ModelError(f"{stage.instance_id} has another model, or another dtype, than its head")
        if (stage.layers, stage.first_layer, stage.hidden_bytes) != (layout.layers, expected, spec.hidden_bytes):
            raise ModelError(
                f"{stage.instance_id} has layers {stage.first_layer}.., not {expected}..: see pipeline.split"
            )
        expected = stage.end_layer
    if expected != layout.layers:
        raise ModelError(f"the stages of this instance have {expected} of {layout.layers} layers")


def told(
    pipeline: Incarnation, number: int, chunk: PrefillChunk, prompt: StagedPrompt, *, is_first: bool
) -> StageChunk:
    """What every stage is told of a chunk, the first one of its prompt or another."""
    return StageChunk(
        pipeline=pipeline,
        number=number,
        job_id=prompt.job_id,
        transfer_id=prompt.transfer_id,
        start=chunk.start,
        n_tokens=len(chunk.tokens),
        blocks=tuple(chunk.blocks),
        prompt_tokens=prompt.n_tokens,
        keys=prompt.keys if is_first or chunk.sample is not None else b"",
    )


def told_to(stage: StageJoined, told: StageChunk, chunk: PrefillChunk, own_blocks: tuple[int, ...]) -> StageChunk:
    """What one *stage* is told: a far one its own blocks, the last one how to draw from the last chunk."""
    if stage.memory is not None:
        told = replace(told, blocks=own_blocks)
    sample = chunk.sample
    if sample is None or stage.end_layer < stage.layers:
        return told
    return replace(
        told,
        sampling=sample.sampling,
        tokens=sample.history.astype("<i4").tobytes(),
        drawn_tokens=sample.position,
        banned=sample.banned,
    )


def layers_of(stage: StageJoined) -> LayerRange:
    return LayerRange(first=stage.first_layer, end=stage.end_layer, total=stage.layers)


def room_of(stages: Sequence[StageJoined]) -> int | None:
    """Blocks that every far one of *stages* has; None where there is none."""
    return min((stage.memory.n_blocks for stage in stages if stage.memory is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """A chunk that all stages are done with. ``slowest_s`` is the longest time that a stage computed."""

    drawn: Drawn | None
    slowest_s: float


def passed(computed_s: float, answers: Sequence[StageChunkDone]) -> Passed:
    """What became of a chunk that the head computed in *computed_s*. *answers* are those of all further stages."""
    token = answers[-1].token
    return Passed(
        drawn=None if token is None else Drawn(token=token, logprob=answers[-1].logprob),
        slowest_s=max(computed_s, *(answer.compute_s for answer in answers)),
    )


def failure_of(results: Sequence[object]) -> MooncakeError | None:
    """What went wrong first of all: the failure of a stage, rather than what others say who heard of it."""
    failures: list[MooncakeError] = []
    for result in results:
        if isinstance(result, MooncakeError):
            failures.append(result)
        elif isinstance(result, BaseException):
            failures.append(InternalError(f"a chunk failed: {type(result).__name__}"))
    return min(failures, key=_distance, default=None)


def is_breaking(failure: MooncakeError) -> bool:
    """Whether it says of a chunk that the pipeline does not pass chunks on any more."""
    return failure.code in _BREAKING


def _distance(failure: MooncakeError) -> int:
    """From what went wrong. A job is dropped because something else did."""
    return 2 if failure.code == Aborted.code else int(is_breaking(failure))
