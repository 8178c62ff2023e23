"""The life of a request at the gateway: each race as a list of events and the exact commands."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from mooncake_mesh.errors import Aborted, DeadlineExceeded, InvalidTransition, Rejected
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.core import (
    CONDUCTOR_UNREACHABLE,
    KeySpace,
    RequestCore,
)
from mooncake_mesh.gateway.request_events import (
    AskAfterJob,
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
    Started,
    StartJobs,
    WorkerLost,
)
from mooncake_mesh.gateway.request_stages import MOVES, RequestStage
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId, RequestId, TransferId
from mooncake_proto.serving import (
    DecodeGate,
    DecodeGranted,
    FinishReason,
    FirstToken,
    GateKind,
    JobFailed,
    Placement,
    Sampling,
    Stopping,
    TokenEntry,
    WorkerRef,
)

ROOT = BlockKey(b"r" * 16)
PROMPT = (10, 11, 12, 13, 14)
GREEDY = Sampling(temperature=0.0)


def worker(name: str) -> WorkerRef:
    return WorkerRef(
        instance_id=InstanceId(name),
        incarnation=Incarnation(f"{name}-1"),
        endpoint=f"ipc://{name}",
        node_id=NodeId(f"node-{name}"),
        messenger_endpoint=f"ipc://m-{name}",
    )


P0, P1, D0, D1 = worker("p0"), worker("p1"), worker("d0"), worker("d1")


def job(attempt: int) -> JobId:
    return JobId(f"req.{attempt}")


def placement(attempt: int, prefill: WorkerRef = P0, decode: WorkerRef = D0) -> Placement:
    return Placement(job_id=job(attempt), prefill=prefill, decode=decode, local_prefix_blocks=0)


def first(
    attempt: int, position: int, token: int, *, finish: FinishReason | None = None, cached: int = 0
) -> FirstToken:
    return FirstToken(
        job_id=job(attempt),
        position=position,
        token=token,
        cached_tokens=cached,
        prefill_s=0.1,
        queue_s=0.0,
        finish=finish,
    )


def entry(attempt: int, position: int, token: int, *, finish: FinishReason | None = None) -> TokenEntry:
    return TokenEntry(job_id=job(attempt), position=position, token=token, finish=finish)


def failed(attempt: int, who: WorkerRef, code: str = "slice_lost", *, retryable: bool = True) -> JobFailed:
    return JobFailed(
        job_id=job(attempt), instance_id=who.instance_id, code=code, message="it failed", retryable=retryable
    )


def core(*, max_new_tokens: int = 4, max_replacements: int = 2) -> RequestCore:
    request = TokenRequest(
        request_id=RequestId("req"),
        model="m",
        prompt=PROMPT,
        sampling=GREEDY,
        stopping=Stopping(max_new_tokens=max_new_tokens, stop_token_ids=(2,)),
        deadline_s=60.0,
    )
    made = RequestCore(
        request,
        KeySpace(root=ROOT, block_tokens=2),
        stream_endpoint="ipc://g",
        max_replacements=max_replacements,
        started_s=100.0,
    )
    assert [type(c) for c in made.handle(Started(), 100.0)] == [AskPlacement]
    return made


def running(attempt: int = 0, **options: int) -> RequestCore:
    """A request whose jobs of attempt 0 are accepted."""
    made = core(**options)
    made.handle(Placed(placement=placement(attempt)), 100.0)
    made.handle(JobsAccepted(job_id=job(attempt)), 100.0)
    assert made.stage is RequestStage.PREFILLING
    return made


def asks(commands: list[RequestCommand]) -> list[tuple[JobId, float, tuple[str, ...]]]:
    return [(c.schedule.job_id, c.after_s, c.schedule.avoid) for c in commands if isinstance(c, AskPlacement)]


def cancels(commands: list[RequestCommand]) -> list[tuple[JobId, tuple[WorkerRef, ...]]]:
    return [(c.job_id, c.workers) for c in commands if isinstance(c, CancelAt)]


def emitted(commands: list[RequestCommand]) -> list[int]:
    return [c.event.token for c in commands if isinstance(c, Emit)]


# --- the straight way -------------------------------------------------------------------------------------------------


def test_started_asks_for_a_place_with_the_chain_of_whole_blocks() -> None:
    request = core()
    [ask] = request.handle(Started(), 100.0)
    assert isinstance(ask, AskPlacement)
    assert (ask.after_s, ask.schedule.prompt_tokens, ask.schedule.max_new_tokens) == (0.0, 5, 4)
    assert ask.schedule.keys == join_keys(chain(ROOT, token_bytes(PROMPT), 2))
    assert len(ask.schedule.keys) == 2 * 16


def test_a_placement_starts_both_jobs_with_what_is_left_of_the_deadline() -> None:
    request = core()
    [start] = request.handle(Placed(placement=placement(0)), 130.0)
    assert isinstance(start, StartJobs)
    assert start.decode is not None
    assert start.prefill is not None
    assert start.prefill.decode == D0
    assert start.prefill.deadline_s == start.decode.deadline_s == 30.0
    assert start.prefill.transfer_id == start.decode.transfer_id == TransferId("req.0.kv")
    assert start.prefill.tokens == start.decode.tokens == token_bytes(PROMPT)
    assert (start.prefill.incarnation, start.decode.incarnation) == (P0.incarnation, D0.incarnation)
    assert start.decode.key_root == ROOT
    assert start.prefill.drawn_tokens == start.decode.drawn_tokens == 0


def test_tokens_come_out_in_order_and_the_last_one_ends_it() -> None:
    request = running()
    assert request.handle(first(0, 0, 50, cached=4), 101.0) == [
        Emit(event=TokenEvent(token=50, cached_tokens=4, queue_s=0.0, prefill_s=0.1)),
    ]
    assert request.stage is RequestStage.DECODING
    assert request.handle(entry(0, 1, 51), 101.0) == [Emit(event=TokenEvent(token=51))]
    end = entry(0, 2, 2, finish=FinishReason.STOP)
    assert request.handle(end, 101.0) == [Emit(event=TokenEvent(token=2, finish=FinishReason.STOP))]
    assert request.is_over
    assert request.handle(end, 101.0) == []
    assert request.handle(CallerLeft(), 101.0) == []


def test_the_first_token_may_overtake_the_acceptance() -> None:
    request = core()
    request.handle(Placed(placement=placement(0)), 100.0)
    assert emitted(request.handle(first(0, 0, 50), 100.0)) == [50]
    assert request.handle(JobsAccepted(job_id=job(0)), 100.0) == []
    assert request.stage is RequestStage.DECODING


def test_tokens_that_overtake_wait_and_repeated_ones_change_nothing() -> None:
    request = running()
    assert request.handle(entry(0, 2, 52), 101.0) == []
    assert request.handle(entry(0, 1, 51), 101.0) == []
    assert emitted(request.handle(first(0, 0, 50), 101.0)) == [50, 51, 52]
    for late in (first(0, 0, 50), entry(0, 1, 51), entry(0, 2, 52)):
        assert request.handle(late, 101.0) == []
    assert emitted(request.handle(entry(0, 3, 53, finish=FinishReason.LENGTH), 101.0)) == [53]
    assert request.stage is RequestStage.FINISHED


def test_nothing_follows_the_last_token_even_if_it_waited() -> None:
    request = running()
    request.handle(entry(0, 2, 99), 101.0)
    request.handle(entry(0, 1, 2, finish=FinishReason.STOP), 101.0)
    assert emitted(request.handle(first(0, 0, 50), 101.0)) == [50, 2]


# --- one token --------------------------------------------------------------------------------------------------------


def test_one_token_needs_no_decode_job_and_nothing_to_cancel() -> None:
    request = core(max_new_tokens=1)
    [start] = request.handle(Placed(placement=placement(0)), 100.0)
    assert isinstance(start, StartJobs)
    assert start.prefill is not None
    assert (start.decode, start.prefill.decode) == (None, None)
    assert request.handle(WorkerLost(instance_id=D0.instance_id), 100.0) == [], "nothing runs there"
    done = request.handle(first(0, 0, 50, finish=FinishReason.LENGTH), 101.0)
    event = TokenEvent(token=50, finish=FinishReason.LENGTH, cached_tokens=0, queue_s=0.0, prefill_s=0.1)
    assert done == [Emit(event=event)]


def test_an_end_on_the_first_token_cancels_the_decode_job_that_waits() -> None:
    request = running()
    commands = request.handle(first(0, 0, 2, finish=FinishReason.STOP), 101.0)
    assert emitted(commands) == [2]
    assert cancels(commands) == [(job(0), (D0,))]
    assert request.stage is RequestStage.FINISHED


def test_a_single_token_that_is_left_after_a_loss_needs_no_decode_job() -> None:
    request = running(max_new_tokens=3)
    request.handle(first(0, 0, 50), 101.0)
    request.handle(entry(0, 1, 51), 101.0)
    [cancel, ask] = request.handle(WorkerLost(instance_id=D0.instance_id), 101.0)
    assert cancels([cancel]) == [(job(0), (P0, D0))]
    assert isinstance(ask, AskPlacement)
    assert (ask.schedule.prompt_tokens, ask.schedule.max_new_tokens) == (7, 1)
    [start] = request.handle(Placed(placement=placement(1, decode=D1)), 101.0)
    assert isinstance(start, StartJobs)
    assert start.decode is None
    assert start.prefill is not None
    assert (start.prefill.tokens, start.prefill.drawn_tokens) == (token_bytes((*PROMPT, 50, 51)), 2)
    assert emitted(request.handle(first(1, 2, 52, finish=FinishReason.LENGTH), 101.0)) == [52]


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_lost_worker_is_avoided_and_the_text_goes_on() -> None:
    request = running()
    request.handle(first(0, 0, 50), 101.0)
    commands = request.handle(WorkerLost(instance_id=D0.instance_id), 101.0)
    assert cancels(commands) == [(job(0), (P0, D0))]
    assert asks(commands) == [(job(1), 0.0, ("d0",))]
    assert request.handle(entry(0, 1, 51), 101.0) == [], "a late word of the earlier job"
    assert request.handle(failed(0, D0), 101.0) == []
    assert request.handle(JobsAccepted(job_id=job(0)), 101.0) == []
    [start] = request.handle(Placed(placement=placement(1, decode=D1)), 101.0)
    assert isinstance(start, StartJobs)
    assert start.prefill is not None
    assert start.prefill.tokens == token_bytes((*PROMPT, 50))
    assert start.prefill.drawn_tokens == 1
    assert emitted(request.handle(first(1, 1, 51), 101.0)) == [51]


def test_the_prefill_worker_matters_until_decoding_shows_that_its_kv_has_landed() -> None:
    request = running()
    request.handle(first(0, 0, 50), 101.0)
    commands = request.handle(WorkerLost(instance_id=P0.instance_id), 101.0)
    assert asks(commands) == [(job(1), 0.0, ("p0",))], "the first token came, but perhaps not all of the KV"
    request.handle(Placed(placement=placement(1, P1)), 101.0)
    request.handle(first(1, 1, 51), 101.0)
    request.handle(entry(1, 2, 52), 101.0)
    assert request.handle(WorkerLost(instance_id=P1.instance_id), 101.0) == []
    assert request.stage is RequestStage.DECODING


def test_a_loss_elsewhere_or_before_a_placement_means_nothing() -> None:
    request = core()
    assert request.handle(WorkerLost(instance_id=P0.instance_id), 100.0) == []
    request.handle(Placed(placement=placement(0)), 100.0)
    assert request.handle(WorkerLost(instance_id=P1.instance_id), 100.0) == []
    request.handle(WorkerLost(instance_id=P0.instance_id), 100.0)
    request.handle(Placed(placement=placement(1, P1, D1)), 100.0)
    assert request.handle(WorkerLost(instance_id=P0.instance_id), 100.0) == [], "a worker of the attempt before"


def test_both_workers_report_the_same_failure_once() -> None:
    request = running()
    assert asks(request.handle(failed(0, D0), 101.0)) == [(job(1), 0.0, ("d0",))]
    assert request.handle(failed(0, P0), 101.0) == []
    assert request.handle(failed(0, D0), 101.0) == []


def test_no_failure_of_a_job_that_is_not_placed_yet() -> None:
    request = running()
    request.handle(failed(0, D0), 101.0)
    assert request.handle(failed(1, D0), 101.0) == []
    assert request.handle(first(1, 0, 50), 101.0) == []
    assert request.stage is RequestStage.PLACING


def test_a_failure_that_no_retry_mends_ends_the_request_everywhere() -> None:
    request = running()
    commands = request.handle(failed(0, P0, "invalid_request", retryable=False), 101.0)
    assert cancels(commands) == [(job(0), (P0, D0))]
    [fail] = [c for c in commands if isinstance(c, Fail)]
    assert (fail.error.code, fail.error.retryable) == ("invalid_request", False)
    assert "p0" in str(fail.error)
    assert request.stage is RequestStage.FAILED


def test_losses_are_counted_and_bounded() -> None:
    request = running(max_replacements=2)
    for attempt in (0, 1):
        request.handle(failed(attempt, D0), 101.0)
        request.handle(Placed(placement=placement(attempt + 1)), 101.0)
        request.handle(JobsAccepted(job_id=job(attempt + 1)), 101.0)
    commands = request.handle(failed(2, D0), 101.0)
    assert [type(c) for c in commands] == [CancelAt, Fail]
    assert cancels(commands) == [(job(2), (P0, D0))]
    assert request.is_over


def test_an_instance_that_is_known_to_be_lost_and_placed_on_again_is_no_new_loss() -> None:
    """Until its lease ends the conductor believes in a dead instance, and there may be no other."""
    request = running(max_replacements=1)
    request.handle(failed(0, D0), 101.0)
    pauses = []
    for attempt in range(1, 4):
        request.handle(Placed(placement=placement(attempt)), 101.0)
        request.handle(first(attempt, attempt - 1, 50), 101.0)  # prefill goes on, whatever became of decode
        [(job_id, pause_s, _)] = asks(request.handle(WorkerLost(instance_id=D0.instance_id), 101.0))
        assert job_id == job(attempt + 1)
        pauses.append(pause_s)
    assert pauses == [0.05] * 3, "each attempt got on by a token"


@pytest.mark.parametrize("code", ["no_free_blocks", "rejected", "overloaded", "draining"])
def test_want_of_room_is_no_loss_names_no_culprit_and_waits_longer_each_time(code: str) -> None:
    request = running(max_replacements=0)
    pauses = []
    for attempt in range(8):
        [(job_id, pause_s, avoid)] = asks(request.handle(failed(attempt, D0, code), 101.0))
        assert (job_id, avoid) == (job(attempt + 1), ())
        pauses.append(pause_s)
        request.handle(Placed(placement=placement(attempt + 1)), 101.0)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    request.handle(first(8, 0, 50), 101.0)
    assert [p for _, p, _ in asks(request.handle(failed(8, D0, code), 101.0))] == [0.05], "it got on in between"


def test_cached_tokens_are_told_with_the_first_token_whichever_job_brings_it() -> None:
    request = running()
    request.handle(failed(0, P0), 101.0)
    request.handle(Placed(placement=placement(1, P1)), 101.0)
    [emit] = request.handle(first(1, 0, 50, cached=2), 101.0)
    assert isinstance(emit, Emit)
    assert emit.event.cached_tokens == 2
    request.handle(failed(1, P1), 101.0)
    request.handle(Placed(placement=placement(2, P0)), 101.0)
    [emit] = request.handle(first(2, 1, 51, cached=4), 101.0)
    assert isinstance(emit, Emit)
    assert emit.event.cached_tokens is None


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_refusal_at_first_is_the_answer() -> None:
    request = core()
    refusal = Rejected("no_worker", unavailable=True, retry_after_s=1.0)
    assert request.handle(NotPlaced(job_id=job(0), error=refusal), 100.0) == [Fail(error=refusal)]


def test_a_new_request_waits_for_instances_that_are_just_starting_but_not_for_long() -> None:
    request = core()
    request.handle(Started(), 100.0)
    starting = NotPlaced(job_id=job(0), error=Rejected("prefill_not_ready", unavailable=True, retry_after_s=5.0))
    assert asks(request.handle(starting, 100.0)) == [(job(0), 0.05, ())]
    assert asks(request.handle(starting, 101.9)) == [(job(0), 0.1, ())]
    assert request.handle(starting, 102.1) == [Fail(error=starting.error)]


def test_a_new_request_waits_for_a_conductor_that_restarts() -> None:
    """Also while the conductor, back again, has not heard of its workers yet."""
    request = core()
    away = Rejected(CONDUCTOR_UNREACHABLE, unavailable=True, retry_after_s=1.0)
    empty = Rejected("no_worker", unavailable=True, retry_after_s=1.0)
    assert asks(request.handle(NotPlaced(job_id=job(0), error=away), 100.0)) == [(job(0), 0.05, ())]
    assert asks(request.handle(NotPlaced(job_id=job(0), error=empty), 101.0)) == [(job(0), 0.1, ())]
    [start] = request.handle(Placed(placement=placement(0)), 101.2)
    assert isinstance(start, StartJobs)


def test_nobody_waits_for_a_conductor_for_ever() -> None:
    request = core()
    away = Rejected(CONDUCTOR_UNREACHABLE, unavailable=True, retry_after_s=1.0)
    assert asks(request.handle(NotPlaced(job_id=job(0), error=away), 100.0))
    assert asks(request.handle(NotPlaced(job_id=job(0), error=away), 114.9))
    assert request.handle(NotPlaced(job_id=job(0), error=away), 115.0) == [Fail(error=away)]


@pytest.mark.parametrize(("reason", "unavailable"), [("pool_full", False), ("prefill_pool_too_small", True)])
def test_a_mesh_that_is_full_or_too_small_refuses_also_after_the_conductor_was_away(
    reason: str, unavailable: bool
) -> None:
    request = core()
    away = Rejected(CONDUCTOR_UNREACHABLE, unavailable=True, retry_after_s=1.0)
    full = Rejected(reason, unavailable=unavailable, retry_after_s=1.0)
    request.handle(NotPlaced(job_id=job(0), error=away), 100.0)
    assert request.handle(NotPlaced(job_id=job(0), error=full), 100.1) == [Fail(error=full)]


@pytest.mark.parametrize(("retry_after_s", "pause_s"), [(0.0, 0.05), (0.3, 0.3), (9.0, 1.0)])
def test_a_refusal_after_a_loss_waits_for_its_turn_never_hot_never_long(retry_after_s: float, pause_s: float) -> None:
    request = running()
    request.handle(failed(0, D0), 101.0)
    refusal = Rejected("pool_full", unavailable=False, retry_after_s=retry_after_s)
    commands = request.handle(NotPlaced(job_id=job(1), error=refusal), 101.0)
    assert asks(commands) == [(job(1), pause_s, ("d0",))]
    again = request.handle(NotPlaced(job_id=job(1), error=Aborted("conductor's fault")), 101.0)
    assert asks(again) == [(job(1), 0.1, ("d0",))]


def test_an_answer_that_comes_twice_or_late_is_ignored() -> None:
    request = running()
    refusal = Rejected("pool_full", unavailable=False, retry_after_s=1.0)
    assert request.handle(NotPlaced(job_id=job(0), error=refusal), 101.0) == []
    assert request.handle(Placed(placement=placement(0)), 101.0) == []
    request.handle(failed(0, D0), 101.0)
    assert request.handle(Placed(placement=placement(0, P1, D1)), 101.0) == []
    assert request.stage is RequestStage.PLACING


# --- ends from outside ------------------------------------------------------------------------------------------------


def test_a_caller_who_leaves_before_a_placement_leaves_nothing() -> None:
    request = core()
    assert request.handle(CallerLeft(), 100.0) == []
    assert request.stage is RequestStage.CANCELLED
    assert request.handle(Placed(placement=placement(0)), 100.0) == []


def test_a_caller_who_leaves_while_a_pause_runs_leaves_nothing() -> None:
    request = running()
    request.handle(failed(0, D0, "no_free_blocks"), 101.0)
    assert request.handle(CallerLeft(), 101.0) == [], "the jobs of attempt 0 were cancelled before"
    assert request.handle(Placed(placement=placement(1)), 101.0) == []


@pytest.mark.parametrize("max_new_tokens", [1, 4])
def test_the_end_from_outside_cancels_what_was_started(max_new_tokens: int) -> None:
    started = (P0,) if max_new_tokens == 1 else (P0, D0)
    left = running(max_new_tokens=max_new_tokens)
    commands = left.handle(CallerLeft(), 101.0)
    assert commands == [CancelAt(job_id=job(0), workers=started, reason="the caller left")]
    late = running(max_new_tokens=max_new_tokens)
    [cancel, fail] = late.handle(DeadlinePassed(), 160.0)
    assert cancels([cancel]) == [(job(0), started)]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, DeadlineExceeded)


# --- moves ------------------------------------------------------------------------------------------------------------


def _pairs() -> Iterator[tuple[RequestStage, RequestStage]]:
    return ((old, new) for old in RequestStage for new in RequestStage if (old, new) not in MOVES)


@pytest.mark.parametrize(("old", "new"), list(_pairs()))
def test_every_other_move_is_refused_and_changes_nothing(old: RequestStage, new: RequestStage) -> None:
    request = core()
    request.stage = old
    with pytest.raises(InvalidTransition) as caught:
        request._move(new)
    assert (caught.value.old, caught.value.new) == (old.value, new.value)
    assert request.stage is old


# --- gates ------------------------------------------------------------------------------------------------------------

GATE = DecodeGate(
    kind=GateKind.CHECK,
    tbt_s=0.1,
    step_base_s=0.01,
    step_sequence_s=0.0,
    step_token_s=0.0,
    room_tokens=100,
    decode_s=1.0,
)


HOLD = replace(GATE, kind=GateKind.HOLD)


def gated(attempt: int = 0, gate: DecodeGate = GATE) -> RequestCore:
    """A request whose first token waits for a grant."""
    made = core()
    [start] = made.handle(Placed(placement=replace(placement(attempt), gate=gate, ttft_slo_s=30.0)), 103.0)
    assert isinstance(start, StartJobs)
    assert start.decode is not None
    assert (start.decode.gate, start.decode.first_token_within_s) == (gate, 27.0), "three seconds went on placing"
    made.handle(JobsAccepted(job_id=job(attempt)), 103.0)
    return made


def no_place(attempt: int, who: WorkerRef = D0, retry_after_s: float = 7.0) -> JobFailed:
    refused = failed(attempt, who, "decode_refused")
    return replace(refused, message="tbt_objective_at_decode", retry_after_s=retry_after_s)


def test_a_first_token_is_shown_once_the_decode_worker_has_granted_it() -> None:
    request = gated(gate=HOLD)
    assert request.handle(first(0, 0, 20), 104.0) == []
    assert request.stage is RequestStage.PREFILLING
    assert emitted(request.handle(DecodeGranted(job_id=job(0)), 105.0)) == [20]
    assert request.handle(WorkerLost(instance_id=P0.instance_id), 106.0) == [], "all KV has landed"
    assert emitted(request.handle(entry(0, 1, 21), 106.0)) == [21]


def test_a_check_that_is_passed_does_not_say_that_the_kv_has_landed() -> None:
    request = gated()
    request.handle(first(0, 0, 20), 104.0)
    assert emitted(request.handle(DecodeGranted(job_id=job(0)), 104.0)) == [20]
    commands = request.handle(WorkerLost(instance_id=P0.instance_id), 105.0)
    assert [c.schedule.refused_by for c in commands if isinstance(c, AskPlacement)] == [()]


def test_a_grant_may_overtake_the_first_token_and_a_decoded_token_the_grant() -> None:
    request = gated()
    assert request.handle(DecodeGranted(job_id=job(0)), 104.0) == []
    assert emitted(request.handle(first(0, 0, 20), 105.0)) == [20]
    request = gated()
    request.handle(first(0, 0, 20), 104.0)
    assert emitted(request.handle(entry(0, 1, 21), 105.0)) == [20, 21]


def test_a_text_that_ends_with_its_first_token_needs_no_grant() -> None:
    request = gated()
    commands = request.handle(first(0, 0, 2, finish=FinishReason.STOP), 104.0)
    assert emitted(commands) == [2]
    assert cancels(commands) == [(job(0), (D0,))]


def test_refused_at_decode_it_is_placed_elsewhere_and_what_was_computed_is_counted() -> None:
    request = gated()
    request.handle(first(0, 0, 20, cached=2), 104.0)
    commands = request.handle(no_place(0), 105.0)
    assert cancels(commands) == [(job(0), (P0, D0))]
    [ask] = [c for c in commands if isinstance(c, AskPlacement)]
    assert (ask.after_s, ask.schedule.avoid, ask.schedule.refused_by) == (0.0, (), (D0.instance_id,))
    request.handle(Placed(placement=replace(placement(1, decode=D1), gate=GATE)), 105.0)
    assert request.handle(first(1, 0, 20, cached=4), 106.0) == []
    assert emitted(request.handle(DecodeGranted(job_id=job(1)), 106.0)) == [20]
    assert request.computed_tokens == 3 + 1


def test_refused_at_decode_and_by_all_others_it_ends_with_the_reason_and_when_to_come_back() -> None:
    request = gated()
    request.handle(first(0, 0, 20), 104.0)
    request.handle(no_place(0), 105.0)
    nobody = NotPlaced(job_id=job(1), error=Rejected("tbt_objective", unavailable=False, retry_after_s=2.0))
    [fail] = request.handle(nobody, 105.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Rejected)
    assert (fail.error.reason, fail.error.retry_after_s) == ("tbt_objective_at_decode", 7.0)
    assert not fail.error.unavailable
    assert request.stage is RequestStage.FAILED


def test_a_prompt_that_waits_in_vain_ends_the_request_unless_it_has_shown_something() -> None:
    late = replace(failed(0, P0, "too_late"), message="ttft_objective_in_queue", retry_after_s=4.0)
    request = gated()
    [_, fail] = request.handle(late, 104.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, Rejected)
    assert (fail.error.code, fail.error.reason, fail.error.retry_after_s) == (
        "rejected",
        "ttft_objective_in_queue",
        4.0,
    )
    request = running()
    request.handle(first(0, 0, 20), 104.0)
    assert asks(request.handle(late, 105.0)) != [], "it has begun: it goes on"


def test_while_its_first_token_is_held_it_can_be_cancelled_lost_and_late() -> None:
    held = gated()
    held.handle(first(0, 0, 20), 104.0)
    assert cancels(held.handle(CallerLeft(), 105.0)) == [(job(0), (P0, D0))]
    late = gated()
    late.handle(first(0, 0, 20), 104.0)
    assert cancels(late.handle(DeadlinePassed(), 160.0)) == [(job(0), (P0, D0))]
    for lost in (P0, D0):
        request = gated()
        request.handle(first(0, 0, 20), 104.0)
        [(again, _, avoid)] = asks(request.handle(WorkerLost(instance_id=lost.instance_id), 105.0))
        assert (again, avoid) == (job(1), (lost.instance_id,))
        assert request.handle(DecodeGranted(job_id=job(0)), 106.0) == [], "of the job that was lost"


def test_a_request_that_was_shown_something_has_no_gate_in_its_next_life() -> None:
    request = gated()
    request.handle(first(0, 0, 20), 104.0)
    request.handle(DecodeGranted(job_id=job(0)), 104.0)
    request.handle(WorkerLost(instance_id=D0.instance_id), 105.0)
    [start] = request.handle(Placed(placement=replace(placement(1), gate=GATE)), 105.0)
    assert isinstance(start, StartJobs)
    assert start.decode is not None
    assert start.decode.gate is None
    assert emitted(request.handle(first(1, 1, 21), 106.0)) == [21]


# --- silence ----------------------------------------------------------------------------------------------------------


def test_after_a_silence_the_workers_are_asked_and_ever_less_often() -> None:
    request = running()  # since 100.0
    assert request.handle(Looked(), 103.9) == []
    ask = [AskAfterJob(job_id=job(0), workers=(P0, D0))]
    assert request.handle(Looked(), 104.1) == ask
    assert request.handle(Looked(), 105.1) == []
    assert request.handle(Looked(), 112.2) == ask
    request.handle(first(0, 0, 50), 113.0)
    assert request.handle(Looked(), 116.9) == []
    assert request.handle(Looked(), 117.1) == ask


def test_a_request_that_waits_for_a_placement_asks_nobody() -> None:
    request = core()
    assert request.handle(Looked(), 500.0) == []


def test_a_first_token_that_was_lost_is_drawn_again() -> None:
    """Its prefill is over, and knows nothing of it any more."""
    request = running()
    commands = request.handle(JobForgotten(job_id=job(0), instance_id=P0.instance_id), 105.0)
    assert asks(commands) == [(job(1), 0.0, ())]


def test_prefill_forgets_a_job_whose_first_token_is_here() -> None:
    request = running()
    request.handle(first(0, 0, 50), 101.0)
    assert request.handle(JobForgotten(job_id=job(0), instance_id=P0.instance_id), 105.0) == []
    commands = request.handle(JobForgotten(job_id=job(0), instance_id=D0.instance_id), 105.0)
    assert asks(commands) == [(job(1), 0.0, ())]


def test_a_token_that_was_lost_between_others_is_drawn_again() -> None:
    request = running()
    request.handle(first(0, 0, 50), 101.0)
    assert request.handle(entry(0, 2, 52), 101.5) == []
    assert request.handle(Looked(), 104.9) == []
    commands = request.handle(Looked(), 105.1)
    assert asks(commands) == [(job(1), 0.0, ())]
    assert request.handle(entry(0, 1, 51), 105.2) == [], "of the earlier job"


def test_word_that_is_lost_again_and_again_ends_the_request() -> None:
    request = running()
    for attempt in range(3):
        commands = request.handle(JobForgotten(job_id=job(attempt), instance_id=D0.instance_id), 105.0)
        if attempt < 2:
            request.handle(Placed(placement=placement(attempt + 1)), 105.0)
            request.handle(JobsAccepted(job_id=job(attempt + 1)), 105.0)
    assert isinstance(commands[-1], Fail)


def test_an_answer_about_an_earlier_job_means_nothing() -> None:
    request = running()
    request.handle(failed(0, D0), 101.0)
    assert request.handle(JobForgotten(job_id=job(0), instance_id=D0.instance_id), 101.0) == []
