"""The spans that a request's story becomes."""

import pytest

from mooncake_mesh.errors import Rejected
from mooncake_mesh.gateway.request_events import (
    CallerLeft,
    DeadlinePassed,
    NotPlaced,
    Placed,
    RequestEvent,
    Started,
    WorkerLost,
)
from mooncake_mesh.gateway.request_story import RequestStory
from mooncake_mesh.gateway.span_plan import PlannedSpan, planned
from tests.unit.test_gateway_core_races import D0, P0, entry, failed, first, job, placement
from tests.unit.test_gateway_request_story import request, told

BOTH = f"{P0.instance_id}, {D0.instance_id}"
BUSY = Rejected("decode_full", unavailable=False, retry_after_s=1.0)


def plan_of(*events: RequestEvent) -> PlannedSpan:
    """One event each second."""
    story = RequestStory(request("a-0"), 0.0, 1000.0)
    for at_s, event in enumerate((Started(), *events, CallerLeft())):
        story.note(event, float(at_s))
    return planned(story.trace())


def test_every_part_of_a_request_has_its_span_where_it_lies() -> None:
    plan = planned(told().trace())
    came_at = 1_700_000_000.0
    assert (plan.name, plan.start_s, plan.end_s) == ("choice", came_at, came_at + 6.5)
    lies = [
        (child.name, round(child.start_s - came_at, 3), round(child.end_s - came_at, 3), child.error)
        for child in plan.children
    ]
    assert lies == [
        ("placing", 0.0, 0.5, ""),
        ("queued", 0.9, 0.9, ""),
        ("prefill", 0.9, 1.0, ""),
        ("kv transfer", 1.0, 1.25, ""),
        ("placing", 2.0, 2.5, "decode_full"),
        ("placing", 2.5, 3.0, ""),
        ("queued", 3.9, 3.9, ""),
        ("prefill", 3.9, 4.0, ""),
        ("kv transfer", 4.0, 4.5, ""),
        ("decode", 4.0, 6.5, ""),
    ]
    assert [(event.name, round(event.at_s - came_at, 3)) for event in plan.events] == [
        ("received", 0.0),
        ("jobs accepted", 0.6),
        ("worker lost", 2.0),
        ("finished", 6.5),
    ]


def test_spans_say_where_they_were_and_what_is_known_of_them() -> None:
    plan = planned(told().trace())
    assert dict(plan.attributes) == {
        "mooncake.choice_id": "a-0",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "mooncake.finish_reason": "length",
    }
    places = [child.attributes.get("mooncake.instances") for child in plan.children]
    assert places[:5] == [BOTH, P0.instance_id, P0.instance_id, BOTH, None]
    assert plan.children[2].attributes["mooncake.detail"] == "2 tokens were cached"
    assert dict(plan.events[2].attributes) == {"mooncake.instances": D0.instance_id}


def test_a_loss_that_was_got_over_is_no_error_of_the_request() -> None:
    assert planned(told().trace()).error == ""


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ((), ""),  # the reader left
        ((NotPlaced(job_id=job(0), error=BUSY),), "not placed: decode_full"),
        ((Placed(placement=placement(0)), failed(0, D0)), "job failed: slice_lost: it failed"),
        ((Placed(placement=placement(0)), DeadlinePassed()), "deadline passed"),
        (
            (Placed(placement=placement(0)), first(0, 0, 7), entry(0, 1, 8), WorkerLost(instance_id=D0.instance_id)),
            f"worker lost: {D0.instance_id}",
        ),
        ((Placed(placement=placement(0)), first(0, 0, 7), entry(0, 1, 8)), ""),  # a stop string was all it wanted
    ],
)
def test_what_ended_a_choice_is_its_error(events: tuple[RequestEvent, ...], error: str) -> None:
    plan = plan_of(*events)
    assert plan.error == error
    assert "mooncake.finish_reason" not in plan.attributes


def test_no_span_begins_before_its_request() -> None:
    """A prefill instance measures its own times: the message with them may be faster than they say."""
    story = RequestStory(request("a-0"), 0.0, 1000.0)
    story.note(Placed(placement=placement(0)), 0.0)
    story.note(first(0, 0, 7), 0.05)  # it says that computing took 0.1 s
    assert all(1000.0 <= child.start_s <= child.end_s for child in planned(story.trace()).children)
