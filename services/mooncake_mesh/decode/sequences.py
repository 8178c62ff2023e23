"""The sequences of a decode instance, and what its core says of them: values of decode/core.py."""

import enum
from dataclasses import dataclass, field
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

from mooncake_mesh.engine.api import TokenFilter
from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.policy.decisions import Refused
from mooncake_proto.ids import BlockKey, JobId
from mooncake_proto.serving import DecodeJob, FinishReason


class SequenceStage(enum.Enum):
    WAITING = "waiting"
    READY = "ready"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"


MOVES: Final = frozenset(
    {
        (SequenceStage.WAITING, SequenceStage.READY),
        (SequenceStage.WAITING, SequenceStage.FINISHED),  # computed here, and its first token is all there is
        (SequenceStage.READY, SequenceStage.RUNNING),
        (SequenceStage.RUNNING, SequenceStage.FINISHED),
        (SequenceStage.WAITING, SequenceStage.STOPPED),
        (SequenceStage.READY, SequenceStage.STOPPED),
        (SequenceStage.RUNNING, SequenceStage.STOPPED),
    }
)


ACTIVE: Final = frozenset({SequenceStage.READY, SequenceStage.RUNNING})


class QueueFull(enum.Enum):
    """The answer to one job too many."""

    QUEUE_FULL = "queue_full"


@dataclass(slots=True)
class DecodeSequence:
    """One job. ``tokens[:length]`` are prompt and drawn tokens, from the first one drawn on: whoever waits for that has
    them in its job only. The KV of all but the last one is valid in ``blocks``.

    ``admission`` numbers the jobs of its instance. ``drawn`` counts drawn tokens over all jobs of the request.
    ``is_shown`` says that its gate has let its first token out, ``is_granted`` that it may be decoded, and ``shown_s``
    when its first token was known and free to be shown. ``filter`` rules what may come next. ``stop`` says why the
    sequence should end early.
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

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """Its tokens before any was drawn here; read only."""
        return np.frombuffer(self.job.tokens, dtype="<i4")

    @property
    def arena_job(self) -> JobId:
        """Its name at the messenger, who may know the same request's prefill job: both can be on one node."""
        job_id = self.job.job_id
        return job_id if self.job.inline_prefill is not None else JobId(f"{job_id}:decode")

    @property
    def filter_failure(self) -> MooncakeError | None:
        """Why no further token can be ruled."""
        return None if self.filter is None else self.filter.failure

    @property
    def is_over(self) -> bool:
        return self.stage in (SequenceStage.FINISHED, SequenceStage.STOPPED)

    @property
    def is_waiting(self) -> bool:
        """Whether it is not to be decoded yet: its KV, its first token or a grant is still to come. One whose first
        token is out counts as decoded, room or no room."""
        if self.is_shown:
            return False
        return self.stage is SequenceStage.WAITING or (self.stage is SequenceStage.READY and not self.is_granted)

    @property
    def decoded(self) -> int:
        """Tokens drawn here by steps: the first one came from prefill."""
        return max(0, self.length - self.prompt_tokens - 1)

    def left_s(self, now_s: float) -> float | None:
        """Until its first token is due; None when that is not said."""
        within_s = self.job.first_token_within_s
        return None if within_s is None else self.admitted_s + within_s - now_s

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
