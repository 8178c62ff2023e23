"""One prefill instance: who is next, how a prompt is cut, what a stop does at each stage."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mooncake_mesh.errors import Aborted, InvalidTransition
from mooncake_mesh.kv.block_hash import token_bytes
from mooncake_mesh.policy.queue_order import QueueRules
from mooncake_mesh.prefill.core import (
    _MOVES,
    Chunk,
    JobStage,
    LayerProgress,
    PrefillCore,
    QueuedJob,
    QueueFull,
)
from mooncake_proto.ids import Incarnation, JobId, TransferId
from mooncake_proto.serving import PrefillJob, QueueTurn, Sampling, Stopping

BLOCK_TOKENS = 4
WAY = (JobStage.ACQUIRING, JobStage.READY, JobStage.COMPUTING, JobStage.SENDING, JobStage.DONE)
ENDS = (JobStage.DONE, JobStage.FAILED, JobStage.CANCELLED)


def job(name: str, prompt: int = 10) -> PrefillJob:
    return PrefillJob(
        job_id=JobId(name),
        transfer_id=TransferId(f"{name}.kv"),
        incarnation=Incarnation("i"),
        tokens=token_bytes(range(prompt)),
        keys=b"",
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=4),
        drawn_tokens=0,
        stream_endpoint="ipc://g",
        decode=None,
        deadline_s=60.0,
    )


def core(*, chunk_tokens: int = 8, max_queued_jobs: int = 8) -> PrefillCore:
    return PrefillCore(chunk_tokens=chunk_tokens, block_tokens=BLOCK_TOKENS, max_queued_jobs=max_queued_jobs)


def submitted(c: PrefillCore, name: str, prompt: int = 10) -> QueuedJob:
    entry = c.submit(job(name, prompt), 5.0)
    assert isinstance(entry, QueuedJob)
    return entry


def at(c: PrefillCore, stage: JobStage) -> QueuedJob:
    """A job that went the straight way to *stage*."""
    entry = submitted(c, "a")
    for step in WAY[: WAY.index(stage) + 1] if stage is not JobStage.QUEUED else ():
        c.move(entry, step)
    return entry


def computed(c: PrefillCore) -> list[QueuedJob]:
    """All that wait, in the order of their turns, where blocks come at once."""
    entries = []
    while (acquiring := c.next_to_acquire()) is not None:
        c.acquired(acquiring, (1, 2, 3), 0)
        entry = c.next_to_compute()
        assert entry is not None
        entries.append(entry)
    return entries


# --- the queue --------------------------------------------------------------------------------------------------------


def test_first_come_first_served_and_nobody_twice() -> None:
    c = core()
    entries = [submitted(c, name) for name in "abc"]
    assert computed(c) == [*entries]
    assert (c.next_to_acquire(), c.next_to_compute()) == (None, None)


def test_the_next_two_acquire_their_blocks_ahead_of_their_turn() -> None:
    c = core()
    first, second, third = (submitted(c, name) for name in "abc")
    assert [c.next_to_acquire() for _ in range(3)] == [first, second, None]
    assert (first.stage, third.stage) == (JobStage.ACQUIRING, JobStage.QUEUED)
    c.acquired(second, (4, 5, 6), 0)
    assert c.next_to_compute() is second, "nobody waits for who has no blocks yet"
    assert c.next_to_acquire() is third


def test_who_holds_its_blocks_can_be_overtaken_until_it_is_its_turn() -> None:
    c = ordered()
    for name in ("long", "longer"):
        entry = queued(c, name, 9.0, 0.0)
        assert c.next_to_acquire() is entry
        c.acquired(entry, (1, 2, 3), 0)
    short = queued(c, "short", 1.0, 1.0)
    assert c.next_to_acquire() is short, "it is the next one, whoever else has blocks"
    c.acquired(short, (1, 2, 3), 0)
    assert c.next_to_compute() is short
    shorter = queued(c, "shorter", 0.5, 1.0)
    assert [job for job in c.jobs() if job.is_begun] == [short]
    assert c.next_to_acquire() is shorter
    assert c.queued_prompts() == ((10, 0),) * 4


def test_a_job_that_was_stopped_or_ended_in_the_queue_is_passed_over() -> None:
    c = core()
    ended, stopped, waits = (submitted(c, name) for name in "abc")
    c.move(ended, JobStage.CANCELLED)
    stopped.stop = Aborted("cancelled")
    assert c.next_to_acquire() is waits
    assert stopped.stage is JobStage.QUEUED
    c.move(stopped, JobStage.CANCELLED)
    assert c.jobs() == [waits]


def test_one_job_too_many_is_refused_and_an_end_makes_room() -> None:
    c = core(max_queued_jobs=2)
    first = submitted(c, "a")
    submitted(c, "b")
    assert c.submit(job("c"), 5.0) is QueueFull.QUEUE_FULL
    assert c.get(JobId("c")) is None
    c.move(first, JobStage.FAILED)
    submitted(c, "c")


def test_a_job_is_new() -> None:
    c = core()
    submitted(c, "a")
    with pytest.raises(InvalidTransition):
        c.submit(job("a"), 5.0)
    assert c.running_jobs == 1


def test_load_is_what_is_still_to_be_computed() -> None:
    c = core()
    a, b = submitted(c, "a", 10), submitted(c, "b", 7)
    assert (c.queued_jobs, c.queued_tokens, c.running_jobs) == (2, 17, 2)
    c.next_to_acquire()
    assert c.queued_jobs == 1, "somebody works on the other one"
    c.acquired(a, (1, 2, 3), 2)
    assert (c.queued_jobs, c.queued_tokens) == (2, 2 + 7)
    assert c.next_to_compute() is a
    assert (c.queued_jobs, c.queued_tokens) == (1, 2 + 7)
    c.move(a, JobStage.COMPUTING)
    assert (c.queued_jobs, c.queued_tokens) == (1, 2 + 7)
    c.move(a, JobStage.SENDING)
    assert (c.queued_jobs, c.queued_tokens, c.running_jobs) == (1, 7, 2)
    c.move(a, JobStage.DONE)
    c.move(b, JobStage.CANCELLED)
    assert (c.queued_jobs, c.queued_tokens, c.running_jobs) == (0, 0, 0)


def test_a_placement_says_what_of_a_queued_prompt_is_expected_to_be_cached() -> None:
    c = core()
    c.submit(replace(job("a", 10), local_prefix_blocks=1, fetch_prefix_blocks=2), 0.0)
    c.submit(replace(job("b", 8), local_prefix_blocks=9), 0.0)
    assert c.queued_prompts() == ((2, 8), (4, 4)), "one token at least is computed"
    entry = c.next_to_acquire()
    assert entry is not None
    c.acquired(entry, (1, 2, 3), 0)
    assert c.queued_prompts()[0] == (10, 0), "the hint was wrong"


def test_the_last_computed_prompts_are_samples() -> None:
    c = core()
    for n in range(10):
        entry = submitted(c, f"j{n}", 10)
        c.next_to_acquire()
        c.acquired(entry, (1, 2, 3), 1)
        assert c.next_to_compute() is entry
        c.move(entry, JobStage.COMPUTING)
        entry.started_s = 6.0
        assert c.elapsed_s(6.5 + n) == 0.5 + n
        c.computed(entry, 0.5 + n)
        c.move(entry, JobStage.DONE)
    assert c.elapsed_s(99.0) == 0.0
    assert c.prefills == 10
    assert c.recent_prefills() == tuple((6, 4, 0.5 + n) for n in range(2, 10))


# --- chunks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "cached_blocks", "chunk_tokens", "cuts"),
    [
        (10, 0, 8, [0, 8, 10]),
        (16, 0, 8, [0, 8, 16]),
        (8, 0, 8, [0, 8]),
        (1, 0, 8, [0, 1]),
        (10, 1, 8, [4, 10]),
        (21, 2, 4, [8, 12, 16, 20, 21]),
        (9, 2, 8, [8, 9]),
        (100, 0, 0, [0, 100]),
        (100, 7, 0, [28, 100]),
    ],
)
def test_a_prompt_is_cut_between_blocks(prompt: int, cached_blocks: int, chunk_tokens: int, cuts: list[int]) -> None:
    c = core(chunk_tokens=chunk_tokens)
    entry = submitted(c, "a", prompt)
    c.next_to_acquire()
    c.acquired(entry, tuple(range(-(-prompt // BLOCK_TOKENS))), cached_blocks)
    assert c.chunks(entry) == [Chunk(start=start, end=end) for start, end in itertools.pairwise(cuts)]
    assert all(chunk.start % BLOCK_TOKENS == 0 for chunk in c.chunks(entry))


def test_blocks_that_come_for_a_job_that_does_not_wait_for_them_change_nothing() -> None:
    c = core()
    entry = submitted(c, "a")
    with pytest.raises(InvalidTransition):
        c.acquired(entry, (1, 2, 3), 1)
    assert (entry.blocks, entry.cached_tokens, entry.stage) == ((), 0, JobStage.QUEUED)


# --- moves ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [JobStage.QUEUED, *WAY[:-1]])
@pytest.mark.parametrize("end", [JobStage.FAILED, JobStage.CANCELLED])
def test_a_job_can_end_early_at_every_stage(stage: JobStage, end: JobStage) -> None:
    c = core()
    entry = at(c, stage)
    assert not entry.is_over
    c.move(entry, end)
    assert (entry.is_over, c.jobs(), c.next_to_acquire()) == (True, [], None)


def test_a_job_without_a_decode_worker_is_done_after_its_computation() -> None:
    c = core()
    entry = at(c, JobStage.COMPUTING)
    c.move(entry, JobStage.DONE)
    assert (entry.history, c.running_jobs) == (["queued", "acquiring", "ready", "computing"], 0)


@pytest.mark.parametrize(("old", "new"), [(a, b) for a in JobStage for b in JobStage if (a, b) not in _MOVES])
def test_every_other_move_is_refused_and_changes_nothing(old: JobStage, new: JobStage) -> None:
    c = core()
    entry = submitted(c, "a")
    entry.stage = old
    with pytest.raises(InvalidTransition) as caught:
        c.move(entry, new)
    assert (caught.value.old, caught.value.new) == (old.value, new.value)
    assert (entry.stage, entry.history, c.jobs()) == (old, [], [entry])


def test_nothing_leads_out_of_an_end() -> None:
    assert not [move for move in _MOVES if move[0] in ENDS]


# --- layers -----------------------------------------------------------------------------------------------------------


def _announced(turns: Sequence[str]) -> list[int]:
    """Layers announced when the threads take *turns*: ``w`` writes the next layer, ``t`` runs a due turn."""
    progress, layer, due, announced = LayerProgress(), 0, 0, list[int]()
    for turn in (*turns, "t", "t"):
        if turn == "w":
            due += progress.wrote(layer)
            layer += 1
        elif due:
            due -= 1
            announced += progress.take()
    return announced


@pytest.mark.parametrize("turns", [p for n in range(1, 7) for p in itertools.product("wt", repeat=n)])
def test_every_layer_is_announced_once_whenever_the_turns_come(turns: tuple[str, ...]) -> None:
    assert _announced(turns) == list(range(turns.count("w")))


def test_layers_of_a_fast_chunk_need_one_turn() -> None:
    progress = LayerProgress()
    assert [progress.wrote(layer) for layer in range(3)] == [True, False, False]
    assert progress.take() == range(3)
    assert progress.wrote(3)
    assert progress.take() == range(3, 4)


# --- order ------------------------------------------------------------------------------------------------------------


def queued(c: PrefillCore, name: str, service_s: float, now_s: float, **turn: object) -> QueuedJob:
    ticket = QueueTurn(service_s=service_s, **turn)  # type: ignore[arg-type]
    entry = c.submit(replace(job(name), turn=ticket), now_s)
    assert isinstance(entry, QueuedJob)
    return entry


def ordered() -> PrefillCore:
    return PrefillCore(chunk_tokens=8, block_tokens=BLOCK_TOKENS, max_queued_jobs=99, rules=QueueRules())


def taken(c: PrefillCore) -> list[str]:
    return [str(entry.job.job_id) for entry in computed(c)]


def test_a_short_prompt_goes_first_where_nobody_loses_its_objective() -> None:
    c = ordered()
    queued(c, "roomy", 4.0, 0.0, first_token_within_s=30.0)
    queued(c, "short", 1.0, 1.0, first_token_within_s=30.0)
    assert taken(c) == ["short", "roomy"]
    c = ordered()
    queued(c, "tight", 4.0, 0.0, first_token_within_s=5.0)
    queued(c, "short", 1.0, 1.0, first_token_within_s=30.0)
    assert taken(c) == ["tight", "short"]


def test_the_time_on_the_way_here_counts() -> None:
    c = ordered()
    queued(c, "waited", 1.0, 10.0, waited_s=8.0, first_token_within_s=22.0)
    queued(c, "fresh", 1.0, 10.0, waited_s=0.0, first_token_within_s=30.0)
    queued(c, "older", 1.0, 10.0, waited_s=9.0, first_token_within_s=21.0)
    assert taken(c) == ["older", "waited", "fresh"]


def test_priorities_and_shares_decide_and_without_rules_only_the_arrival() -> None:
    for rules, order in (
        (QueueRules(), ["urgent", "b0", "a0", "a1", "a2"]),
        (None, ["a0", "a1", "a2", "b0", "urgent"]),
    ):
        c = PrefillCore(chunk_tokens=8, block_tokens=BLOCK_TOKENS, max_queued_jobs=99, rules=rules)
        for i in range(3):
            queued(c, f"a{i}", 5.0, 0.0, fairness_id="a")
        queued(c, "b0", 4.0, 0.0, fairness_id="b")
        queued(c, "urgent", 50.0, 0.0, priority=-1)
        assert taken(c) == order


def test_loads_are_told_in_the_order_they_are_computed_in() -> None:
    c = ordered()
    first = queued(c, "first", 4.0, 0.0)
    assert c.next_to_acquire() is first
    c.acquired(first, (1, 2, 3), 0)
    assert c.next_to_compute() is first
    for name, prompt, service_s in (("long", 20, 8.0), ("short", 6, 1.0)):
        c.submit(replace(job(name, prompt), turn=QueueTurn(service_s=service_s)), 0.0)
    assert [uncached for uncached, _ in c.queued_prompts()] == [10, 6, 20]
    assert c.queued_priorities() == ()
    assert c.queued_waits_s(7.0) == (7.0, 7.0)
    queued(c, "urgent", 1.0, 0.0, priority=-2)
    assert c.queued_priorities() == (-101, -2, 0, 0)
    c.move(first, JobStage.COMPUTING)
    first.started_s = 3.0
    assert c.elapsed_s(5.0) == 2.0


def test_who_waits_in_vain_is_named_until_it_is_stopped() -> None:
    c = ordered()
    begun = queued(c, "begun", 4.0, 0.0, first_token_within_s=1.0)
    c.next_to_acquire()
    assert c.late_jobs(99.0) == [], "somebody works on it"
    c.acquired(begun, (1, 2, 3), 0)
    assert c.late_jobs(99.0) == [begun]
    c.next_to_compute()
    vain = queued(c, "vain", 4.0, 0.0, first_token_within_s=10.0)
    queued(c, "patient", 4.0, 0.0)
    assert c.late_jobs(6.0) == []
    assert c.late_jobs(6.1) == [vain]
    vain.stop = Aborted("told")
    assert c.late_jobs(6.1) == []
    assert core().queued_waits_s(1.0) is None
    assert core().late_jobs(1e9) == [], "first come, first served, however late"


def test_behind_a_head_chunks_get_shorter() -> None:
    c = PrefillCore(chunk_tokens=1024, block_tokens=BLOCK_TOKENS, max_queued_jobs=8, stages=2)
    entry = submitted(c, "a", 16_000)
    c.move(entry, JobStage.ACQUIRING)
    c.acquired(entry, tuple(range(4000)), 0)
    sizes = [chunk.end - chunk.start for chunk in c.chunks(entry)]
    assert sum(sizes) == 16_000
    assert sizes[0] > 1.5 * sizes[-2]
    assert all(size % BLOCK_TOKENS == 0 for size in sizes[:-1])
    for chunk in c.chunks(entry):  # attention costs nothing after all
        c.chunk_passed(chunk, 0.1 + 1e-3 * (chunk.end - chunk.start))
    sizes = [chunk.end - chunk.start for chunk in c.chunks(entry)]
    assert max(sizes) - min(sizes) <= 2 * BLOCK_TOKENS
