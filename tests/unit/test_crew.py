"""Threads for copies: every piece of work has an outcome, also under cancellation and at the end."""

import asyncio
import threading

import pytest

from mooncake_mesh.mesh.crew import Crew


def test_work_runs_on_other_threads_and_answers_on_the_loop() -> None:
    async def scenario() -> None:
        crew = Crew(2, name="kv-work")
        both = threading.Barrier(2)  # passes only when two threads are at work at once

        def meet() -> str:
            both.wait(10.0)
            return threading.current_thread().name

        names = await asyncio.gather(crew.run(meet), crew.run(meet))
        assert threading.current_thread().name not in names
        crew.close()

    asyncio.run(scenario())


def test_what_work_raises_is_raised_where_it_is_awaited_and_the_thread_lives_on() -> None:
    async def scenario() -> None:
        crew = Crew(1, name="kv-work")

        def fail() -> None:
            raise ValueError("a bad slice")

        with pytest.raises(ValueError, match="a bad slice"):
            await crew.run(fail)
        assert await crew.run(lambda: 7) == 7
        crew.close()

    asyncio.run(scenario())


def test_work_whose_outcome_is_not_wanted_any_more_is_done_all_the_same() -> None:
    async def scenario() -> None:
        crew = Crew(1, name="kv-work")
        may_go = threading.Event()
        done: list[str] = []
        crew.run(lambda: may_go.wait(10.0))
        for outcome in (crew.run(lambda: done.append("returned")), crew.run(lambda: done.index("never there"))):
            outcome.cancel()
        may_go.set()
        await crew.run(lambda: None)
        assert done == ["returned"]
        crew.close()

    asyncio.run(scenario())


def test_closing_waits_for_the_work_that_was_given() -> None:
    async def scenario() -> None:
        crew = Crew(2, name="to be closed")
        done: list[int] = []
        for number in range(20):
            crew.run(lambda number=number: done.append(number))  # type: ignore[misc]
        crew.close()
        assert sorted(done) == list(range(20))

    asyncio.run(scenario())
    assert "to be closed" not in [thread.name for thread in threading.enumerate()]
