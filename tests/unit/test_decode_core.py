"""One decode instance: who waits, who runs, who gets room and who must make some."""

from dataclasses import replace

import pytest

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.growth import blocks_back
from mooncake_mesh.decode.sequences import MOVES, DecodeSequence, GateVerdicts, NewToken, QueueFull, SequenceStage
from mooncake_mesh.errors import Aborted, DecodeRefused, InvalidTransition
from mooncake_mesh.kv.block_hash import chain, join_keys, token_bytes
from mooncake_mesh.policy.stopping import banned_tokens, finish_after
from mooncake_proto.ids import BlockKey, Incarnation, JobId, TransferId
from mooncake_proto.serving import DecodeGate, DecodeJob, FinishReason, GateKind, Sampling, Stopping

BLOCK_TOKENS = 4
ROOT = BlockKey(b"r" * 16)


def job(name: str, prompt: int = 3, *, max_new: int = 100, drawn: int = 0) -> DecodeJob:
    tokens = token_bytes(range(100, 100 + prompt))
    return DecodeJob(
        job_id=JobId(name),
        transfer_id=TransferId(f"{name}.kv"),
        incarnation=Incarnation("i"),
        tokens=tokens,
        keys=join_keys(chain(ROOT, tokens, BLOCK_TOKENS)),
        key_root=ROOT,
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=max_new, stop_token_ids=(2,)),
        drawn_tokens=drawn,
        stream_endpoint="ipc://g",
        deadline_s=60.0,
    )


def core(*, max_batch: int = 8, max_jobs: int = 8) -> DecodeCore:
    return DecodeCore(block_tokens=BLOCK_TOKENS, max_batch=max_batch, max_jobs=max_jobs)


def submitted(c: DecodeCore, name: str, prompt: int = 3, *, max_new: int = 100, drawn: int = 0) -> DecodeSequence:
    sequence = c.submit(job(name, prompt, max_new=max_new, drawn=drawn), 0.0)
    assert isinstance(sequence, DecodeSequence)
    return sequence


def ready(c: DecodeCore, name: str, prompt: int = 3, *, blocks: int = 1, max_new: int = 100) -> DecodeSequence:
    sequence = submitted(c, name, prompt, max_new=max_new)
    c.landed(sequence, range(blocks))
    c.first_token(sequence.job.job_id, 50)
    assert sequence.stage is SequenceStage.READY
    return sequence


def names(batch: list[DecodeSequence]) -> list[str]:
    return [sequence.job.job_id for sequence in batch]


def step(c: DecodeCore, *tokens: int) -> list[NewToken]:
    batch = c.plan_step()
    return c.step_finished(batch, list(tokens) or [9] * len(batch))


# --- towards the batch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["kv first", "token first", "token before the job"])
def test_a_sequence_is_ready_once_its_kv_and_its_first_token_are_here(order: str) -> None:
    c = core()
    if order == "token before the job":
        c.first_token(JobId("a"), 50)
    sequence = submitted(c, "a")
    if order == "token first":
        c.first_token(JobId("a"), 50)
    assert (sequence.stage, c.plan_step()) == (SequenceStage.WAITING, [])
    c.landed(sequence, [7])
    if order == "kv first":
        assert sequence.stage is SequenceStage.WAITING
        c.first_token(JobId("a"), 50)
    assert sequence.stage is SequenceStage.READY
    assert (sequence.tokens[: sequence.length].tolist(), sequence.drawn) == ([100, 101, 102, 50], 1)
    assert sequence.position == 3


def test_a_second_first_token_changes_nothing() -> None:
    c = core()
    sequence = ready(c, "a")
    c.first_token(JobId("a"), 51)
    assert (sequence.length, sequence.tokens[3]) == (4, 50)


def test_early_tokens_are_bounded_oldest_out_first() -> None:
    c = core()
    for n in range(1025):
        c.first_token(JobId(str(n)), n)
    assert not submitted(c, "0").has_first_token
    assert submitted(c, "1").has_first_token
    assert submitted(c, "1024").has_first_token


def test_one_job_too_many_is_refused_and_one_twice_is_a_bug() -> None:
    c = core(max_jobs=2)
    submitted(c, "a")
    with pytest.raises(InvalidTransition):
        c.submit(job("a"), 0.0)
    submitted(c, "b")
    assert c.submit(job("c"), 0.0) is QueueFull.QUEUE_FULL
    assert c.n_jobs == 2


