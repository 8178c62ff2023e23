"""What became of a request, told from the events of its life; and how the command shows it."""

import io
from dataclasses import replace

from rich.console import Console

from mooncake_mesh.cli import trace
from mooncake_mesh.errors import Rejected
from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.request_events import CallerLeft, JobsAccepted, NotPlaced, Placed, Started, WorkerLost
from mooncake_mesh.gateway.request_story import RequestStory, Stories
from mooncake_proto.ids import InstanceId, RequestId
from mooncake_proto.serving import DecodeGranted, FinishReason, Sampling, Stopping
from tests.unit.test_gateway_core_races import D0, P0, entry, first, job, placement


def request(request_id: str, tenant: str = "") -> TokenRequest:
    return TokenRequest(
        request_id=RequestId(request_id),
        model="m",
        prompt=(1, 2, 3),
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens=9),
        deadline_s=60.0,
        tenant=tenant,
    )


def told() -> RequestStory:
    """One loss of a decode worker, and an end; the request came at 100 s."""
    story = RequestStory(request("a-0"), 100.0, 1_700_000_000.0)
    story.note(Started(), 100.0)
    story.note(Placed(placement=placement(0)), 100.5)
    story.note(JobsAccepted(job_id=job(0)), 100.6)
    story.note(first(0, 0, 7, cached=2), 101.0)
    story.note(entry(0, 1, 8), 101.25)
    story.note(WorkerLost(instance_id=D0.instance_id), 102.0)
    busy = Rejected("decode_full", unavailable=False, retry_after_s=1.0)
    story.note(NotPlaced(job_id=job(1), error=busy), 102.5)
    story.note(Placed(placement=placement(1)), 103.0)
    story.note(first(1, 2, 9), 104.0)
    story.note(entry(1, 3, 10), 104.5)
    story.note(entry(1, 4, 11, finish=FinishReason.LENGTH), 106.5)
    story.note(CallerLeft(), 106.5)
    return story


def test_a_story_tells_every_step_with_its_time_and_place() -> None:
    found = told().trace()
    assert (found.is_over, found.prompt_tokens, found.generated_tokens) == (True, 3, 5)
    steps = [(step.what, round(step.at_s, 3), round(step.took_s, 3), step.where) for step in found.steps]
    both = f"{P0.instance_id}, {D0.instance_id}"
    assert steps == [
        ("received", 0.0, 0.0, ""),
        ("placed", 0.5, 0.5, both),
        ("jobs accepted", 0.6, 0.0, both),
        ("queued", 0.9, 0.0, P0.instance_id),
        ("prefill", 1.0, 0.1, P0.instance_id),
        ("kv transfer", 1.25, 0.25, both),
        ("worker lost", 2.0, 0.0, D0.instance_id),
        ("not placed", 2.5, 0.5, ""),
        ("placed", 3.0, 0.5, both),
        ("queued", 3.9, 0.0, P0.instance_id),
        ("prefill", 4.0, 0.1, P0.instance_id),
        ("kv transfer", 4.5, 0.5, both),
        ("decode", 6.5, 2.5, D0.instance_id),
        ("finished", 6.5, 0.0, ""),
    ]
    details = {step.what: step.detail for step in found.steps}
    assert details["not placed"] == "decode_full"
    assert details["decode"] == "5 tokens drawn, the slowest after 2.000 s"
    assert details["finished"] == "length"


def test_a_reader_who_leaves_ends_the_story() -> None:
    story = RequestStory(request("a-0"), 0.0, 0.0)
    story.note(Started(), 0.0)
    story.note(Placed(placement=placement(0)), 0.1)
    story.note(first(0, 0, 7), 0.2)
    story.note(entry(0, 1, 8), 0.3)
    assert not story.trace().is_over
    story.note(CallerLeft(), 0.4)
    assert [step.what for step in story.trace().steps][-2:] == ["decode", "ended"]
    assert story.trace().is_over


