"""When a computed prompt begins to be decoded: the second decision of every admission strategy, at the decode worker.

Until it is granted nobody is shown the first token, so that a refusal is a refusal (429).

``check``   the papers' double check, decided when the prompt is computed: granted if all KV that the worker was granted
            leaves room for it and a step with all of that keeps to the TBT objective, refused otherwise. What was
            computed is lost. (Size-neutral: the request itself does not count.) The first token goes out then, and
            its sequence waits for its KV, for room to grow and for a place in the batch after that: between its first
            two tokens.
``hold``    decided when its KV is there as well, and there is room to grow and a place: until then it is held, in order
            of arrival, so that nobody is passed for ever. The wait is time to the first token. Refused when it is
            expected to outlast the time that is left of that, or has.

Asking costs a message on the way of the first token, so whoever goes to an instance that will be at most half loaded
with all that is on its way there is not asked.

Pure functions of values. An empty batch takes whoever is first: who does not fit alone never will.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.config_scheduling import AdmissionKind, LoadMeasure
from mooncake_mesh.policy.admission import TBT_SHARE, Admission
from mooncake_mesh.policy.cost_model import CostModel, StepCost
from mooncake_mesh.policy.decisions import Refused, contended
from mooncake_mesh.policy.forecast import batch_load, decoding_now, freed_after_s
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives
from mooncake_proto.serving import DecodeGate, GateKind

_CHECKS: Final = {
    LoadMeasure.WITH_REQUEST: GateKind.CHECK,
    LoadMeasure.SIZE_NEUTRAL: GateKind.CHECK_SIZE_NEUTRAL,
}

_FREE_LOAD: Final = 0.5
"""Load up to which an instance takes a prompt unasked."""


ROOM_SHARE: Final = 0.98
"""Part of the room for KV in which sequences begin; what is left they grow into."""


class Verdict(enum.Enum):
    GRANTED = "granted"
    HELD = "held"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What an instance decodes, with all that it has granted; at most ``max_jobs`` at a time."""

    jobs: int
    tokens: int
    max_jobs: int

    def with_added(self, tokens: int) -> "Batch":
        return Batch(jobs=self.jobs + 1, tokens=self.tokens + tokens, max_jobs=self.max_jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A computed prompt: its tokens, the first one drawn among them, its gate, and what is left of the time to its
    first token. None: it may wait."""

    tokens: int
    gate: DecodeGate
    left_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStep:
    """Step times as a gate tells them."""

    base_s: float
    sequence_s: float
    token_s: float

    @classmethod
    def of(cls, gate: DecodeGate) -> "LinearStep":
        return cls(base_s=gate.step_base_s, sequence_s=gate.step_sequence_s, token_s=gate.step_token_s)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.base_s + batch * self.sequence_s + context_tokens * self.token_s


def verdicts(batch: Batch, waiting: Sequence[Candidate], cost: StepCost | None = None) -> list[Verdict | Refused]:
    """What becomes of each of *waiting*, oldest first; *batch* is all that was granted. *cost* None: as gates say.

    Those that are granted are in the batch for all that come after them; those that are held, for the ones that are
    held behind them.
    """
    found: list[Verdict | Refused] = []
    ahead = batch
    for candidate in waiting:
        steps = LinearStep.of(candidate.gate) if cost is None else cost
        if candidate.gate.kind is GateKind.HOLD:
            verdict = _held(ahead, candidate, steps)
        else:
            verdict = _checked(batch, candidate, steps)
        found.append(verdict)
        if verdict is Verdict.GRANTED:
            batch = batch.with_added(candidate.tokens)
        if not isinstance(verdict, Refused):
            ahead = ahead.with_added(candidate.tokens)
    return found


def joining(batch: Batch, waiting: Sequence[Candidate]) -> int:
    """How many of *waiting*, who were granted and whose KV is there, have room and a place in *batch* now.

    Oldest first, and nobody is passed.
    """
    for n, candidate in enumerate(waiting):
        after = batch.with_added(candidate.tokens)
        is_full = after.jobs > batch.max_jobs or after.tokens > candidate.gate.room_tokens * ROOM_SHARE
        if batch.jobs and is_full:
            return n
        batch = after
    return len(waiting)


def overdue(left_s: float | None) -> Refused | None:
    """The refusal of a prompt that is held, but whose KV has not come, or found no room, in the time it had."""
    return contended(TTFT_OBJECTIVE) if left_s is not None and left_s <= 0 else None


def gate_for(
    instance: InstanceView,
    cluster: ClusterView,
    cost: CostModel,
    objectives: Objectives,
    admission: Admission,
    *,
    prompt_tokens: int,
    block_tokens: int,
) -> DecodeGate | None:
    """What *instance* needs to know to decide by itself on a prompt; None where it need not, for lack of load or of an
    objective for the time between tokens.

    Exact for step times that are linear in sequences and KV, as all fitted ones are.
    """
    if objectives.tbt_s is None or _is_free(instance, prompt_tokens, block_tokens, cost, objectives.tbt_s):
        return None
    room_tokens = max(1, instance.blocks_total * block_tokens)
    base_s = cost.decode_step_s(0, 0)
    return DecodeGate(
        kind=GateKind.HOLD if admission.kind is AdmissionKind.HOLD else _CHECKS[admission.measure],
        tbt_s=objectives.tbt_s,
        step_base_s=instance.factor * base_s,
        step_sequence_s=instance.factor * max(0.0, cost.decode_step_s(1, 0) - base_s),
        step_token_s=instance.factor * max(0.0, cost.decode_step_s(0, room_tokens) - base_s) / room_tokens,
        room_tokens=room_tokens,
        decode_s=admission.decode_time_s(cluster),
    )


def _is_free(instance: InstanceView, prompt_tokens: int, block_tokens: int, cost: CostModel, tbt_s: float) -> bool:
    """Whether it takes one more without a question, with all that waits there already."""
    load = (
        decoding_now(instance)
        .with_added(1 + instance.waiting_jobs, prompt_tokens + instance.waiting_tokens)
        .load(cost, block_tokens=block_tokens, tbt_s=tbt_s)
    )
    n_jobs = instance.running_jobs + instance.waiting_jobs + 1
    return load <= _FREE_LOAD and n_jobs <= _FREE_LOAD * instance.max_batch


def _checked(batch: Batch, candidate: Candidate, steps: StepCost) -> Verdict | Refused:
    if batch.jobs == 0:
        return Verdict.GRANTED
    gate = candidate.gate
    after = batch.with_added(candidate.tokens) if gate.kind is GateKind.CHECK else batch
    load = batch_load(after.jobs, after.tokens, steps, room_tokens=gate.room_tokens, tbt_s=gate.tbt_s)
    if load <= 1.0:
        return Verdict.GRANTED
    return contended(TBT_OBJECTIVE, after_s=freed_after_s(load - 1.0, load, gate.decode_s))


def _held(ahead: Batch, candidate: Candidate, steps: StepCost) -> Verdict | Refused:
    """*ahead* holds those that wait before it as well: they are served first."""
    gate, after = candidate.gate, ahead.with_added(candidate.tokens)
    tbt_s = gate.tbt_s * TBT_SHARE
    room_tokens = int(gate.room_tokens * ROOM_SHARE)
    load = batch_load(after.jobs, after.tokens, steps, room_tokens=room_tokens, tbt_s=tbt_s)
    load = max(load, after.jobs / ahead.max_jobs)
    if load <= 1.0 or ahead.jobs == 0:
        return Verdict.GRANTED
    wait_s = freed_after_s(load - 1.0, load, gate.decode_s)
    if candidate.left_s is None or wait_s <= candidate.left_s:
        return Verdict.HELD
    return contended(TTFT_OBJECTIVE, after_s=wait_s - max(0.0, candidate.left_s))


TBT_OBJECTIVE: Final = "tbt_objective_at_decode"
TTFT_OBJECTIVE: Final = "ttft_objective_at_decode"