def test_load_tells_waiting_jobs_from_running_ones() -> None:
    c = core()
    submitted(c, "a", 5)
    ready(c, "b", 3)
    assert (c.n_jobs, c.n_waiting, c.waiting_tokens, c.running_tokens) == (2, 1, 5, 4)
    assert c.progress() == ((4, 0),)
    c.step_finished(c.plan_step(), [7])
    assert c.progress() == ((5, 1),)


def test_what_finished_sequences_had_decoded_is_remembered() -> None:
    c = core()
    assert c.decoded_tokens == 0.0
    for name in ("a", "b"):
        sequence = ready(c, name, 2, blocks=2, max_new=3)
        step(c)
        step(c)
        assert sequence.is_over
        c.forget(sequence)
    assert c.decoded_tokens == 2


def test_ready_ones_join_oldest_first_as_places_allow_and_never_push_a_running_one_out() -> None:
    c = core(max_batch=2)
    late = submitted(c, "late")
    for name in "abc":
        ready(c, name, blocks=2)
    assert names(c.plan_step()) == ["a", "b"]
    c.landed(late, [5])
    c.first_token(JobId("late"), 50)
    assert names(c.plan_step()) == ["a", "b"], "it came first, but these run"
    assert late.stage is SequenceStage.READY
    step(c, 2, 9)
    assert names(c.plan_step()) == ["b", "late"]


def test_a_prompt_that_was_computed_here_is_ready_with_its_first_token() -> None:
    c = core()
    sequence = submitted(c, "a", drawn=4)
    assert c.prefilled(sequence, [7, 8], 50) is None
    assert (sequence.stage, sequence.blocks, sequence.drawn) == (SequenceStage.READY, [7, 8], 5)
    [new] = step(c, 9)
    assert (new.position, new.token) == (5, 9)


@pytest.mark.parametrize(
    ("token", "max_new", "finish"), [(2, 100, FinishReason.STOP), (50, 1, FinishReason.LENGTH)], ids=["stop", "length"]
)
def test_a_first_token_drawn_here_may_be_the_last(token: int, max_new: int, finish: FinishReason) -> None:
    c = core()
    sequence = submitted(c, "a", max_new=max_new)
    assert c.prefilled(sequence, [7], token) is finish
    assert (sequence.stage, c.plan_step(), c.decoded_tokens) == (SequenceStage.FINISHED, [], 0.0)
    c.forget(sequence)
    assert c.n_jobs == 0


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_brings_a_token_for_each_and_ends_those_that_have_enough() -> None:
    c = core()
    a, b, last = ready(c, "a", blocks=2), ready(c, "b", blocks=2), ready(c, "c", max_new=2)
    news = step(c, 9, 2, 7)
    assert news == [
        NewToken(sequence=a, position=1, token=9, finish=None),
        NewToken(sequence=b, position=1, token=2, finish=FinishReason.STOP),
        NewToken(sequence=last, position=1, token=7, finish=FinishReason.LENGTH),
    ]
    assert [s.stage for s in (a, b, last)] == [SequenceStage.RUNNING, SequenceStage.FINISHED, SequenceStage.FINISHED]
    assert names(c.plan_step()) == ["a"]


def test_positions_count_over_all_jobs_of_the_request() -> None:
    c = core()
    sequence = submitted(c, "a", 5, max_new=4, drawn=2)
    c.landed(sequence, range(3))
    c.first_token(JobId("a"), 50)
    assert [(n.position, n.finish) for n in step(c)] == [(3, FinishReason.LENGTH)]


def test_a_token_for_one_that_was_stopped_meanwhile_is_dropped() -> None:
    c = core()
    a, b = ready(c, "a"), ready(c, "b", blocks=2)
    batch = c.plan_step()
    a.stop = Aborted("cancelled")
    assert [n.sequence for n in c.step_finished(batch, [9, 9])] == [b]
    assert a.length == 4
    assert names(c.plan_step()) == ["b"]


