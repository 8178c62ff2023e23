"""What a decode instance decides, pure: who is in the batch, what each step brought, who must make room.

::

    WAITING ──(KV landed and first token known)──► READY ──(gate open)──► RUNNING ──► FINISHED
       └──────────────────┴─────────────────────────────────────────────────┴──────► STOPPED

A sequence whose prompt is computed here waits for that instead of KV and token, and is FINISHED at once where the first
token is the last.

A job with a gate joins no batch, and its first token is shown to nobody, before :meth:`DecodeCore.open_gates` says so;
one that is refused is for the caller to stop.

A sequence is *stalled* in a step when its next token has no block yet: growth is asked for ahead of need, and a
sequence that cannot get any makes another one go (see preemption.py). Either way the text of that one does not change:
READY or RUNNING, it is SWAPPED and READY again later, or it is STOPPED, and its request placed again with the tokens
drawn so far.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Final

from mooncake_mesh.decode.growth import GROW_AHEAD_TOKENS, is_short, room_tokens, wanted_blocks
from mooncake_mesh.decode.preemption import first_back, first_to_go, swap_keys
from mooncake_mesh.decode.sequences import (
    ACTIVE,
    BEGUN,
    MOVES,
    DecodeSequence,
    GateVerdicts,
    NewToken,
    QueueFull,
    SequenceStage,
    WholeBlocks,
    candidates,
    room_for_tokens,
    seal_whole_blocks,
)
from mooncake_mesh.errors import InvalidTransition
from mooncake_mesh.policy.cost_model import StepCost
from mooncake_mesh.policy.decisions import Refused
from mooncake_mesh.policy.decode_gate import Batch, Verdict, joining, overdue, verdicts
from mooncake_mesh.policy.stopping import finish_after
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey, JobId
from mooncake_proto.serving import DecodeJob, FinishReason

_MAX_EARLY_TOKENS: Final = 1024
_SHARE_BLOCKS: Final = 4
_DECODED_MEMORY: Final = 0.95
_RECENT_STEPS: Final = 4
_ADMISSION: Final = attrgetter("admission")


class DecodeCore:
    """All sequences of one decode instance, in order of admission.

    *step_cost* replaces what the jobs' gates say of step times. What is done at every step costs time by the sequences
    that do not wait: behind a long prefill queue thousands may wait here.
    """

    def __init__(self, *, block_tokens: int, max_batch: int, max_jobs: int, step_cost: StepCost | None = None) -> None:
        self._block_tokens = block_tokens
        self.max_batch = max_batch
        self._max_jobs = max_jobs
        self._step_cost = step_cost
        self._sequences: dict[JobId, DecodeSequence] = {}
        self._n_admitted = 0
        self._unheld: list[DecodeSequence] = []  # those that do not wait
        self._waiting_tokens = 0
        self._gated: dict[JobId, DecodeSequence] = {}
        self._early_tokens: OrderedDict[JobId, int] = OrderedDict()
        self._recent: deque[tuple[int, int, float]] = deque(maxlen=_RECENT_STEPS)
        self.decoded_tokens = 0.0
        self.steps = 0
        self.preemptions = 0

    # --- looking ------------------------------------------------------------------------------------------------------

    @property
    def n_jobs(self) -> int:
        return len(self._sequences)

    @property
    def n_waiting(self) -> int:
        return len(self._sequences) - len(self._unheld)

    @property
    def n_swapped(self) -> int:
        return sum(seq.stage is SequenceStage.SWAPPED for seq in self._unheld)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the sequences whose KV, first token or grant is still to come."""
        return self._waiting_tokens

    @property
    def running_tokens(self) -> int:
        """Tokens of all other sequences."""
        return sum(seq.length for seq in self._unheld)

    def progress(self) -> tuple[tuple[int, int], ...]:
        """(tokens, tokens decoded here) of every sequence that does not wait, in order of admission."""
        return tuple([(seq.length, seq.decoded) for seq in self._unheld])

    def recent_steps(self) -> tuple[tuple[int, int, float], ...]:
        """(sequences, tokens of KV, seconds) of the last steps, newest last."""
        return tuple(self._recent)

    def unheld(self) -> Sequence[DecodeSequence]:
        """The sequences of :meth:`progress`; not to be kept."""
        return self._unheld

    def get(self, job_id: JobId) -> DecodeSequence | None:
        return self._sequences.get(job_id)

    def sequences(self) -> list[DecodeSequence]:
        return list(self._sequences.values())

    # --- towards the batch --------------------------------------------------------------------------------------------

    def submit(self, job: DecodeJob, now_s: float) -> DecodeSequence | QueueFull:
        """Enter a job, which must be new: it waits for its KV and its first token."""
        if len(self._sequences) >= self._max_jobs:
            return QueueFull.QUEUE_FULL
        if job.job_id in self._sequences:
            raise InvalidTransition(
                f"job {job.job_id}", old=self._sequences[job.job_id].stage.value, new=SequenceStage.WAITING.value
            )
        prompt_tokens, n_keys = len(job.tokens) // 4, len(job.keys) // BLOCK_KEY_BYTES
        self._n_admitted += 1
        sequence = DecodeSequence(
            admission=self._n_admitted,
            job=job,
            prompt_tokens=prompt_tokens,
            length=prompt_tokens,
            drawn=job.drawn_tokens,
            admitted_s=now_s,
            is_granted=job.gate is None,
            last_key=BlockKey(job.keys[-BLOCK_KEY_BYTES:] if n_keys else job.key_root),
            sealed_blocks=n_keys,
        )
        self._sequences[job.job_id] = sequence
        self._waiting_tokens += sequence.length
        if job.gate is not None:
            self._gated[job.job_id] = sequence
        if (early := self._early_tokens.pop(job.job_id, None)) is not None:
            self.first_token(job.job_id, early)
        return sequence

    def landed(self, sequence: DecodeSequence, blocks: Sequence[int]) -> None:
        """All KV of the prompt is in *blocks*, the sequence's from now on."""
        sequence.blocks = list(blocks)
        sequence.is_landed = True
        self._perhaps_ready(sequence)

    def first_token(self, job_id: JobId, token: int, now_s: float = inf) -> None:
        """The token that prefill drew, known since *now_s*; a second one changes nothing.

        One for an unknown job is kept for a while: a fast prefill may be done before the job has arrived here.
        """
        sequence = self._sequences.get(job_id)
        if sequence is None:
            self._early_tokens[job_id] = token
            if len(self._early_tokens) > _MAX_EARLY_TOKENS:
                self._early_tokens.popitem(last=False)
            return
        if sequence.has_first_token or sequence.is_over:
            return
        self._append(sequence, token)
        sequence.has_first_token = True
        if sequence.is_granted:
            sequence.shown_s = now_s
        self._perhaps_ready(sequence)

    def prefilled(self, sequence: DecodeSequence, blocks: Sequence[int], token: int) -> FinishReason | None:
        """The prompt was computed here, in *blocks*, and *token* drawn. Whether and why the sequence ends with it."""
        finish = finish_after(token, sequence.drawn, sequence.job.stopping)
        sequence.blocks = list(blocks)
        sequence.is_landed = True
        sequence.has_first_token = True
        self._append(sequence, token)
        self._move(sequence, SequenceStage.READY if finish is None else SequenceStage.FINISHED)
        return finish

    def _perhaps_ready(self, sequence: DecodeSequence) -> None:
        if sequence.is_landed and sequence.has_first_token and sequence.stage is SequenceStage.WAITING:
            self._move(sequence, SequenceStage.READY)

    def open_gates(self, now_s: float) -> GateVerdicts:
        """Decide on all jobs with a gate that are not granted yet; those granted may join the next batch."""
        gated = [seq for seq in self._gated.values() if seq.stop is None and seq.has_first_token]
        if not gated:
            return GateVerdicts()
        shown: list[DecodeSequence] = []
        refused: list[tuple[DecodeSequence, Refused]] = []
        asking = [seq for seq in gated if not seq.is_shown and (seq.stage is SequenceStage.READY or seq.is_checked)]
        found = verdicts(self._shown(), candidates(asking, now_s), self._step_cost)
        for sequence, verdict in zip(asking, found, strict=True):
            if verdict is Verdict.GRANTED:
                sequence.is_shown = True
                sequence.shown_s = now_s
                self._waits_no_more(sequence)
                shown.append(sequence)
            elif isinstance(verdict, Refused):
                refused.append((sequence, verdict))
        landing = [seq for seq in gated if seq.stage is SequenceStage.WAITING and not seq.is_checked]
        refused += [(seq, late) for seq in landing if (late := overdue(seq.left_s(now_s))) is not None]
        return GateVerdicts(shown=tuple(shown), granted=self._grant(now_s), refused=tuple(refused))

    def _grant(self, now_s: float) -> tuple[DecodeSequence, ...]:
        """Let those begin whose first token is out, whose KV is here, and for whom there is room."""
        shown = [seq for seq in self._gated.values() if seq.is_shown and seq.stage is SequenceStage.READY]
        begun = self._of([seq for seq in self._unheld if seq.is_granted and seq.stage in BEGUN])
        granted = shown[: joining(begun, candidates(shown, now_s))]
        for sequence in granted:
            sequence.is_granted = True
            del self._gated[sequence.job.job_id]
        return tuple(granted)

    def _shown(self) -> Batch:
        """All whose first token is out, whether they are decoded already or not."""
        begun = (seq for seq in self._unheld if not seq.is_over)
        return self._of([seq for seq in begun if seq.is_shown or (seq.is_granted and seq.stage in BEGUN)])

    def batch(self) -> Batch:
        """All that may be decoded now, those that are about to join included."""
        return self._of([seq for seq in self._unheld if seq.is_granted and seq.stage in ACTIVE])

    def _of(self, sequences: Sequence[DecodeSequence]) -> Batch:
        return Batch(jobs=len(sequences), tokens=sum(seq.length for seq in sequences), max_jobs=self.max_batch)

    def n_coming(self, most: int) -> int:
        """Sequences that join the batch when their KV has landed, counted up to *most*."""
        return sum(1 for _ in islice((seq for seq in self._sequences.values() if seq.is_coming), most))

    def longest_wait_s(self, now_s: float) -> float:
        """How long those that join the next batch have waited for it since their first token could be shown."""
        shown_s = [
            seq.shown_s
            for seq in self._unheld
            if seq.stage is SequenceStage.READY
            and seq.is_granted
            and len(seq.blocks) * self._block_tokens >= seq.length
        ]
        return max(0.0, now_s - min(shown_s, default=inf))

    # --- steps --------------------------------------------------------------------------------------------------------

    def plan_step(self) -> list[DecodeSequence]:
        """The next batch: who runs keeps running, ready ones join as places allow; each oldest first.

        Stalled sequences sit out.
        """
        running, ready, block_tokens = [], [], self._block_tokens
        for sequence in self._unheld:  # the loop of every step: no calls in it
            if sequence.stop is None and len(sequence.blocks) * block_tokens >= sequence.length:
                if sequence.stage is SequenceStage.RUNNING:
                    running.append(sequence)
                elif sequence.stage is SequenceStage.READY and sequence.is_granted:
                    ready.append(sequence)
        batch = running[: self.max_batch]
        joining = ready[: self.max_batch - len(batch)]
        for sequence in joining:
            self._move(sequence, SequenceStage.RUNNING)
        return batch + joining

    def step_finished(self, batch: Sequence[DecodeSequence], drawn: Sequence[int]) -> list[NewToken]:
        """Enter one drawn token for each sequence of *batch* that still runs."""
        news = []
        for sequence, token in zip(batch, drawn, strict=True):
            if sequence.stage is not SequenceStage.RUNNING or sequence.stop is not None:
                continue
            position = sequence.drawn
            finish = finish_after(token, position, sequence.job.stopping)
            self._append(sequence, token)
            if finish is not None:
                self._note_length(sequence.decoded)
                self._move(sequence, SequenceStage.FINISHED)
            news.append(NewToken(sequence=sequence, position=position, token=token, finish=finish))
        return news

    def stepped(self, sequences: int, tokens: int, elapsed_s: float, *, steps: int = 1) -> None:
        """*steps* took *elapsed_s* each, the last of them over *tokens* of KV: a sample for whoever predicts them."""
        self.steps += steps
        self._recent.append((sequences, tokens, elapsed_s))

    def wants_growth(self) -> dict[JobId, int]:
        """Sequences that will need more blocks soon, marked as growing, and how many."""
        wanted = {}
        block_tokens = self._block_tokens
        for sequence in self._unheld:
            if len(sequence.blocks) * block_tokens - sequence.length >= GROW_AHEAD_TOKENS:  # most, at every step
                continue
            if not sequence.is_growing and is_short(sequence, block_tokens):
                sequence.is_growing = True
                wanted[sequence.job.job_id] = wanted_blocks(sequence, block_tokens)
        return wanted

    def grown(self, sequence: DecodeSequence, blocks: Sequence[int]) -> DecodeSequence | None:
        """A growth request was answered. Returns the sequence that must go when a stalled one got nothing.

        Nobody has to go while another is going already: its blocks may be enough.
        """
        sequence.is_growing = False
        if blocks:
            sequence.blocks += blocks
            return None
        if room_tokens(sequence, self._block_tokens) > 0 or sequence.is_over:
            return None
        if any(other.blocks and other.is_leaving for other in self._sequences.values()):
            return None
        return first_to_go([other for other in self._sequences.values() if other.stage in ACTIVE])

    def whole_blocks(self, sequence: DecodeSequence) -> WholeBlocks | None:
        """Blocks of *sequence* that can be shared: a few at a time while it runs, all whole ones once it leaves."""
        return seal_whole_blocks(sequence, self._block_tokens, least=1 if sequence.is_leaving else _SHARE_BLOCKS)

    # --- out of the arena and back ------------------------------------------------------------------------------------

    def preempt(self, sequence: DecodeSequence) -> None:
        """It makes room: what a running step draws for it is dropped, to be drawn again when it is back."""
        self._move(sequence, SequenceStage.SWAPPED)
        sequence.is_growing = False

    def next_back(self) -> DecodeSequence | None:
        """Who comes back next, as soon as there is room for all it had and to go on for a while; None while another one
        is coming, or a sequence in the batch will need blocks soon."""
        away = [seq for seq in self._unheld if seq.stage is SequenceStage.SWAPPED and seq.stop is None]
        if any(seq.is_coming_back for seq in away) or any(is_short(seq, self._block_tokens) for seq in self._unheld):
            return None
        return first_back([seq for seq in away if not seq.blocks])

    def back(self, sequence: DecodeSequence, blocks: Sequence[int], sealed_blocks: int, now_s: float) -> None:
        """All its KV is in *blocks*, the first *sealed_blocks* of which were in the pool: it joins the next batch."""
        keys = swap_keys(sequence, self._block_tokens)
        sequence.blocks = list(blocks)
        sequence.sealed_blocks = sealed_blocks
        sequence.last_key = keys[sealed_blocks - 1] if sealed_blocks else BlockKey(sequence.job.key_root)
        sequence.is_growing = False
        sequence.shown_s = now_s
        self._move(sequence, SequenceStage.READY)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def stopped(self, sequence: DecodeSequence) -> None:
        """End a sequence early; fine for one that is over."""
        if not sequence.is_over:
            self._move(sequence, SequenceStage.STOPPED)

    def forget(self, sequence: DecodeSequence) -> None:
        """A sequence that is over has given everything back: it leaves the books."""
        if not sequence.is_over:
            raise InvalidTransition(f"job {sequence.job.job_id}", old=sequence.stage.value, new="forgotten")
        if self._sequences.pop(sequence.job.job_id, None) is not None:
            del self._unheld[bisect_left(self._unheld, sequence.admission, key=_ADMISSION)]
        self._gated.pop(sequence.job.job_id, None)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _note_length(self, decoded: int) -> None:
        mean = self.decoded_tokens
        self.decoded_tokens = _DECODED_MEMORY * mean + (1 - _DECODED_MEMORY) * decoded if mean else float(decoded)

    def _append(self, sequence: DecodeSequence, token: int) -> None:
        if sequence.length == sequence.prompt_tokens:
            sequence.tokens = room_for_tokens(sequence)
        sequence.tokens[sequence.length] = token
        sequence.length += 1
        sequence.drawn += 1
        if sequence.is_waiting:
            self._waiting_tokens += 1

    def _move(self, sequence: DecodeSequence, stage: SequenceStage) -> None:
        if (sequence.stage, stage) not in MOVES:
            raise InvalidTransition(f"job {sequence.job.job_id}", old=sequence.stage.value, new=stage.value)
        was_waiting, sequence.stage = sequence.is_waiting, stage
        if was_waiting:
            self._waits_no_more(sequence)

    def _waits_no_more(self, sequence: DecodeSequence) -> None:
        """Enter *sequence* among those that do not wait, unless it still does."""
        if not sequence.is_waiting:
            self._waiting_tokens -= sequence.length
            self._unheld.insert(bisect_left(self._unheld, sequence.admission, key=_ADMISSION), sequence)