def test_what_came_before_computing_lies_where_the_prefill_instance_says() -> None:
    """Its blocks were there 0.75 s before it was the prompt's turn."""
    story = RequestStory(request("a-0"), 0.0, 0.0)
    placed = placement(0)
    for number, fetch_from in enumerate(("", "ipc://m-p1")):
        story.note(Placed(placement=replace(placed, fetch_from=fetch_from)), 10.0 * number)
        told = replace(first(0, 0, 7), prefill_s=1.0, queue_s=2.0, acquire_s=0.5, acquired_s=1.25)
        story.note(told, 10.0 * number + 5.0)
    steps = [(step.what, step.at_s, step.took_s, step.detail) for step in story.trace().steps if step.what != "placed"]
    cached = "0 tokens were cached"
    assert steps == [
        ("acquiring", 3.25, 0.5, "room, and the prefix that is there"),
        ("queued", 4.0, 2.0, ""),
        ("prefill", 5.0, 1.0, cached),
        ("acquiring", 13.25, 0.5, "room, and a prefix from another node"),
        ("queued", 14.0, 2.0, ""),
        ("prefill", 15.0, 1.0, cached),
    ]


def transfers(story: RequestStory) -> list[tuple[float, str]]:
    return [(step.took_s, step.detail) for step in story.trace().steps if step.what == "kv transfer"]


def test_a_decode_worker_that_grants_a_job_tells_when_its_kv_was_there() -> None:
    story = RequestStory(request("a-0"), 0.0, 0.0)
    story.note(Placed(placement=placement(0)), 0.0)
    story.note(first(0, 0, 7), 1.0)
    story.note(DecodeGranted(job_id=job(0)), 1.25)
    story.note(entry(0, 1, 8), 3.0)
    assert transfers(story) == [(0.25, "what was left after the first token, all of it is there")]


def test_there_is_no_transfer_within_one_instance_nor_for_one_token_nor_before_the_first() -> None:
    inside, alone, overtaken = (RequestStory(request("a-0"), 0.0, 0.0) for _ in range(3))
    inside.note(Placed(placement=placement(0, D0, D0)), 0.0)
    inside.note(first(0, 0, 7), 1.0)
    inside.note(entry(0, 1, 8), 1.25)
    alone.note(Placed(placement=placement(0)), 0.0)
    alone.note(first(0, 0, 7, finish=FinishReason.LENGTH), 1.0)
    overtaken.note(Placed(placement=placement(0)), 0.0)
    overtaken.note(entry(0, 1, 8), 0.9)
    overtaken.note(first(0, 0, 7), 1.0)
    overtaken.note(entry(0, 2, 9), 1.25)
    assert (transfers(inside), transfers(alone), transfers(overtaken)) == ([], [], [])


def test_many_losses_do_not_make_a_story_endless() -> None:
    story = RequestStory(request("a-0"), 0.0, 0.0)
    for _ in range(1000):
        story.note(WorkerLost(instance_id=InstanceId("d")), 1.0)
    assert len(story.trace().steps) == 64


def test_stories_are_found_by_the_id_of_the_answer_and_by_their_tenant_only() -> None:
    stories = Stories()
    for name, tenant in (("a-0", "acme"), ("a-1", "acme"), ("b-0", "zeta"), ("ab-0", "acme")):
        stories.begin(request(name, tenant), 0.0, 0.0)
    assert [one.request_id for one in stories.find("chatcmpl-a", "acme")] == ["a-0", "a-1"]
    assert [one.request_id for one in stories.find("cmpl-a-1", "acme")] == ["a-1"]
    assert stories.find("b", "acme") == ()
    for number in range(600):
        stories.begin(request(f"n{number}-0", "acme"), 0.0, 0.0)
    assert stories.find("a", "acme") == ()
    assert len(stories.find("n599", "acme")) == 1


def test_the_command_draws_steps_where_they_lie() -> None:
    out = io.StringIO()
    trace.show(told().trace(), Console(file=out, width=160))
    head, *lines = out.getvalue().splitlines()
    assert "3 prompt tokens, 5 drawn" in head
    assert len(lines) == 14
    decode = next(line for line in lines if " decode " in line)
    assert "2,500.0 ms" in decode
    assert decode.count("█") == round(40 * 6.5 / 6.5) - round(40 * 4.0 / 6.5)
    assert all("decode_full" in line for line in lines if "not placed" in line)