@pytest.mark.parametrize("stage", [SequenceStage.WAITING, SequenceStage.READY, SequenceStage.RUNNING])
def test_a_sequence_can_stop_at_every_stage_and_then_be_forgotten(stage: SequenceStage) -> None:
    c = core()
    sequence = submitted(c, "a") if stage is SequenceStage.WAITING else ready(c, "a")
    if stage is SequenceStage.RUNNING:
        c.plan_step()
    assert sequence.stage is stage
    with pytest.raises(InvalidTransition):
        c.forget(sequence)
    sequence.stop = Aborted("cancelled")
    c.stopped(sequence)
    c.stopped(sequence)
    c.landed(sequence, [1])
    c.first_token(JobId("a"), 50)
    assert (sequence.stage, c.plan_step()) == (SequenceStage.STOPPED, [])
    c.forget(sequence)
    assert (c.n_jobs, c.get(JobId("a"))) == (0, None)


# --- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "blocks", "max_new", "wanted"),
    [
        (3, 4, 100, {}),  # 13 steps fit
        (3, 3, 100, {}),  # 9
        (3, 2, 100, {"a": 4}),  # 5
        (3, 2, 6, {}),  # 5, and no more than 5 will be taken
        (3, 2, 7, {"a": 1}),
        (3, 2, 12, {"a": 2}),
        (3, 1, 2, {}),
    ],
)
def test_growth_is_asked_for_ahead_of_need_and_never_for_more(
    prompt: int, blocks: int, max_new: int, wanted: dict[str, int]
) -> None:
    c = core()
    ready(c, "a", prompt, blocks=blocks, max_new=max_new)
    assert c.wants_growth() == wanted
    assert c.wants_growth() == {}, "it is growing"


def test_who_waits_or_is_stopped_asks_for_nothing() -> None:
    c = core()
    submitted(c, "a")
    stopped = ready(c, "b")
    stopped.stop = Aborted("cancelled")
    assert c.wants_growth() == {}


def test_a_stalled_sequence_sits_out_until_it_has_grown() -> None:
    c = core()
    a = ready(c, "a", 3, blocks=1)
    assert [n.position for n in step(c)] == [1]
    assert c.plan_step() == []
    c.wants_growth()
    assert c.grown(a, [8, 9]) is None
    assert (a.blocks, names(c.plan_step())) == ([0, 8, 9], ["a"])


def test_the_youngest_goes_when_a_stalled_one_gets_nothing() -> None:
    c = core()
    a, b, young = ready(c, "a"), ready(c, "b", blocks=3), ready(c, "c", blocks=3)
    step(c)
    c.wants_growth()
    assert c.grown(b, []) is None, "it asked ahead and is not stalled"
    assert c.grown(a, []) is young


def test_one_goes_at_a_time() -> None:
    c = core()
    a, b, young = ready(c, "a"), ready(c, "b"), ready(c, "c")
    step(c)
    assert list(c.wants_growth()) == ["a", "b", "c"]
    assert c.grown(a, []) is young
    young.stop = Aborted("preempted")
    assert c.grown(b, []) is None
    assert c.grown(young, []) is None
    c.stopped(young)
    assert list(c.wants_growth()) == ["a", "b"]
    assert c.grown(a, []) is None, "what the youngest gives back is not in the pool yet"
    c.forget(young)
    assert c.wants_growth() == {"a": 4}
    assert c.grown(a, []) is b


def test_one_who_is_alone_and_stalled_goes_itself() -> None:
    c = core()
    a = ready(c, "a")
    step(c)
    c.wants_growth()
    assert c.grown(a, []) is a


def test_a_finished_one_gives_its_room_before_anybody_goes() -> None:
    c = core()
    a, done = ready(c, "a"), ready(c, "b")
    step(c, 9, 2)
    c.wants_growth()
    assert c.grown(a, []) is None
    c.forget(done)
    c.wants_growth()
    assert c.grown(a, []) is a


# --- out of the arena and back ----------------------------------------------------------------------------------------


def away(c: DecodeCore, sequence: DecodeSequence) -> None:
    c.preempt(sequence)
    sequence.blocks = []
    sequence.swaps += 1


def test_the_lowest_class_goes_before_the_youngest() -> None:
    c = core()
    a = ready(c, "a")
    batch_work = c.submit(replace(job("b"), priority=100), 0.0)
    assert isinstance(batch_work, DecodeSequence)
    c.landed(batch_work, range(3))
    c.first_token(JobId("b"), 50)
    young = ready(c, "c", blocks=3)
    step(c)
    c.wants_growth()
    assert c.grown(a, []) is batch_work
    c.preempt(batch_work)
    assert c.grown(a, []) is None, "its blocks are about to come"
    batch_work.blocks = []
    assert c.grown(a, []) is young


