"""The HTTP door over a scripted mesh: refusals, side endpoints, limits, disconnects, and what stays hidden."""

import asyncio
from collections.abc import Iterator

import orjson
import pytest
import structlog
from structlog.typing import EventDict

from mooncake_mesh.errors import (
    Aborted,
    CallTimeout,
    DeadlineExceeded,
    InvariantViolated,
    PeerUnreachable,
    Rejected,
    RemoteFailure,
)
from mooncake_mesh.gateway.api import Readiness
from mooncake_mesh.gateway.completion import CompletionLimits
from mooncake_mesh.gateway.http import HttpLimits
from mooncake_mesh.gateway.tokenizer import ByteTokenizer
from mooncake_proto.control import Failure
from tests.unit.bad_requests import BAD_REQUESTS, BadRequest
from tests.unit.gateway_doubles import MODEL, Exchange, Gateway, ask, card, fails, get, hangs, says

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """Events that the test logged."""
    with structlog.testing.capture_logs() as events:
        yield events


HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def chat_body(**fields: object) -> bytes:
    return orjson.dumps({"model": MODEL, **HELLO, **fields})


def test_the_table_of_bad_requests_is_long_and_its_names_are_unique() -> None:
    assert len(BAD_REQUESTS) >= 40
    assert len({row.name for row in BAD_REQUESTS}) == len(BAD_REQUESTS)


@pytest.mark.parametrize("row", BAD_REQUESTS, ids=lambda row: row.name)
def test_a_bad_request_gets_its_error_and_the_next_one_is_answered(row: BadRequest) -> None:
    gateway = Gateway(says("ok"))

    async def run() -> None:
        bad = await Exchange(gateway.app, row.path, row.body_for(MODEL), method=row.method, **row.headers).run()
        assert bad.status == row.status, bad.body
        error = bad.json()["error"]
        assert (error["code"], error["param"]) == (row.code, row.param), error
        assert error["type"] == ("not_found_error" if row.status == 404 else "invalid_request_error")
        assert error["message"]
        assert row.param is None or row.param.partition("[")[0].partition(".")[0] in error["message"]
        assert bad.headers["content-type"] == "application/json"
        good = await Exchange(gateway.app, CHAT, chat_body()).run()
        assert good.json()["choices"][0]["message"]["content"] == "ok"
        assert len(gateway.mesh.requests) == 1  # only the good one reached the mesh

    asyncio.run(run())


def test_a_method_that_is_not_allowed_names_those_that_are() -> None:
    assert get(Gateway(says("")), CHAT).headers["allow"] == "POST"


