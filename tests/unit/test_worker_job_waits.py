"""A stop ends the wait of its job and no other; a cancel that overtakes its job is not forgotten."""

import asyncio

import pytest

from mooncake_mesh.errors import Aborted
from mooncake_mesh.worker.job_waits import EarlyCancels, JobWaits
from mooncake_proto.ids import JobId

JOB, OTHER = JobId("a.0"), JobId("b.0")


def test_an_interrupt_ends_the_wait_of_its_job_only() -> None:
    async def scenario() -> list[str]:
        waits, seen, forever, stopped = JobWaits(), list[str](), asyncio.Event(), asyncio.Event()

        async def wait(job_id: JobId) -> None:
            try:
                async with waits.interruptible(job_id):
                    await forever.wait()
                seen.append(f"{job_id} went on")
            except Aborted:
                seen.append(f"{job_id} stopped")
                stopped.set()

        async with asyncio.TaskGroup() as tasks:
            for job_id in (JOB, OTHER):
                tasks.create_task(wait(job_id))
            await asyncio.sleep(0)
            waits.interrupt(JOB)
            waits.interrupt(JOB)
            await stopped.wait()
            forever.set()
        return seen

    assert asyncio.run(scenario()) == ["a.0 stopped", "b.0 went on"]


def test_the_awaited_call_hears_of_the_interrupt_as_a_cancellation() -> None:
    heard = []

    async def call() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    async def scenario() -> None:
        waits = JobWaits()
        asyncio.get_running_loop().call_soon(waits.interrupt, JOB)
        async with waits.interruptible(JOB):
            await call()

    with pytest.raises(Aborted):
        asyncio.run(scenario())
    assert heard == ["cancelled"]


def test_a_cancellation_from_outside_stays_one() -> None:
    async def scenario() -> None:
        waits = JobWaits()
        async with asyncio.timeout(0):
            async with waits.interruptible(JOB):
                await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_errors_pass_and_an_interrupt_after_the_wait_means_nothing() -> None:
    async def scenario() -> None:
        waits = JobWaits()
        with pytest.raises(KeyError):
            async with waits.interruptible(JOB):
                raise KeyError
        waits.interrupt(JOB)
        await asyncio.sleep(0)
        async with waits.interruptible(JOB):
            await asyncio.sleep(0)

    asyncio.run(scenario())


def test_a_cancel_that_overtakes_its_job_refuses_it() -> None:
    early = EarlyCancels()
    early.check(JOB)
    early.add(JOB)
    with pytest.raises(Aborted, match=r"a\.0"):
        early.check(JOB)
    early.check(OTHER)


def test_early_cancels_are_bounded() -> None:
    early = EarlyCancels()
    for n in range(5000):
        early.add(JobId(str(n)))
    early.check(JobId("0"))
    with pytest.raises(Aborted):
        early.check(JobId("4999"))