def test_what_a_running_step_draws_for_one_that_goes_is_dropped() -> None:
    c = core()
    a, b = ready(c, "a", blocks=2), ready(c, "b", blocks=2)
    batch = c.plan_step()
    c.preempt(b)
    assert [new.sequence for new in c.step_finished(batch, [9, 9])] == [a]
    assert (b.length, names(c.plan_step()), c.n_swapped) == (4, ["a"], 1)
    assert (c.n_waiting, c.running_tokens) == (0, 9), "it counts as decoded"


def test_who_is_away_comes_back_when_nobody_is_short_of_room_the_first_one_first() -> None:
    c = core()
    a, b, urgent = ready(c, "a"), ready(c, "b", blocks=4), ready(c, "c", blocks=4)
    urgent.job = replace(urgent.job, priority=-1)
    for sequence in (b, urgent):
        away(c, sequence)
    assert c.next_back() is None, "a has no block for its next token"
    a.blocks += range(7)
    assert c.next_back() is urgent
    urgent.is_coming_back = True
    assert c.next_back() is None, "one at a time"
    urgent.is_coming_back = False
    urgent.stop = Aborted("cancelled")
    assert c.next_back() is b


def test_nobody_comes_back_who_still_has_his_blocks() -> None:
    c = core()
    a = ready(c, "a", blocks=4)
    c.preempt(a)
    assert c.next_back() is None


@pytest.mark.parametrize("cached", [0, 1, 2])
def test_who_is_back_goes_on_and_shares_what_the_pool_has_lost(cached: int) -> None:
    c = core()
    a = ready(c, "a", 5, blocks=20)
    for _ in range(6):
        step(c)
    assert (a.length, a.position) == (12, 11)
    whole = c.whole_blocks(a)
    assert whole is None, "few, and it runs"
    away(c, a)
    whole = c.whole_blocks(a)
    assert whole is not None
    assert (whole.first_block, len(whole.keys)) == (1, 1)
    keys = [*join_keys_of(a), *whole.keys]
    c.back(a, [9, 8, 7, 6], cached, 3.0)
    assert (a.stage, a.blocks, names(c.plan_step())) == (SequenceStage.READY, [9, 8, 7, 6], ["a"])
    c.preempt(a)
    again = c.whole_blocks(a)
    if cached < 2:
        assert again is not None
        assert (again.first_block, list(again.keys)) == (cached, keys[cached:])
    else:
        assert again is None


def join_keys_of(sequence: DecodeSequence) -> list[BlockKey]:
    return chain(ROOT, sequence.job.tokens, BLOCK_TOKENS)


@pytest.mark.parametrize(("max_new", "blocks"), [(100, 6), (7, 3), (2, 2)])
def test_who_comes_back_gets_room_to_go_on_but_no_more_than_it_may_fill(max_new: int, blocks: int) -> None:
    c = core()
    a = ready(c, "a", 5, blocks=20, max_new=max_new)
    away(c, a)
    assert blocks_back(a, BLOCK_TOKENS) == blocks
    assert not c.wants_growth()


# --- gates ------------------------------------------------------------------------------------------------------------

GATE = DecodeGate(
    kind=GateKind.HOLD,
    tbt_s=0.1,
    step_base_s=0.0,
    step_sequence_s=0.04,  # two sequences a step
    step_token_s=0.0,
    room_tokens=1000,
    decode_s=10.0,
)


def gated(c: DecodeCore, name: str, *, gate: DecodeGate = GATE, within_s: float = 20.0) -> DecodeSequence:
    sequence = c.submit(replace(job(name), gate=gate, first_token_within_s=within_s), 100.0)
    assert isinstance(sequence, DecodeSequence)
    return sequence


def arrive(c: DecodeCore, sequence: DecodeSequence, blocks: int = 4) -> None:
    c.landed(sequence, range(blocks))
    c.first_token(sequence.job.job_id, 50)


def test_a_gated_sequence_joins_no_batch_before_it_is_granted_and_counts_as_waiting() -> None:
    c = core()
    sequence = gated(c, "a")
    arrive(c, sequence, blocks=1)
    assert (sequence.stage, c.plan_step(), c.wants_growth()) == (SequenceStage.READY, [], {})
    assert (c.n_waiting, c.waiting_tokens, c.running_tokens, c.progress()) == (1, 4, 0, ())
    assert c.open_gates(101.0) == GateVerdicts(shown=(sequence,), granted=(sequence,))
    assert c.open_gates(101.0) == GateVerdicts(), "it is granted once"
    assert (c.n_waiting, names(c.plan_step())) == (0, ["a"])


