"""Waking who waits: no ring between a look and the wait for the next ring is lost."""

import asyncio
import itertools

import pytest

from mooncake_mesh.mesh.bell import Bell
from tests.unit.mesh_doubles import Run, on_both_loops, soon

pytestmark = on_both_loops


def test_what_is_there_already_needs_no_ring(run: Run[None]) -> None:
    async def scenario() -> None:
        assert await soon(Bell().until(lambda: 0)) == 0, "only None means not yet"

    run(scenario())


def test_every_waiter_wakes_and_looks_again(run: Run[None]) -> None:
    async def scenario() -> None:
        bell, reached = Bell(), 0

        async def wait_for(level: int) -> int:
            return await bell.until(lambda: level if reached >= level else None)

        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(wait_for(level)) for level in range(1, 6)]
            for level in range(1, 6):
                reached = level
                bell.ring()
                await soon(waiting[level - 1])
                assert [task.done() for task in waiting] == [number < level for number in range(5)]

    run(scenario())


def test_no_ring_is_lost_at_any_moment_of_a_waiter(run: Run[None]) -> None:
    """A change and its ring come after every possible number of turns of the loop: each time the waiter ends."""

    async def scenario() -> None:
        for turns_before, turns_between in itertools.product(range(5), range(5)):
            bell, changes = Bell(), list[int]()

            async def wait_for_two(bell: Bell = bell, changes: list[int] = changes) -> int:
                return await bell.until(lambda: len(changes) if len(changes) == 2 else None)

            async with asyncio.TaskGroup() as tasks:
                waiting = tasks.create_task(wait_for_two())
                for turns in (turns_before, turns_between):
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    changes.append(turns)
                    bell.ring()
                assert await soon(waiting) == 2

    run(scenario())


def test_a_ring_wakes_no_later_waiter(run: Run[None]) -> None:
    async def scenario() -> None:
        bell = Bell()
        bell.ring()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bell.until(lambda: None)

    run(scenario())
