"""When a prefill instance is through, by placements and reports together; a late or early beat changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.conductor.reckoning import QueueReckoning


def reckoning(*placed: tuple[float, float]) -> QueueReckoning:
    """After prompts of (seconds, when placed)."""
    queue = QueueReckoning()
    for prefill_s, now_s in placed:
        queue.placed(prefill_s, now_s)
    return queue


def test_prompts_follow_each_other_and_idle_time_is_lost() -> None:
    assert reckoning((2.0, 10.0), (1.0, 11.0)).busy_until_s == 13.0
    assert reckoning((2.0, 10.0), (1.0, 15.0)).busy_until_s == 16.0


@pytest.mark.parametrize("late_s", [-0.02, 0.0, 0.05, 0.1])
def test_a_report_that_is_a_little_early_or_late_changes_nothing(late_s: float) -> None:
    queue = reckoning((2.0, 10.0), (1.0, 11.0))
    queue.reported([2.0, 1.0], 0.5 - late_s, [], 10.5)
    queue.reported([1.0], max(0.0, 0.5 - late_s), [], 12.5)
    queue.reported([], 0.0, [], 13.0 - 0.05)
    assert queue.busy_until_s == 13.0


def test_a_long_prompt_that_took_longer_shows_behind_it_too() -> None:
    queue = reckoning((2.0, 10.0), (0.1, 11.0))
    queue.reported([0.1], 0.0, [], 12.1)
    assert queue.busy_until_s == pytest.approx(12.1), "a tenth of a second late is within a tenth of the long one"


def test_a_report_that_says_something_else_is_believed() -> None:
    queue = reckoning((2.0, 10.0), (1.0, 11.0))
    queue.reported([2.0, 1.0], 0.1, [], 11.5)
    assert queue.busy_until_s == pytest.approx(14.4), "it began later than was thought"
    queue.reported([], 0.0, [], 12.0)
    assert queue.busy_until_s == 12.0, "both were cancelled"
    queue.reported([5.0], 1.0, [], 13.0)
    assert queue.busy_until_s == 17.0, "somebody else placed it"


@pytest.mark.parametrize(("reported", "counted"), [([], 0), ([2.0], 1), ([2.0, 1.0], 2)])
def test_what_was_placed_just_before_a_beat_is_counted_once(reported: list[float], counted: int) -> None:
    queue = reckoning((2.0, 10.0), (1.0, 10.05))
    assert queue.reported(reported, 0.0, [2.0, 1.0], 10.06) == counted
    assert queue.busy_until_s == 13.0


@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.0, 1.0)), min_size=1, max_size=20),
    st.lists(st.floats(0.0, 0.02), min_size=60, max_size=60),
)
def test_no_delay_of_messages_shows_as_long_as_work_takes_what_it_should(
    prompts: list[tuple[float, float]], delays_s: list[float]
) -> None:
    """An instance that starts each prompt when the one before is through, and beats late by what *delays_s* say."""
    queue, now_s, ends_s, until_s = QueueReckoning(), 10.0, [], 0.0
    beats = iter(delays_s)
    for prefill_s, gap_s in prompts:
        now_s += gap_s
        queue.placed(prefill_s, now_s)
        until_s = max(until_s, now_s) + prefill_s
        ends_s.append((until_s - prefill_s, prefill_s))
        at_s = now_s + 0.1 + next(beats)
        waiting = [(start_s, one_s) for start_s, one_s in ends_s if start_s + one_s > at_s]
        elapsed_s = max(0.0, at_s - waiting[0][0]) if waiting else 0.0
        queue.reported([one_s for _, one_s in waiting], elapsed_s, [], at_s + next(beats) / 2)
        now_s = max(now_s, at_s)
    assert queue.busy_until_s == until_s