def test_held_sequences_are_granted_in_order_as_others_end() -> None:
    c = core()
    sequences = [gated(c, name) for name in "abcd"]
    for sequence in reversed(sequences):
        arrive(c, sequence)
    a, b, third, fourth = sequences
    assert c.open_gates(101.0).granted == (a, b)
    assert c.open_gates(101.0) == GateVerdicts()
    step(c, 2, 9)  # the first one ends
    assert c.open_gates(102.0).granted == (third,)
    fourth.stop = Aborted("cancelled")
    step(c, 2, 9)
    c.stopped(fourth)
    c.forget(fourth)
    assert c.open_gates(103.0) == GateVerdicts(), "a cancelled one is not granted"


def test_who_cannot_be_granted_in_time_is_refused_until_it_is_stopped() -> None:
    c = core()
    gated_ones = [gated(c, name, within_s=1.5) for name in "abc"]
    for sequence in gated_ones:
        arrive(c, sequence)
    last = gated_ones[-1]  # a fifth of what is decoded has to go first, which takes a fifth of 10 s
    assert [seq for seq, _ in c.open_gates(100.0).refused] == [last]
    assert [refused.reason for _, refused in c.open_gates(100.0).refused] == ["ttft_objective_at_decode"]
    last.stop = DecodeRefused("ttft_objective_at_decode", retry_after_s=1.0)
    assert c.open_gates(100.0) == GateVerdicts()


def test_one_whose_kv_found_no_room_is_refused_when_its_first_token_is_due() -> None:
    c = core()
    early, waiting = gated(c, "early"), gated(c, "late")
    c.first_token(JobId("late"), 50)
    assert c.open_gates(119.0) == GateVerdicts()
    [(sequence, refused)] = c.open_gates(120.0).refused
    assert (sequence, refused.reason) == (waiting, "ttft_objective_at_decode")
    assert not early.is_over, "its prompt is not computed yet: that is for others to judge"


def test_a_check_lets_the_first_token_out_before_there_is_kv_or_room() -> None:
    c = core()
    gate = replace(GATE, kind=GateKind.CHECK, step_sequence_s=0.0, room_tokens=8)  # of which one is to grow into
    a, b, third = (gated(c, name, gate=gate) for name in "abc")
    for sequence in (a, b, third):
        c.first_token(sequence.job.job_id, 50)
    verdicts = c.open_gates(101.0)
    assert (verdicts.shown, verdicts.granted) == ((a, b), ())
    assert [(seq, why.reason) for seq, why in verdicts.refused] == [(third, "tbt_objective_at_decode")]
    third.stop = DecodeRefused("tbt_objective_at_decode", retry_after_s=1.0)
    assert (c.n_waiting, c.running_tokens) == (1, 8), "they count as decoded"
    for sequence in (b, a):
        c.landed(sequence, range(4))
    assert c.open_gates(102.0) == GateVerdicts(granted=(a,)), "the other one has no room to grow"
    assert names(c.plan_step()) == ["a"]
    c.stopped(a)
    c.forget(a)
    assert c.open_gates(103.0) == GateVerdicts(granted=(b,))
    assert c.open_gates(1e9) == GateVerdicts(), "it is not refused any more"


# --- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [3, 4, 5, 8, 9])
def test_shared_keys_are_those_of_the_next_turns_prompt(prompt: int) -> None:
    c = core()
    sequence = ready(c, "a", prompt, blocks=20)
    first_block, keys = prompt // BLOCK_TOKENS, list[BlockKey]()
    for token in range(200, 231):
        step(c, token)
        whole = c.whole_blocks(sequence)
        if whole is not None:
            assert whole.first_block == first_block + len(keys)
            assert len(whole.keys) >= 4, "a few at a time"
            keys += whole.keys
    step(c, 2)
    rest = c.whole_blocks(sequence)
    keys += rest.keys if rest is not None else ()
    assert c.whole_blocks(sequence) is None
    fed = sequence.tokens[: sequence.length - 1].tolist()  # the KV of the last token was never computed
    assert keys == chain(ROOT, token_bytes(fed), BLOCK_TOKENS)[first_block:]


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in SequenceStage for b in SequenceStage if (a, b) not in MOVES])
def test_every_other_move_is_refused_and_changes_nothing(old: SequenceStage, new: SequenceStage) -> None:
    c = core()
    sequence = submitted(c, "a")
    sequence.stage = old
    with pytest.raises(InvalidTransition) as caught:
        c._move(sequence, new)
    assert (caught.value.old, caught.value.new, sequence.stage) == (old.value, new.value, old)


