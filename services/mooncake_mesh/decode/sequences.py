"""The sequences of a decode instance, and what its core says of them: values of decode/core.py."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_mesh.engine.api import TokenFilter
from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.kv.block_hash import chain, token_bytes
from mooncake_mesh.policy.decisions import Refused
from mooncake_mesh.policy.decode_gate import Candidate
from mooncake_proto.ids import BlockKey, JobId
from mooncake_proto.serving import DecodeJob, FinishReason, GateKind


class SequenceStage(enum.Enum):
    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    STOPPED = "stopped"


MOVES: Final = frozenset(
    {
        (SequenceStage.WAITING, SequenceStage.READY),
        (SequenceStage.WAITING, SequenceStage.FINISHED),  # computed here, and its first token is all there is
        (SequenceStage.READY, SequenceStage.RUNNING),
        (SequenceStage.RUNNING, SequenceStage.FINISHED),
        (SequenceStage.READY, SequenceStage.SWAPPED),
        (SequenceStage.RUNNING, SequenceStage.SWAPPED),
        (SequenceStage.SWAPPED, SequenceStage.READY),
        (SequenceStage.SWAPPED, SequenceStage.STOPPED),
        (SequenceStage.WAITING, SequenceStage.STOPPED),
        (SequenceStage.READY, SequenceStage.STOPPED),
        (SequenceStage.RUNNING, SequenceStage.STOPPED),
    }
)


ACTIVE: Final = frozenset({SequenceStage.READY, SequenceStage.RUNNING})
BEGUN: Final = ACTIVE | {SequenceStage.SWAPPED}


class QueueFull(enum.Enum):
    """The answer to one job too many."""

    QUEUE_FULL = "queue_full"


@dataclass(slots=True)
class DecodeSequence:
    """One job. ``tokens[:length]`` are prompt and drawn tokens, from the first one drawn on: whoever waits for that has
    them in its job only. The KV of all but the last one is valid in ``blocks``.

    ``admission`` numbers the jobs of its instance. ``drawn`` counts drawn tokens over all jobs of the request.
    ``is_shown`` says that its gate has let its first token out, ``is_granted`` that it may be decoded, and ``shown_s``
    when its first token was known and free to be shown, or since when it is back. ``filter`` rules what may come next.
    ``stop`` says why the sequence should end early. It has been out of the arena ``swaps`` times, and
    ``is_coming_back`` while it waits for room there.
    """

    admission: int
    job: DecodeJob
    prompt_tokens: int
    length: int
    drawn: int
    admitted_s: float
    is_granted: bool
    last_key: BlockKey
    sealed_blocks: int
    stage: SequenceStage = SequenceStage.WAITING
    tokens: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    blocks: list[int] = field(default_factory=list)
    is_landed: bool = False
    has_first_token: bool = False
    is_shown: bool = False
    is_growing: bool = False
    shown_s: float = inf
    filter: TokenFilter | None = None
    stop: MooncakeError | None = None
    swaps: int = 0
    is_coming_back: bool = False

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """Its tokens before any was drawn here; read only."""
        return np.frombuffer(self.job.tokens, dtype="<i4")

    @property
    def arena_job(self) -> JobId:
        """Its name at the messenger, who may know the same request's prefill job: both can be on one node. Each time it
        comes back it has another one: a name that was released gets no blocks any more."""
        name = self.job.job_id if self.job.inline_prefill is not None else f"{self.job.job_id}:decode"
        return JobId(f"{name}:{self.swaps}" if self.swaps else name)

    @property
    def filter_failure(self) -> MooncakeError | None:
        """Why no further token can be ruled."""
        return None if self.filter is None else self.filter.failure

    @property
    def is_over(self) -> bool:
        return self.stage in (SequenceStage.FINISHED, SequenceStage.STOPPED)

    @property
    def is_leaving(self) -> bool:
        """Whether its blocks, if it has any, are about to be given back."""
        return self.stop is not None or self.is_over or self.stage is SequenceStage.SWAPPED

    @property
    def is_checked(self) -> bool:
        """Whether its gate decides as soon as its prompt is computed, wherever its KV is."""
        return self.job.gate is not None and self.job.gate.kind is not GateKind.HOLD

    @property
    def is_waiting(self) -> bool:
        """Whether it is not to be decoded yet: its KV, its first token or a grant is still to come. One whose first
        token is out counts as decoded, room or no room."""
        if self.is_shown:
            return False
        return self.stage is SequenceStage.WAITING or (self.stage is SequenceStage.READY and not self.is_granted)

    @property
    def is_coming(self) -> bool:
        """Whether it waits for nothing but KV that is to land here, and its first token."""
        is_free = self.is_granted or self.is_shown
        is_computed_here = self.job.inline_prefill is not None
        return self.stage is SequenceStage.WAITING and self.stop is None and is_free and not is_computed_here

    @property
    def decoded(self) -> int:
        """Tokens drawn here by steps: the first one came from prefill."""
        return max(0, self.length - self.prompt_tokens - 1)

    def left_s(self, now_s: float) -> float | None:
        """Until its first token is due; None when that is not said."""
        within_s = self.job.first_token_within_s
        return None if within_s is None else self.admitted_s + within_s - now_s

    @property
    def left_tokens(self) -> int:
        """Steps until ``max_new_tokens``."""
        return self.job.stopping.max_new_tokens - self.drawn

    @property
    def position(self) -> int:
        """Where the token fed next stands, and its KV will lie."""
        return self.length - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """What one step brought for one sequence. ``position`` counts the tokens drawn before it."""

    sequence: DecodeSequence
    position: int
    token: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdicts:
    """Sequences whose first token may be shown from now on, that may be decoded from now on, and that must be stopped,
    with the reason."""

    shown: tuple[DecodeSequence, ...] = ()
    granted: tuple[DecodeSequence, ...] = ()
    refused: tuple[tuple[DecodeSequence, Refused], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBlocks:
    """Blocks ``first_block`` onwards of a sequence are whole now; their keys."""

    sequence: DecodeSequence
    first_block: int
    keys: tuple[BlockKey, ...]


def room_for_tokens(sequence: DecodeSequence) -> npt.NDArray[np.int32]:
    """Its prompt, and room for all that may be drawn."""
    job, prompt = sequence.job, sequence.prompt
    tokens = np.zeros(len(prompt) + max(1, job.stopping.max_new_tokens - job.drawn_tokens), dtype=np.int32)
    tokens[: len(prompt)] = prompt
    return tokens


def candidates(sequences: Sequence[DecodeSequence], now_s: float) -> list[Candidate]:
    """What their gates are asked about; those without one are left out."""
    return [
        Candidate(tokens=seq.length, gate=seq.job.gate, left_s=seq.left_s(now_s))
        for seq in sequences
        if seq.job.gate is not None
    ]


def seal_whole_blocks(sequence: DecodeSequence, block_tokens: int, *, least: int) -> WholeBlocks | None:
    """Note the blocks of *sequence* that became whole as shared, if there are *least* of them."""
    whole, first = sequence.position // block_tokens, sequence.sealed_blocks
    if whole - first < least:
        return None
    tokens = sequence.tokens[first * block_tokens : whole * block_tokens]
    keys = chain(sequence.last_key, token_bytes(tokens.tolist()), block_tokens)
    sequence.last_key = keys[-1]
    sequence.sealed_blocks = whole
    return WholeBlocks(sequence=sequence, first_block=first, keys=tuple(keys))
