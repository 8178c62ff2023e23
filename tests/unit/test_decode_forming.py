"""A step waits for those on their way while it is over no more than they are, as long as its pace allows."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.forming import Forming
from mooncake_mesh.decode.inline_prompts import InlinePrompts
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.decode.step_clock import StepClock
from mooncake_mesh.errors import Aborted
from mooncake_mesh.kv.block_hash import token_bytes
from mooncake_mesh.mesh.bell import Bell
from mooncake_proto.ids import BlockKey, Incarnation, JobId, TransferId
from mooncake_proto.serving import DecodeGate, DecodeJob, GateKind, InlinePrefill, Sampling, Stopping
from tests.unit.mesh_doubles import Run, on_both_loops, soon
from tests.unit.test_decode_inline_prompts import chunks_of

PACE_S = 0.1
PATIENCE_S = 0.5
INLINE = InlinePrefill(step=chunks_of(64))


def job(name: str, max_new: int = 100) -> DecodeJob:
    return DecodeJob(
        job_id=JobId(name),
        transfer_id=TransferId("t"),
        incarnation=Incarnation("i"),
        tokens=token_bytes([1, 2, 3]),
        keys=b"",
        key_root=BlockKey(b"r" * 16),
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=max_new),
        drawn_tokens=0,
        stream_endpoint="g",
        deadline_s=60.0,
    )


def gated(name: str, tbt_s: float = 1.0, kind: GateKind = GateKind.HOLD) -> DecodeJob:
    gate = DecodeGate(
        kind=kind,
        tbt_s=tbt_s,
        step_base_s=0.0,
        step_sequence_s=0.0,
        step_token_s=0.0,
        room_tokens=1000,
        decode_s=1.0,
    )
    return replace(job(name), gate=gate)


class Instance:
    """Its core, and sequences by what has become of them."""

    def __init__(self, max_batch: int = 64) -> None:
        self.core = DecodeCore(block_tokens=4, max_batch=max_batch, max_jobs=1000)
        self.n = 0

    def comes(self, submitted: DecodeJob | None = None) -> DecodeSequence:
        self.n += 1
        sequence = self.core.submit(submitted or job(f"j{self.n}"), 0.0)
        assert isinstance(sequence, DecodeSequence)
        return sequence

    def lands(self, sequence: DecodeSequence) -> None:
        self.core.landed(sequence, range(30))
        self.core.first_token(sequence.job.job_id, 7)

    def batch(self, n: int, *submitted: DecodeJob) -> list[DecodeSequence]:
        for sequence in [self.comes() for _ in range(n)] + [self.comes(one) for one in submitted]:
            self.lands(sequence)
        self.core.open_gates(0.0)
        return self.core.plan_step()

    def steps(self) -> list[DecodeSequence]:
        batch = self.core.plan_step()
        self.core.step_finished(batch, [9] * len(batch))
        return batch


# --- who is coming ----------------------------------------------------------------------------------------------------


def test_whose_kv_or_first_token_is_awaited_is_coming() -> None:
    instance = Instance()
    one, other = instance.comes(), instance.comes()
    assert instance.core.n_coming(9) == 2
    instance.core.landed(one, [0])
    instance.core.first_token(other.job.job_id, 7)
    assert instance.core.n_coming(9) == 2
    instance.lands(one)
    assert instance.core.n_coming(9) == 1
    other.stop = Aborted("cancelled")
    assert instance.core.n_coming(9) == 0


def test_no_more_are_counted_than_need_be() -> None:
    instance = Instance()
    for _ in range(5):
        instance.comes()
    assert [instance.core.n_coming(most) for most in (0, 3, 5, 8)] == [0, 3, 5, 5]


def test_a_prompt_that_is_computed_here_is_not_on_its_way() -> None:
    instance = Instance()
    instance.comes(replace(job("here"), inline_prefill=INLINE))
    assert instance.core.n_coming(9) == 0


def test_behind_a_gate_nobody_is_coming_before_it_has_let_the_first_token_out() -> None:
    instance = Instance()
    held, checked = instance.comes(gated("held")), instance.comes(gated("checked", kind=GateKind.CHECK))
    assert instance.core.n_coming(9) == 0
    for sequence in (held, checked):
        instance.core.first_token(sequence.job.job_id, 7)
    assert [seq.job.job_id for seq in instance.core.open_gates(0.0).shown] == ["checked"]
    assert instance.core.n_coming(9) == 1, "its KV alone is awaited"


# --- the pace ---------------------------------------------------------------------------------------------------------


def test_a_step_waits_while_as_many_come_as_would_step() -> None:
    batch = Instance().batch(3)
    for n_coming, waits in ((0, False), (2, False), (3, True), (64, True)):
        until_s = Forming(PACE_S).until_s(batch, n_coming, 5.0)
        assert until_s == (pytest.approx(5.0 + PACE_S) if waits else None)


def test_from_one_step_to_the_next_it_waits_no_longer_than_the_pace() -> None:
    instance, forming = Instance(), Forming(PACE_S)
    batch = instance.batch(1)
    forming.began(5.0)
    assert forming.until_s(batch, 9, 5.04) == pytest.approx(5.1)
    assert forming.until_s(batch, 9, 5.0999) == pytest.approx(5.1), "looking again does not begin anew"
    assert forming.until_s(batch, 9, 5.1001) is None


def test_who_comes_to_an_idle_instance_waits_from_then_on() -> None:
    instance, forming = Instance(), Forming(PACE_S)
    forming.began(5.0)
    forming.idle()
    batch = instance.batch(1)
    assert forming.until_s(batch, 9, 20.0) == pytest.approx(20.1)
    assert forming.until_s(batch, 9, 20.1001) is None


def test_one_more_in_the_batch_does_not_lengthen_the_wait_of_the_first() -> None:
    instance, forming = Instance(), Forming(PACE_S)
    assert forming.until_s(instance.batch(1), 9, 20.0) == pytest.approx(20.1)
    assert forming.until_s(instance.batch(1), 9, 20.08) == pytest.approx(20.1)


@pytest.mark.parametrize(("objectives_s", "pace_s"), [((), 0.1), ((1.0,), 0.1), ((0.1,), 0.05), ((0.08, 0.04), 0.02)])
def test_half_of_the_tightest_objective_is_the_longest_pause(objectives_s: Sequence[float], pace_s: float) -> None:
    jobs = [gated(f"gated {tbt_s}", tbt_s) for tbt_s in objectives_s]
    assert Forming(PACE_S).until_s(Instance().batch(1, *jobs), 9, 1.0) == pytest.approx(1.0 + pace_s)


def test_a_pace_of_nothing_never_waits() -> None:
    assert Forming(0.0).until_s(Instance().batch(1), 9, 1.0) is None


def test_who_runs_does_not_stand_back_for_long_where_nobody_comes() -> None:
    instance, forming, now_s, paces = Instance(), Forming(PACE_S), 5.0, list[float]()
    instance.batch(1)
    for _ in range(12):
        until_s = forming.until_s(instance.core.plan_step(), 1, now_s)
        paces.append(0.0 if until_s is None else until_s - now_s)
        now_s += paces[-1]
        forming.began(now_s)
        instance.steps()
        now_s += 0.02
    assert paces[0] == pytest.approx(PACE_S)
    assert paces[1] == pytest.approx(PACE_S - 0.02), "the step is part of the pace"
    assert paces[8:] == [0.0] * 4, "it is not worth it"
    assert sum(paces) < PACE_S + PATIENCE_S
    instance.batch(1)
    assert forming.until_s(instance.core.plan_step(), 2, now_s) == pytest.approx(now_s + PACE_S - 0.02), "somebody came"


@dataclass(frozen=True)
class Turn:
    """What happens before a look, and how long after the last one it is."""

    after_s: float
    come: int
    land: int


@given(
    st.lists(st.builds(Turn, after_s=st.floats(0, 0.3), come=st.integers(0, 3), land=st.integers(0, 3)), max_size=40)
)
def test_nobody_waits_longer_than_the_pace_nor_for_fewer_than_would_step(turns: list[Turn]) -> None:
    instance, forming = Instance(), Forming(PACE_S)
    coming: list[DecodeSequence] = []
    now_s, since_s = 100.0, None
    for turn in turns:
        now_s += 0.001 + turn.after_s
        coming += [instance.comes(job(f"{now_s} {n}", max_new=4)) for n in range(turn.come)]
        for sequence in coming[: turn.land]:
            instance.lands(sequence)
        del coming[: turn.land]
        batch = instance.core.plan_step()
        if not batch:
            forming.idle()
            since_s = None
            continue
        since_s = now_s if since_s is None else since_s
        until_s = forming.until_s(batch, instance.core.n_coming(len(batch)), now_s)
        if until_s is None:
            forming.began(now_s)
            since_s = now_s
            instance.steps()
        else:
            assert now_s < until_s <= since_s + PACE_S + 1e-9
            assert len(coming) >= len(batch)


# --- the clock of a service -------------------------------------------------------------------------------------------


class Cores:
    """Cores that others compute on, or not."""

    def __init__(self) -> None:
        self.is_contended = True
        self.rests = 0

    def rest(self) -> None:
        self.rests += 1


@dataclass
class Prompts:
    is_due: bool = False


class Clocked(Instance):
    """An instance that shares its cores, with one sequence to step and one that is coming."""

    def __init__(self, *, forming_s: float = 1000.0, max_batch: int = 64) -> None:
        super().__init__(max_batch)
        self.cores, self.prompts, self.changed = Cores(), Prompts(), Bell()
        self.forming_s = forming_s
        self.clock = self.made(self.cores)
        self.first, self.second = self.comes(), self.comes()
        self.lands(self.first)

    def made(self, cores: Cores | None) -> StepClock:
        return StepClock(self.core, cast(InlinePrompts, self.prompts), cores, self.changed, self.forming_s)

    def waits(self) -> bool:
        return self.clock.holds(self.core.plan_step())

    async def next_batch(self) -> list[DecodeSequence]:
        def look() -> list[DecodeSequence] | None:
            batch = self.core.plan_step()
            return None if self.clock.holds(batch) else batch

        return await self.changed.until(look)


@on_both_loops
def test_a_pause_leaves_the_cores_to_others(run: Run[None]) -> None:
    async def scenario() -> None:
        instance = Clocked()
        assert instance.waits()
        assert instance.cores.rests == 1
        instance.clock.begin()

    run(scenario())


@on_both_loops
def test_what_forbids_a_pause(run: Run[None]) -> None:
    async def scenario() -> None:
        alone, prompted, unshared = Clocked(), Clocked(), Clocked()
        alone.cores.is_contended = False
        prompted.prompts.is_due = True
        unshared.clock = unshared.made(None)
        never, full, last = Clocked(forming_s=0.0), Clocked(max_batch=1), Clocked()
        last.lands(last.second)
        for instance in (alone, prompted, unshared, never, full, last):
            assert not instance.waits()
            assert instance.cores.rests == 0

    run(scenario())


@on_both_loops
def test_nobody_to_decode_is_a_pause_without_an_end(run: Run[None]) -> None:
    async def scenario() -> None:
        instance = Clocked()
        for clock in (instance.clock, instance.made(None)):
            assert clock.holds([])
        assert instance.cores.rests == 1, "others need not wait until it is known to compute no more"

    run(scenario())


@on_both_loops
def test_who_lands_is_in_the_batch_that_waited_for_it(run: Run[None]) -> None:
    async def scenario() -> None:
        instance = Clocked()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(instance.next_batch())
            for _ in range(3):
                await asyncio.sleep(0)
                instance.changed.ring()
            assert not waiting.done()
            instance.lands(instance.second)
            instance.changed.ring()
            assert await soon(waiting) == [instance.first, instance.second]
        instance.clock.begin()

    run(scenario())


@on_both_loops
def test_whoever_is_awaited_and_stops_ends_the_pause(run: Run[None]) -> None:
    async def scenario() -> None:
        instance = Clocked()
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(instance.next_batch())
            await asyncio.sleep(0)
            instance.core.stopped(instance.second)
            instance.changed.ring()
            assert await soon(waiting) == [instance.first]
        instance.clock.begin()

    run(scenario())


@on_both_loops
def test_a_pause_ends_by_itself(run: Run[None]) -> None:
    async def scenario() -> None:
        instance = Clocked(forming_s=0.01)
        assert await soon(instance.next_batch()) == [instance.first]
        assert instance.cores.rests >= 1

    run(scenario())


def test_what_steps_take_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    instance, now_s = Clocked(), iter([1.0, 1.5, 3.0, 4.0])
    monkeypatch.setattr("mooncake_mesh.decode.step_clock.monotonic", lambda: next(now_s))
    for took_s, mean_s in ((0.5, 0.5), (1.0, 0.55)):
        instance.clock.begin()
        assert instance.clock.end() == took_s
        assert instance.clock.step_s == pytest.approx(mean_s)
