"""The queue of one report, and what is placed behind it until the next one."""

from math import inf

import pytest

from mooncake_mesh.conductor.snapshots import Pending, PromptQueue
from mooncake_mesh.policy.queue_order import waiting_prompt
from mooncake_mesh.policy.views import QueuedPrompt

LONG, SHORT = 4.0, 0.1


def report(*prefills_s: float, waiting: int = 0) -> PromptQueue:
    """An instance that says it has prompts of so many seconds, the last *waiting* of which came at 0 s."""
    n = len(prefills_s)
    return PromptQueue(tuple((100 + i, 0) for i in range(n)), prefills_s, [0] * n, [0.0] * waiting, 600.0)


def work(prefill_s: float, placed_s: float = 1.0) -> Pending:
    return Pending(placed_s=placed_s, tokens=7, prefill_s=prefill_s)


def services_s(queue: PromptQueue) -> list[float]:
    return [prompt.prefill_s for prompt in queue]


def test_what_is_placed_stands_where_its_instance_puts_it() -> None:
    reported = report(LONG, LONG, LONG, waiting=2)
    after = reported.followed_by([work(SHORT), work(LONG)], 3 * LONG + SHORT + LONG)
    assert services_s(after) == [LONG, SHORT, LONG, LONG, LONG], "it overtakes whoever waits, and not who has begun"
    assert len(after) == 5
    assert services_s(reported) == [LONG] * 3, "the report is as it was"


def test_of_one_report_the_prompts_are_made_once() -> None:
    reported = report(LONG, LONG, LONG, waiting=2)
    first = reported.followed_by([work(LONG)], 5 * LONG)
    second = reported.followed_by([work(LONG), work(LONG)], 6 * LONG)
    assert all(one is other for one, other in zip(list(first)[:3], list(second)[:3], strict=True))


@pytest.mark.parametrize("reported", [report(), report(LONG), report(LONG, LONG, waiting=1)])
def test_each_queue_follows_the_report_and_no_other_queue(reported: PromptQueue) -> None:
    twice = reported.followed_by([work(SHORT)], 10.0).followed_by([work(LONG), work(LONG)], 20.0)
    assert list(twice) == list(reported.followed_by([work(LONG), work(LONG)], 20.0))
    assert len(twice) == len(reported) + 2


def test_a_waiting_prompt_is_what_it_was_and_when_it_is_due() -> None:
    prompt = QueuedPrompt(tokens=7, prefill_s=2.0, priority=3)
    assert waiting_prompt(prompt, 5.0, 10.0) == QueuedPrompt(
        tokens=7, prefill_s=2.0, priority=3, due_s=5.0 + 10 * 2.0, latest_s=5.0 + 0.95 * 10.0
    )
    assert waiting_prompt(prompt, 5.0, None).latest_s == inf
