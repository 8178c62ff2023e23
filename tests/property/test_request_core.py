"""A request against workers that do anything in any order: its tokens, its end, and nothing left behind.

The machine plays conductor, workers, network and caller. It keeps, beside the core, what a reader of the commands
would know: which jobs were started where, which were cancelled, which tokens came out.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from mooncake_mesh.errors import Rejected
from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.core import (
    KeySpace,
    RequestCore,
)
from mooncake_mesh.gateway.request_events import (
    AskPlacement,
    CallerLeft,
    CancelAt,
    DeadlinePassed,
    Emit,
    Fail,
    JobForgotten,
    JobsAccepted,
    Looked,
    NotPlaced,
    Placed,
    RequestCommand,
    RequestEvent,
    Started,
    StartJobs,
    WorkerLost,
)
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_mesh.policy.stopping import finish_after
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId, RequestId
from mooncake_proto.serving import (
    DecodeGate,
    DecodeGranted,
    FirstToken,
    GateKind,
    JobFailed,
    MixedStep,
    Placement,
    Sampling,
    Stopping,
    TokenEntry,
    WorkerRef,
)

ROOT = BlockKey(b"r" * 16)
BLOCK_TOKENS = 2
PROMPT = (7, 8, 9)
MAX_REPLACEMENTS = 2
ROOM = ("no_free_blocks", "rejected", "draining")
LOSSES = ("slice_lost", "peer_unreachable", "call_timeout")


def _worker(name: str) -> WorkerRef:
    return WorkerRef(
        instance_id=InstanceId(name),
        incarnation=Incarnation(f"{name}-1"),
        endpoint=f"ipc://{name}",
        node_id=NodeId(name),
        messenger_endpoint=f"ipc://m-{name}",
    )


PREFILLS = [_worker("p0"), _worker("p1")]
DECODES = [_worker("d0"), _worker("d1")]
GATE = DecodeGate(
    kind=GateKind.HOLD,
    tbt_s=0.1,
    step_base_s=0.01,
    step_sequence_s=0.0,
    step_token_s=0.0,
    room_tokens=100,
    decode_s=1.0,
)
STEP = MixedStep(
    limit_s=0.1,
    most_tokens=512,
    base_s=0.01,
    sequence_s=0.0,
    context_token_s=0.0,
    token_s=0.001,
    before_token_s=0.0,
    pair_s=0.0,
)


class RequestMachine(RuleBasedStateMachine):
    """``messages`` holds everything that a worker ever said; each may arrive any number of times, at any time."""

    messages = Bundle("messages")

    @initialize(script=st.lists(st.integers(3, 30), max_size=5), max_new_tokens=st.integers(1, 6))
    def start(self, script: list[int], max_new_tokens: int) -> None:
        self.stopping = Stopping(max_new_tokens=max_new_tokens, stop_token_ids=(2,))
        script = [*script, 2]  # the model's own end, where max_new_tokens is not first
        self.text = []
        for token in script:
            self.text.append(token)
            if finish_after(token, len(self.text) - 1, self.stopping) is not None:
                break
        request = TokenRequest(
            request_id=RequestId("req"),
            model="m",
            prompt=PROMPT,
            sampling=Sampling(),
            stopping=self.stopping,
            deadline_s=60.0,
        )
        self.core = RequestCore(
            request,
            KeySpace(root=ROOT, block_tokens=BLOCK_TOKENS),
            stream_endpoint="ipc://g",
            max_replacements=MAX_REPLACEMENTS,
            started_s=0.0,
        )
        self.out: list[int] = []
        self.ends = 0
        self.asked: list[AskPlacement] = []
        self.started: dict[JobId, StartJobs] = {}
        self.open: set[tuple[JobId, InstanceId]] = set()
        self.rooms = self.losses = 0
        self.lost: set[InstanceId] = set()
        self.accepted_jobs: set[JobId] = set()
        self.shut: set[JobId] = set()
        self.was_refused = False
        self.looks = 0
        self.feed(Started())

    # --- the world ----------------------------------------------------------------------------------------------------

    def feed(self, event: RequestEvent, now_s: float = 1.0) -> None:
        was_over = self.core.is_over
        commands = self.core.handle(event, now_s)
        assert not (was_over and commands), "a request that is over says nothing more"
        for command in commands:
            self.obey(command)

    def obey(self, command: RequestCommand) -> None:
        match command:
            case AskPlacement(schedule=schedule, after_s=after_s):
                known = [*PROMPT, *self.out]
                assert schedule.job_id == self.core.job_id
                assert schedule.prompt_tokens == len(known)
                assert schedule.max_new_tokens == self.stopping.max_new_tokens - len(self.out) >= 1
                assert schedule.keys == join_keys(chain(ROOT, token_bytes(known), BLOCK_TOKENS))
                assert 0.0 <= after_s <= 1.0
                self.asked.append(command)
            case StartJobs(prefill=prefill, decode=decode, placement=placement):
                jobs = [job for job in (prefill, decode) if job is not None]
                job_id = jobs[0].job_id
                assert job_id not in self.started, "a job id is used once"
                assert not self.open, "the jobs of the attempt before were cancelled"
                assert {job.tokens for job in jobs} == {token_bytes([*PROMPT, *self.out])}
                assert {job.drawn_tokens for job in jobs} == {len(self.out)}
                is_single = self.stopping.max_new_tokens - len(self.out) == 1
                if prefill is not None:
                    assert placement.inline_step is None
                    assert (decode is None) == (prefill.decode is None) == is_single
                else:
                    assert decode is not None
                    assert decode.inline_prefill is not None
                    assert decode.inline_prefill.step == placement.inline_step
                self.started[job_id] = command
                assert decode is None or decode.gate == (None if self.out or is_single else placement.gate)
                if decode is not None and decode.gate is not None:
                    assert decode.first_token_within_s == 29.0
                    self.shut.add(job_id)
                self.open.add((job_id, placement.prefill.instance_id))
                if decode is not None:
                    self.open.add((job_id, placement.decode.instance_id))
            case CancelAt(job_id=job_id, workers=workers):
                for worker in workers:
                    assert (job_id, worker.instance_id) in self.open, "started there, and not cancelled before"
                    self.open.remove((job_id, worker.instance_id))
            case Emit(event=event):
                assert event.token == self.text[len(self.out)], "no gap, no repetition"
                assert (event.cached_tokens is not None) == (not self.out)
                assert self.core.job_id not in self.shut, "shown before it was granted"
                self.out.append(event.token)
                self.ends += event.finish is not None
            case Fail():
                self.ends += 1

    def drawn_before(self, job_id: JobId) -> int:
        started = self.started[job_id]
        job = started.prefill or started.decode
        assert job is not None
        return job.drawn_tokens

    def token(self, job_id: JobId, position: int) -> FirstToken | TokenEntry:
        """What a worker of *job_id* draws at *position*: the same as any other worker would, the first at prefill."""
        token = self.text[position]
        finish = finish_after(token, position, self.stopping)
        if position == self.drawn_before(job_id):
            return FirstToken(
                job_id=job_id,
                position=position,
                token=token,
                cached_tokens=0,
                prefill_s=0.1,
                queue_s=0.0,
                finish=finish,
            )
        return TokenEntry(job_id=job_id, position=position, token=token, finish=finish)

    # --- what happens -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.asked)
    @rule(
        prefill=st.sampled_from(PREFILLS),
        decode=st.sampled_from(DECODES),
        which=st.integers(0, 3),
        gate=st.sampled_from((None, GATE)),
        inline_step=st.sampled_from((None, None, STEP)),
    )
    def placed(
        self,
        prefill: WorkerRef,
        decode: WorkerRef,
        which: int,
        gate: DecodeGate | None,
        inline_step: MixedStep | None,
    ) -> None:
        """An answer to a question of now or of earlier, perhaps for the second time."""
        job_id = self.asked[-1 - which % len(self.asked)].schedule.job_id
        answer = Placement(
            job_id=job_id,
            prefill=prefill if inline_step is None else decode,
            decode=decode,
            local_prefix_blocks=0,
            gate=gate,
            ttft_slo_s=30.0,
            inline_step=inline_step,
        )
        self.feed(Placed(placement=answer))

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, 3))
    def granted(self, which: int) -> None:
        job_id = list(self.started)[-1 - which % len(self.started)]
        self.shut.discard(job_id)
        self.feed(DecodeGranted(job_id=job_id))

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, 3))
    def refused_at_decode(self, which: int) -> None:
        """Of a job that nobody has been shown anything of, the decode worker may say that it has no place for it."""
        job_id = list(self.started)[-1 - which % len(self.started)]
        worker = self.started[job_id].placement.decode
        if job_id not in self.shut:
            return
        before = self.core.job_id
        self.feed(
            JobFailed(
                job_id=job_id,
                instance_id=worker.instance_id,
                code="decode_refused",
                message="tbt_objective_at_decode",
                retryable=True,
                retry_after_s=3.0,
            )
        )
        if self.core.job_id != before:
            self.rooms += 1
            self.was_refused = True
            assert worker.instance_id in self.asked[-1].schedule.refused_by

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 3), retry_after_s=st.floats(0, 100))
    def refused(self, which: int, retry_after_s: float) -> None:
        job_id = self.asked[-1 - which % len(self.asked)].schedule.job_id
        n_asked, was_over = len(self.asked), self.core.is_over
        error = Rejected("pool_full", unavailable=False, retry_after_s=retry_after_s)
        self.feed(NotPlaced(job_id=job_id, error=error))
        if len(self.asked) > n_asked:
            assert self.asked[-1].after_s >= 0.05, "never hot"
        elif not was_over and self.core.is_over:
            assert len(self.started) == 0 or (self.was_refused and not self.out), "only what never showed is refused"

    @precondition(lambda self: self.started)
    @rule(target=messages, which=st.integers(0, 3), ahead=st.integers(0, 5))
    def drawn(self, which: int, ahead: int) -> FirstToken | TokenEntry:
        job_id = list(self.started)[-1 - which % len(self.started)]
        position = min(self.drawn_before(job_id) + ahead, len(self.text) - 1)
        return self.token(job_id, position)

    @precondition(lambda self: self.started)
    @rule(target=messages)
    def drawn_all(self) -> object:
        """Everything that the current job draws: how requests finish at all."""
        job_id = list(self.started)[-1]
        return multiple(*(self.token(job_id, at) for at in range(self.drawn_before(job_id), len(self.text))))

    @precondition(lambda self: self.started)
    @rule(
        target=messages,
        which=st.integers(0, 3),
        side=st.integers(0, 1),
        code=st.sampled_from((*ROOM, *LOSSES, "invalid_request")),
    )
    def fails(self, which: int, side: int, code: str) -> JobFailed:
        job_id = list(self.started)[-1 - which % len(self.started)]
        placement = self.started[job_id].placement
        worker = (placement.prefill, placement.decode)[side]
        return JobFailed(
            job_id=job_id,
            instance_id=worker.instance_id,
            code=code,
            message="",
            retryable=code != "invalid_request",
        )

    @rule(message=messages)
    def arrives(self, message: FirstToken | TokenEntry | JobFailed) -> None:
        before = self.core.job_id
        if isinstance(message, TokenEntry) or (isinstance(message, FirstToken) and message.finish is not None):
            self.shut.discard(message.job_id)
        self.feed(message)
        if isinstance(message, JobFailed) and self.core.job_id != before:
            self.count(message.instance_id, before, is_room=message.code in ROOM)

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, 3))
    def accepted(self, which: int) -> None:
        job_id = list(self.started)[-1 - which % len(self.started)]
        if job_id == self.core.job_id:
            self.accepted_jobs.add(job_id)
        self.feed(JobsAccepted(job_id=job_id))

    @rule(worker=st.sampled_from(PREFILLS + DECODES))
    def worker_lost(self, worker: WorkerRef) -> None:
        before = self.core.job_id
        self.feed(WorkerLost(instance_id=worker.instance_id))
        if self.core.job_id != before:
            self.count(worker.instance_id, before, is_room=False)
            assert worker.instance_id in self.asked[-1].schedule.avoid

    def count(self, culprit: InstanceId, job_id: JobId, *, is_room: bool) -> None:
        """What is no loss, want of room or an instance that was known to be lost, must lead to a pause."""
        is_known = culprit in self.lost and job_id not in self.accepted_jobs
        if is_room or is_known:
            self.rooms += 1
            assert self.asked[-1].after_s >= 0.05, "never hot"
        else:
            self.losses += 1
        if not is_room:
            self.lost.add(culprit)

    @rule()
    def looked(self) -> None:
        """A long time later than ever before."""
        before = self.core.job_id
        self.looks += 1
        self.feed(Looked(), 1000.0 * self.looks)
        self.losses += self.core.job_id != before

    @precondition(lambda self: self.started)
    @rule(which=st.integers(0, 3), side=st.integers(0, 1))
    def forgotten(self, which: int, side: int) -> None:
        job_id, before = list(self.started)[-1 - which % len(self.started)], self.core.job_id
        placement = self.started[job_id].placement
        worker = (placement.prefill, placement.decode)[side]
        self.feed(JobForgotten(job_id=job_id, instance_id=worker.instance_id))
        self.losses += self.core.job_id != before

    @precondition(lambda self: self.started)
    @rule()
    def caller_left(self) -> None:
        self.feed(CallerLeft())
        assert self.core.is_over

    @precondition(lambda self: self.started)
    @rule()
    def deadline_passed(self) -> None:
        self.feed(DeadlinePassed())
        assert self.core.is_over

    # --- what holds ---------------------------------------------------------------------------------------------------

    @invariant()
    def at_most_one_end(self) -> None:
        assert self.ends <= 1
        assert self.ends == 0 or self.core.is_over

    @invariant()
    def retries_are_bounded(self) -> None:
        assert self.losses <= MAX_REPLACEMENTS
        assert len(self.started) <= 1 + self.losses + self.rooms

    @invariant()
    def nothing_is_stranded(self) -> None:
        """Open jobs are the current attempt's; after an end only those are left that end by themselves."""
        assert {job_id for job_id, _ in self.open} <= {self.core.job_id}
        if not self.core.is_over or not self.open:
            return
        assert self.out == self.text, "every end but a finished text cancels all"
        by_decode = len(self.out) > self.drawn_before(self.core.job_id) + 1
        assert by_decode or len(self.open) == 1, "the text ended with the first token: only prefill ends by itself"


TestRequestCore = RequestMachine.TestCase
TestRequestCore.settings = settings(stateful_step_count=40)
