"""The account of one request: how its end and its times are told to the conductor."""

import asyncio

import pytest

from mooncake_mesh.errors import DeadlineExceeded, PeerUnreachable, Rejected
from mooncake_mesh.gateway import ledger
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.gateway.ledger import Ledger, RequestAccount
from mooncake_proto.ids import InstanceId, RequestId
from mooncake_proto.serving import Ending, FinishReason, Outcomes, Sampling, Stopping

REQUEST = TokenRequest(
    request_id=RequestId("r"),
    model="m",
    prompt=(1, 2, 3),
    sampling=Sampling(),
    stopping=Stopping(max_new_tokens=4),
    deadline_s=60.0,
    priority=-2,
)


def account(*at_s: float, finish: FinishReason | None = None) -> RequestAccount:
    """Tokens at these times, the request having come at 10 s."""
    made = RequestAccount(REQUEST, 10.0)
    for i, now_s in enumerate(at_s):
        is_last = i == len(at_s) - 1
        made.token(TokenEvent(token=7, cached_tokens=None if i else 2, finish=finish if is_last else None), now_s)
    return made


def test_times_of_a_finished_request() -> None:
    outcome = account(10.5, 10.6, 11.0, finish=FinishReason.STOP).outcome(1, None)
    assert outcome.ending is Ending.FINISHED
    assert (outcome.priority, outcome.prompt_tokens, outcome.cached_tokens, outcome.computed_tokens) == (-2, 3, 2, 1)
    assert (outcome.generated_tokens, outcome.ttft_s, outcome.tbt_s) == (3, 0.5, pytest.approx(0.4))


def test_a_text_that_ended_with_a_stop_string_is_whole_and_one_whose_reader_left_is_not() -> None:
    whole = account(10.5, 10.6)
    whole.satisfied()
    assert whole.outcome(0, None).ending is Ending.FINISHED
    left = account(10.5, 10.6).outcome(0, None)
    assert (left.ending, left.generated_tokens) == (Ending.CANCELLED, 2)


def test_a_refusal_is_one_only_before_the_first_token() -> None:
    busy = Rejected("tbt_objective", unavailable=False, retry_after_s=1.0)
    refused, broken, late = account(), account(10.5), account()
    refused.failed(busy)
    broken.failed(busy)
    late.failed(DeadlineExceeded("too late"))
    told = [(one.outcome(5, None).ending, one.outcome(5, None).reason) for one in (refused, broken, late)]
    assert told == [
        (Ending.REFUSED, "tbt_objective"),
        (Ending.FAILED, "tbt_objective"),
        (Ending.FAILED, "deadline_exceeded"),
    ]


def test_what_the_conductor_could_not_be_told_is_told_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_REPORT_S", 0.001)
    told: list[Outcomes] = []
    attempts = 0

    async def scenario() -> None:
        book, done = Ledger(), asyncio.Event()
        book.note(account().outcome(0, None))
        book.note(account(10.5).outcome(0, None))

        def post(batch: Outcomes) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise PeerUnreachable("no conductor")
            told.append(batch)
            done.set()

        running = asyncio.get_running_loop().create_task(book.run(InstanceId("g"), post))
        await asyncio.wait_for(done.wait(), 5)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(scenario())
    assert [len(batch.outcomes) for batch in told] == [2]