# --- stopping ---------------------------------------------------------------------------------------------------------

STOPPING = Stopping(max_new_tokens=4, min_new_tokens=2, stop_token_ids=(2, 5))


@pytest.mark.parametrize(
    ("token", "position", "finish"),
    [
        (9, 0, None),
        (2, 1, None),
        (2, 2, FinishReason.STOP),
        (5, 2, FinishReason.STOP),
        (9, 2, None),
        (9, 3, FinishReason.LENGTH),
        (2, 3, FinishReason.STOP),
        (9, 7, FinishReason.LENGTH),
    ],
)
def test_when_a_choice_has_had_its_last_token(token: int, position: int, finish: FinishReason | None) -> None:
    assert finish_after(token, position, STOPPING) is finish


def test_stop_tokens_are_banned_until_there_are_enough() -> None:
    assert [banned_tokens(position, STOPPING) for position in range(3)] == [(2, 5), (2, 5), ()]


def test_who_joins_next_has_waited_since_the_first_token_could_be_shown() -> None:
    c = core()
    assert c.longest_wait_s(5.0) == 0.0
    first, second, gate = submitted(c, "a"), submitted(c, "b"), gated(c, "c")
    for at_s, sequence in ((1.0, first), (2.0, second), (0.5, gate)):
        c.first_token(sequence.job.job_id, 7, at_s)
    assert c.longest_wait_s(5.0) == 0.0, "no KV yet"
    c.landed(gate, [0])
    assert c.longest_wait_s(5.0) == 0.0, "the gate has shown nothing"
    assert c.open_gates(4.0).granted == (gate,)
    assert c.longest_wait_s(5.0) == 1.0
    c.landed(second, [1])
    assert c.longest_wait_s(5.0) == 3.0
    c.landed(first, [2])
    assert c.longest_wait_s(5.0) == 4.0
    c.plan_step()
    assert c.longest_wait_s(5.0) == 0.0


# --- what is reported -------------------------------------------------------------------------------------------------


def test_the_counts_agree_with_the_sequences_whatever_happens_to_them() -> None:
    c = core(max_batch=3)
    gate = DecodeGate(
        kind=GateKind.HOLD, tbt_s=1.0, step_base_s=0.0, step_sequence_s=0.0, step_token_s=0.0, room_tokens=1 << 20,
        decode_s=1.0,
    )  # fmt: skip

    def check(told: str) -> None:
        waiting = [sequence for sequence in c.sequences() if sequence.is_waiting]
        others = [sequence for sequence in c.sequences() if not sequence.is_waiting]
        assert (c.n_waiting, c.waiting_tokens) == (len(waiting), sum(s.length for s in waiting)), told
        assert c.progress() == tuple((s.length, s.decoded) for s in others), told
        assert c.running_tokens == sum(s.length for s in others), told

    late, never, gated = (
        submitted(c, "late", 5),
        submitted(c, "never", 4),
        c.submit(replace(job("gated"), gate=gate), 0),
    )
    assert isinstance(gated, DecodeSequence)
    check("all wait")
    first = ready(c, "first", blocks=2, max_new=3)
    c.first_token(JobId("gated"), 50)
    check("a first token came before its KV")
    c.landed(gated, [1])
    check("one waits for its gate")
    c.landed(late, [2, 3])
    c.first_token(JobId("late"), 50)
    check("an older one is ready later")
    assert [s.job.job_id for s in c.unheld()] == ["late", "first"], "in order of admission"
    c.open_gates(0.0)
    check("the gate is open")
    step(c)
    step(c)
    assert first.is_over
    check("one is at its end")
    never.stop = Aborted("gone")
    c.stopped(never)
    check("one was stopped while it waited")
    for sequence in (first, never):
        c.forget(sequence)
    check("both are forgotten")
    assert c.n_jobs == 2