def test_models_are_those_that_somebody_serves_and_this_gateway_can_tokenise() -> None:
    gateway = Gateway(says(""))
    gateway.mesh.cards = (card(context=512), card(context=256), card("other"))
    listed = get(gateway, "/v1/models").json()
    assert listed["object"] == "list"
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [(MODEL, 256)]
    assert get(gateway, f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_a_known_model_without_workers_is_unavailable_not_unknown() -> None:
    gateway = Gateway(says(""))
    gateway.mesh.cards = ()
    exchange = ask(gateway, CHAT, HELLO)
    assert exchange.status == 503
    assert exchange.headers["retry-after"] == "2"
    assert exchange.headers["x-mooncake-reject-reason"] == "no_instances"
    assert gateway.outcome("chat", "rejected") == 1


def test_health_is_about_the_process_and_ready_about_the_mesh() -> None:
    gateway = Gateway(says(""))
    assert get(gateway, "/ready").json() == {"ready": True, "reasons": []}
    gateway.mesh.state = Readiness(ready=False, reasons=("no decode instance",))
    ready = get(gateway, "/ready")
    assert (ready.status, ready.json()) == (503, {"ready": False, "reasons": ["no decode instance"]})
    assert [get(gateway, path).status for path in ("/health", "/ping")] == [200, 200]


def test_version_and_metrics() -> None:
    gateway = Gateway(says("abc", cached=2))
    ask(gateway, "/v1/completions", {"prompt": "hello"})
    assert get(gateway, "/version").json()["version"]
    text = get(gateway, "/metrics").body.decode()
    names = {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(name.startswith(("mooncake_", "vllm:")) for name in names)
    assert 'mooncake_requests_total{endpoint="completion",outcome="ok"} 1.0' in text
    assert "mooncake_requests_running 0.0" in text
    assert "mooncake_prompt_tokens_total 6.0" in text
    assert "mooncake_generated_tokens_total 4.0" in text
    assert "mooncake_cached_tokens_total 2.0" in text
    assert "mooncake_time_to_first_token_seconds_count 1.0" in text
    assert "mooncake_time_between_tokens_seconds_count 3.0" in text


def test_tokenize_and_detokenize() -> None:
    gateway = Gateway(says(""))
    tokens = ask(gateway, "/tokenize", {"prompt": "hé"}).json()
    assert tokens == {"count": 4, "max_model_len": 1024, "tokens": [256, 104, 195, 169]}
    assert ask(gateway, "/tokenize", {"prompt": "h", "add_special_tokens": False}).json()["tokens"] == [104]
    chat = ask(gateway, "/tokenize", HELLO).json()["tokens"]
    assert ask(gateway, "/detokenize", {"tokens": chat}).json() == {
        "prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    }


def test_long_prompts_are_tokenised_off_the_event_loop() -> None:
    text = "long " * 10_000
    assert ask(Gateway(says("")), "/tokenize", {"prompt": text}).json()["count"] == 50_001


def test_a_clients_request_id_is_echoed_and_is_only_a_label() -> None:
    gateway = Gateway(says("ok"))
    first, second = (ask(gateway, CHAT, HELLO, x_request_id="mine") for _ in range(2))
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine"
    assert first.json()["id"] != second.json()["id"]
    assert len({request.request_id for request in gateway.mesh.requests}) == 2


@pytest.mark.parametrize("label", ["", "x" * 129, "tab\tbed", "caf\u00e9"])
def test_a_request_id_that_fits_no_header_is_replaced(label: str) -> None:
    exchange = ask(Gateway(says("ok")), CHAT, HELLO, x_request_id=label)
    assert len(exchange.headers["x-request-id"]) == 32


def test_errors_carry_a_request_id_too() -> None:
    assert get(Gateway(says("")), "/nowhere").headers["x-request-id"]


def test_a_long_body_is_refused_by_its_length_without_reading_it() -> None:
    gateway = Gateway(says(""), http=HttpLimits(max_body_bytes=100))
    for headers in ({"content_length": "201"}, {"content_length": "101", "expect": "100-continue"}):
        exchange = Exchange(gateway.app, CHAT, [b"x" * 50] * 5, **headers)
        asyncio.run(exchange.run())
        assert (exchange.status, exchange.parts_read) == (413, 0)
        assert exchange.headers["connection"] == "close"


def test_a_body_a_little_too_long_is_read_to_its_end_and_refused() -> None:
    gateway = Gateway(says(""), http=HttpLimits(max_body_bytes=100))
    exchange = Exchange(gateway.app, CHAT, [b"x" * 60] * 2, content_length="120")
    asyncio.run(exchange.run())
    assert (exchange.status, exchange.parts_read) == (413, 2)


def test_of_a_body_without_end_twice_the_limit_is_read() -> None:
    gateway = Gateway(says(""), http=HttpLimits(max_body_bytes=100))
    exchange = Exchange(gateway.app, CHAT, [b"x" * 60] * 1000)
    asyncio.run(exchange.run())
    assert (exchange.status, exchange.parts_read) == (413, 4)


SERVER = "server_error"
TOO_LONG = Failure(code="context_length_exceeded", message="m", path="prompt")
NO_BLOCKS = Failure(code="no_free_blocks", message="m", retryable=True)
FAILURES = [
    (Rejected("slo", unavailable=False, retry_after_s=2.2), 429, "rejected", "rate_limit_error", "3", "slo"),
    (Rejected("no_decode", unavailable=True, retry_after_s=0.1), 503, "rejected", SERVER, "1", "no_decode"),
    (PeerUnreachable("gone"), 503, "peer_unreachable", SERVER, "1", "peer_unreachable"),
    (CallTimeout("slow"), 503, "call_timeout", SERVER, "1", "call_timeout"),
    (RemoteFailure(NO_BLOCKS), 503, "no_free_blocks", SERVER, "1", "no_free_blocks"),
    (RemoteFailure(TOO_LONG), 400, "context_length_exceeded", "invalid_request_error", None, None),
    (DeadlineExceeded("late"), 504, "deadline_exceeded", SERVER, None, None),
    (Aborted("lost"), 500, "aborted", SERVER, None, None),
    (InvariantViolated("secret"), 500, "internal_error", SERVER, None, None),
    (ZeroDivisionError("secret"), 500, "internal_error", SERVER, None, None),
]


@pytest.mark.parametrize(("error", "status", "code", "kind", "retry_after", "reason"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_before_the_first_token_has_its_status(
    error: Exception, status: int, code: str, kind: str, retry_after: str | None, reason: str | None, stream: bool
) -> None:
    gateway = Gateway(fails(error))
    exchange = ask(gateway, CHAT, {**HELLO, "stream": stream})
    assert exchange.status == status
    body = exchange.json()["error"]
    assert (body["code"], body["type"]) == (code, kind)
    assert "secret" not in body["message"]
    assert exchange.headers.get("retry-after") == retry_after
    assert exchange.headers.get("x-mooncake-reject-reason") == reason
    assert gateway.completions.running == 0


def test_a_crash_tells_the_request_id_only_and_the_log_has_the_rest(logs: list[EventDict]) -> None:
    exchange = ask(Gateway(fails(KeyError("secret"))), CHAT, HELLO)
    assert exchange.headers["x-request-id"] in exchange.json()["error"]["message"]
    (crash,) = logs
    assert crash["event"] == "request_crashed"
    assert crash["request_id"] == exchange.headers["x-request-id"]
    assert crash["exc_info"]


def test_a_crash_of_a_side_door_is_a_500_too() -> None:
    gateway = Gateway(says(""))
    gateway.mesh.state = None  # type: ignore[assignment]
    exchange = get(gateway, "/ready")
    assert exchange.status == 500
    assert exchange.json()["error"]["code"] == "internal_error"


@pytest.mark.parametrize("error", [Aborted("worker lost"), ZeroDivisionError("secret")])
def test_a_failure_after_the_first_token_is_an_event_and_the_stream_still_ends_properly(error: Exception) -> None:
    gateway = Gateway(fails(error, after=b"ab"))
    exchange = ask(gateway, CHAT, {**HELLO, "stream": True})
    assert exchange.status == 200
    *chunks, last = exchange.events()
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "ab"
    assert last["error"]["type"] == "server_error"
    assert "secret" not in last["error"]["message"]
    assert gateway.outcome("chat", "error") == 1


def test_a_draining_gateway_finishes_what_it_has_and_refuses_the_rest() -> None:
    gateway = Gateway(hangs(after=b"a"))

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            old = Exchange(gateway.app, CHAT, chat_body(stream=True))
            task = tasks.create_task(old.run())
            await gateway.mesh.until(lambda: bool(gateway.mesh.open))
            gateway.completions.drain()
            refused = await Exchange(gateway.app, CHAT, chat_body()).run()
            assert refused.status == 503
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "draining"
            ready = await Exchange(gateway.app, "/ready", method="GET").run()
            assert (ready.status, ready.json()["reasons"]) == (503, ["draining"])
            assert gateway.completions.running == 1
            old.disconnect()
            await task

    asyncio.run(run())


def test_too_many_requests_at_once_are_answered_429() -> None:
    gateway = Gateway(hangs(), limits=CompletionLimits(max_concurrent_requests=1))

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            first = Exchange(gateway.app, CHAT, chat_body())
            task = tasks.create_task(first.run())
            await gateway.mesh.until(lambda: bool(gateway.mesh.open))
            second = await Exchange(gateway.app, CHAT, chat_body()).run()
            assert (second.status, second.headers["x-mooncake-reject-reason"]) == (429, "gateway_full")
            first.disconnect()
            await task
        gateway.mesh.script = says("ok")
        assert (await Exchange(gateway.app, CHAT, chat_body()).run()).status == 200

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
@pytest.mark.parametrize("after", [b"", b"ab"])
def test_a_disconnect_cancels_every_choice(fields: dict[str, object], after: bytes) -> None:
    gateway = Gateway(hangs(after=after))
    choices = 1 if not after else fields.get("n", 1)  # siblings wait for the first token

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            exchange = Exchange(gateway.app, CHAT, chat_body(**fields))
            task = tasks.create_task(exchange.run())
            await gateway.mesh.until(lambda: len(gateway.mesh.open) == choices)
            assert not gateway.mesh.cancelled
            exchange.disconnect()
            await task
        assert not exchange.complete
        assert gateway.mesh.open == set()
        assert len(gateway.mesh.cancelled) == choices

    asyncio.run(run())
    assert gateway.completions.running == 0
    assert gateway.outcome("chat", "cancelled") == 1


def test_a_disconnect_while_the_body_is_sent_is_no_error(logs: list[EventDict]) -> None:
    gateway = Gateway(says(""))
    exchange = Exchange(gateway.app, CHAT, [])
    exchange.disconnect()
    asyncio.run(exchange.run())
    assert exchange.status == 0
    assert [event["log_level"] for event in logs] == ["debug"]


def test_a_request_past_its_deadline_is_a_504_and_cancelled() -> None:
    gateway = Gateway(hangs(), limits=CompletionLimits(deadline_s=0.02))
    exchange = ask(gateway, CHAT, HELLO)
    assert (exchange.status, exchange.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert gateway.mesh.cancelled
    assert gateway.outcome("chat", "deadline") == 1
    assert 0 < gateway.mesh.requests[0].deadline_s <= 0.02


def test_a_text_that_cannot_fit_is_refused_without_being_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ByteTokenizer, "encode")
    monkeypatch.delattr(ByteTokenizer, "encode_chat")
    text = "x" * (1024 * ByteTokenizer.longest_token_bytes + 1)
    gateway = Gateway(says(""))
    prompt = ask(gateway, "/v1/completions", {"prompt": text})
    chat = ask(gateway, CHAT, {"messages": [{"role": "user", "content": text}]})
    assert [exchange.json()["error"]["code"] for exchange in (prompt, chat)] == ["context_length_exceeded"] * 2


def test_unknown_fields_are_ignored_and_their_names_logged(logs: list[EventDict]) -> None:
    assert ask(Gateway(says("ok")), CHAT, {**HELLO, "no_such_field": {"a": 1}}).status == 200
    [line] = [line for line in logs if line["event"] == "unknown_fields_ignored"]
    assert line == {"event": "unknown_fields_ignored", "names": ["no_such_field"], "log_level": "debug"}
