"""The load client: its workloads, what it counts, and how it reads a server that behaves and one that does not."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest

from mooncake_mesh.cli import bench
from mooncake_mesh.loadtest.driver import Plan, drive, served_model
from mooncake_mesh.loadtest.mesh_counters import read_counters
from mooncake_mesh.loadtest.outcomes import Ending, LoadObjectives, RequestResult, summarise
from mooncake_mesh.loadtest.report import json_report, text_report
from mooncake_mesh.loadtest.stream_client import NoServer, StreamClient, Target
from mooncake_mesh.loadtest.trace_file import TraceLine, parse_trace_line
from mooncake_mesh.loadtest.workloads import (
    Arrivals,
    Lengths,
    LoadRequest,
    Replay,
    Segment,
    first_of,
    fitting,
    random_lengths,
    shared_prefixes,
    traced,
)
from mooncake_mesh.policy.slo import quantile

# --- workloads --------------------------------------------------------------------------------------------------------


def test_a_prompt_has_exactly_its_tokens_and_equal_segments_begin_alike() -> None:
    short, long = (LoadRequest(arrival_s=0, segments=(Segment(name="a", tokens=n),), output_tokens=1) for n in (5, 40))
    assert (len(short.prompt()), long.input_tokens, len(long.prompt())) == (5, 40, 40)
    assert long.prompt()[:5] == short.prompt()
    other = LoadRequest(arrival_s=0, segments=(Segment(name="b", tokens=40),), output_tokens=1)
    assert other.prompt() != long.prompt()


def test_random_lengths_come_at_the_rate_and_share_nothing() -> None:
    lengths = Lengths(mean=100, spread=0.5)
    requests = list(islice(random_lengths(Arrivals(rate=10), lengths, Lengths(mean=8), seed=1), 2000))
    assert requests[0].arrival_s == 0
    assert requests[-1].arrival_s == pytest.approx(200, rel=0.1)
    assert {50, 150} <= {request.input_tokens for request in requests} <= set(range(50, 151))
    assert {request.output_tokens for request in requests} == {8}
    assert len({request.segments[0].name for request in requests}) == 2000
    again = list(islice(random_lengths(Arrivals(rate=10), lengths, Lengths(mean=8), seed=1), 5))
    assert again == requests[:5]


def test_without_a_rate_all_come_at_once() -> None:
    requests = first_of(
        random_lengths(Arrivals(rate=math.inf), Lengths(mean=4), Lengths(mean=4), seed=0), n=7, seconds=1
    )
    assert [request.arrival_s for request in requests] == [0.0] * 7


def test_shared_prefixes_are_shared() -> None:
    endless = shared_prefixes(Arrivals(rate=1), Lengths(mean=10), Lengths(mean=4), prefixes=3, prefix_tokens=64, seed=0)
    requests = list(islice(endless, 50))
    assert len({tuple(request.prompt()[:64]) for request in requests}) == 3
    assert len({tuple(request.prompt()) for request in requests}) == 50


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0)])
def test_arrivals_that_make_no_sense(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Arrivals(rate=rate, burstiness=burstiness)


def test_the_first_of_a_workload_end_by_number_or_by_time() -> None:
    arrivals = Arrivals(rate=1, burstiness=1e6)  # one every second
    assert len(first_of(random_lengths(arrivals, Lengths(mean=4), Lengths(mean=4), seed=0), n=99, seconds=9.5)) == 10


def _line(at_s: float, tokens: int, ids: tuple[int, ...]) -> TraceLine:
    return TraceLine(arrival_s=at_s, input_tokens=tokens, output_tokens=100, block_ids=ids)


def test_a_trace_is_scaled_with_what_its_prompts_share() -> None:
    lines = [_line(0, 1024 + 256, (1, 2, 3)), _line(30, 1024 + 512, (1, 2, 4)), _line(90, 512, (9,))]
    requests = traced(lines, Replay(seconds=60, speed=2, length_scale=1 / 16))
    assert [(r.arrival_s, r.input_tokens, r.output_tokens) for r in requests] == [(0, 80, 6), (15, 96, 6)]
    assert requests[0].prompt()[:64] == requests[1].prompt()[:64]
    assert requests[0].prompt()[64:] != requests[1].prompt()[64:80]


def test_jitter_moves_arrivals_by_less_than_a_bucket() -> None:
    lines = [_line(0, 512, (n,)) for n in range(100)]
    arrivals = [r.arrival_s for r in traced(lines, Replay(jitter_seed=1))]
    assert arrivals == sorted(arrivals)
    assert 0 < arrivals[0] < arrivals[-1] < 3


def test_what_does_not_fit_into_the_context_is_left_out() -> None:
    requests = traced([_line(0, 512, (1,)), _line(0, 2048, (1, 2, 3, 4))], Replay())
    assert fitting(requests, 1000) == requests[:1]


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]},
        {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1]},
        [],
    ],
)
def test_lines_that_are_no_requests(line: object) -> None:
    with pytest.raises(ValueError, match="not a request of a trace"):
        parse_trace_line(line)


# --- what is counted --------------------------------------------------------------------------------------------------


def _result(sent_s: float, *token_s: float, cached: int | None = 10) -> RequestResult:
    return RequestResult(
        sent_s=sent_s,
        input_tokens=100,
        ending=Ending.OK,
        token_s=list(token_s),
        output_tokens=len(token_s),
        cached_tokens=cached,
        ended_s=token_s[-1],
    )


def test_times_of_one_request() -> None:
    result = _result(1.0, 1.5, 1.6, 1.9)
    assert result.ttft_s == pytest.approx(0.5)
    assert result.tpot_s == pytest.approx(0.2)
    assert result.intervals_s == pytest.approx([0.1, 0.3])
    assert result.tbt_s == pytest.approx(0.3)
    assert result.e2e_s == pytest.approx(0.9)
    assert (_result(0, 1).tpot_s, _result(0, 1).tbt_s) == (None, None)


def test_goodput_waste_and_hits() -> None:
    refused = RequestResult(sent_s=0.5, input_tokens=100, ending=Ending.REFUSED, reason="tbt", ended_s=0.6)
    results = [_result(0.0, 0.1, 0.2), _result(0.0, 3.0, 3.1), _result(1.0, 1.1, 4.0), refused]
    summary = summarise(results, LoadObjectives(ttft_s=1.0, tbt_s=0.5))
    assert (summary.completed, summary.refused, summary.failed, summary.good) == (3, 1, 0, 1)
    assert summary.duration_s == pytest.approx(4.0)
    assert summary.goodput_per_s == pytest.approx(0.25)
    assert summary.good_share == 0.25
    assert summary.hit_rate == pytest.approx(0.1)
    assert summary.wasted_prefill_tokens == 180
    assert summary.reasons == {"tbt": 1}
    assert summary.peak_concurrent == 2
    assert summary.peak_output_tokens_per_s == 2


def test_what_a_server_does_not_tell_is_unknown() -> None:
    summary = summarise([_result(0, 1, cached=None), _result(0, 1)], LoadObjectives())
    assert (summary.cached_tokens, summary.hit_rate) == (None, None)
    assert "not told" in text_report(summary, LoadObjectives(), None)


def test_quantiles_are_values_that_occurred() -> None:
    values = sorted(Random(0).random() for _ in range(100))
    assert quantile(values, 0.99) == values[98]
    assert quantile([1.0], 0.5) == 1.0


def test_the_mesh_s_own_counters() -> None:
    text = (
        "# TYPE mooncake_placements counter\nmooncake_placements_total 7\n"
        "# TYPE mooncake_wasted_prefill_tokens counter\n"
        'mooncake_wasted_prefill_tokens_total{class="standard"} 5\n'
        'mooncake_wasted_prefill_tokens_total{class="batch"} 6\n'
    )
    before, after = read_counters(text), read_counters(text.replace("total 7", "total 9").replace("} 5", "} 15"))
    assert before is not None
    assert after is not None
    assert ((after - before).placed, (after - before).wasted_prefill_tokens) == (2, 10)
    assert read_counters("# TYPE other counter\nother_total 1\n") is None


# --- over HTTP --------------------------------------------------------------------------------------------------------

Serve = Callable[[str, bytes], list[bytes]]
"""Head and body of a request to the pieces of its answer; the connection is closed behind a last piece of b""."""


async def _serving(serve: Serve, use: Callable[[Target], Awaitable[object]]) -> list[str]:
    """Requests' first lines, while *use* talks to a server that answers with *serve*."""
    asked = []
    answering = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
            except asyncio.IncompleteReadError:
                break
            length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length"))
            body = await reader.readexactly(int(length))
            asked.append(head.split("\r\n")[0])
            pieces = serve(head, body)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            if pieces[-1] == b"":
                break
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        await use(Target(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", api_key="k"))
        server.close()
        await asyncio.gather(*(task for task in answering if task))
    return asked


def _chunked(*events: object) -> list[bytes]:
    pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"]
    for event in events:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        half = len(data) // 2  # an event may come in two parts
        pieces += [f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (data[:half], data[half:])]
    return [*pieces, b"0\r\n\r\n"]


def _choice(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


_USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}},
}


def _plain(status: str, body: object, *headers: str) -> list[bytes]:
    data = json.dumps(body).encode() if not isinstance(body, str) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", *headers, "", ""]
    return ["\r\n".join(lines).encode() + data]


def _complete(serve: Serve, n: int = 1) -> tuple[list[RequestResult], list[str]]:
    results = [RequestResult(sent_s=0, input_tokens=1) for _ in range(n)]

    async def use(target: Target) -> None:
        client = StreamClient(target, lambda: 1.0)
        for result in results:
            await client.complete({"model": "m", "prompt": [1]}, result)
        await client.aclose()

    return results, asyncio.run(_serving(serve, use))


def test_tokens_usage_and_the_end_of_a_stream() -> None:
    seen = []

    def serve(head: str, body: bytes) -> list[bytes]:
        seen.append((head, json.loads(body)))
        return _chunked(
            _choice("", token_ids=[5]), _choice("ab", token_ids=[6, 7]), _choice("", token_ids=[8]), _USAGE, "[DONE]"
        )

    (one, two), asked = _complete(serve, 2)
    assert (one.ending, one.reason, len(one.token_s)) == (Ending.OK, "", 4)
    assert (one.input_tokens, one.output_tokens, one.cached_tokens) == (9, 4, 8)
    assert two.ending is Ending.OK
    assert asked == ["POST /v1/completions HTTP/1.1"] * 2
    head, body = seen[0]
    assert "authorization: Bearer k" in head
    assert body["stream_options"] == {"include_usage": True}


def test_a_server_without_token_ids_is_counted_by_its_chunks() -> None:
    (result,), _ = _complete(lambda _, __: _chunked(_choice("a"), _choice("b"), _choice(""), "[DONE]"))
    assert (len(result.token_s), result.cached_tokens) == (2, None)


@pytest.mark.parametrize(
    ("answer", "ending", "reason"),
    [
        (_plain("429 Too Many", {}, "x-mooncake-reject-reason: tbt"), Ending.REFUSED, "tbt"),
        (_plain("503 No", {"error": {"message": "none"}}), Ending.REFUSED, "HTTP 503: none"),
        (_plain("400 No", {"error": {"message": "long"}}), Ending.FAILED, "HTTP 400: long"),
        (_plain("500 No", "<html>"), Ending.FAILED, "HTTP 500: <html>"),
        (_chunked(_choice("a"), {"error": {"message": "lost"}}, "[DONE]"), Ending.FAILED, "lost"),
        ([*_chunked(_choice("a"))[:2], b""], Ending.FAILED, "IncompleteReadError"),
        (_chunked(_choice("a")), Ending.FAILED, "the stream ended without [DONE]"),
        ([b"SSH-2.0-x\r\n\r\n", b""], Ending.FAILED, "ValueError: not an HTTP response: 'SSH-2.0-x'"),
    ],
)
def test_answers_that_are_none(answer: list[bytes], ending: Ending, reason: str) -> None:
    (result,), _ = _complete(lambda _, __: answer)
    assert result.ending is ending
    assert result.reason.startswith(reason)


def test_nobody_listens() -> None:
    with pytest.raises(NoServer, match=r"127\.0\.0\.1:9"):
        asyncio.run(served_model(Target(base_url="http://127.0.0.1:9"), None))
    with pytest.raises(ValueError, match="not the URL"):
        Target(base_url="127.0.0.1:8000")


@pytest.mark.parametrize(("name", "error"), [("b", ""), (None, "serves a, b"), ("c", "not c")])
def test_which_model_is_asked(name: str | None, error: str) -> None:
    cards = {"data": [{"id": "a"}, {"id": "b", "max_model_len": 64}]}

    async def use(target: Target) -> None:
        if error:
            with pytest.raises(NoServer, match=error):
                await served_model(target, name)
        else:
            assert (await served_model(target, name)).max_context_tokens == 64

    asyncio.run(_serving(lambda _, __: _plain("200 OK", cards), use))


def test_a_run_keeps_to_its_concurrency_and_counts_what_the_mesh_counts() -> None:
    ended = 0

    def serve(head: str, _: bytes) -> list[bytes]:
        nonlocal ended
        if head.startswith("GET"):
            text = (
                "# TYPE mooncake_placements counter\nmooncake_placements_total 1\n"
                "# TYPE mooncake_slo_requests counter\n"
                f'mooncake_slo_requests_total{{class="standard",ending="finished"}} {ended}\n'
            )
            return _plain("200 OK", text)
        ended += 1
        return _chunked(_choice("a"), _USAGE, "[DONE]")

    requests = first_of(
        random_lengths(Arrivals(rate=math.inf), Lengths(mean=4), Lengths(mean=1), seed=0), n=9, seconds=1
    )
    heard: list[RequestResult] = []

    async def use(target: Target) -> None:
        run = await drive(target, requests, Plan(model="m", max_concurrency=2), heard.append)
        assert run.mesh is not None
        assert run.mesh.ended == 9
        summary = summarise(run.results, LoadObjectives())
        assert (summary.completed, summary.peak_concurrent) == (9, 2)
        assert json_report(summary, LoadObjectives(), run.mesh)["mesh"]["ended"] == 9

    asyncio.run(_serving(serve, use))
    assert len(heard) == 9


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used_again() -> None:
    connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length"))
        await reader.readexactly(int(length))
        writer.writelines(_chunked(_choice("a"), _USAGE, "[DONE]"))
        writer.close()
        await writer.wait_closed()

    async def use() -> list[Ending]:
        server = await asyncio.start_server(once, "127.0.0.1", 0)
        client = StreamClient(Target(base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), lambda: 0.0)
        results = [RequestResult(sent_s=0, input_tokens=1) for _ in range(3)]
        for result in results:
            await client.complete({"model": "m", "prompt": [1]}, result)
            assert await client._free[0]._reader.read() == b""  # the server's end has been heard
        await client.aclose()
        server.close()
        await server.wait_closed()
        return [result.ending for result in results]

    assert asyncio.run(use()) == [Ending.OK] * 3
    assert connections == 3


def test_a_request_without_an_end_fails_after_its_time() -> None:
    left = asyncio.Event()

    async def stuck(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client has left
        writer.close()
        await writer.wait_closed()
        left.set()

    async def use() -> RequestResult:
        server = await asyncio.start_server(stuck, "127.0.0.1", 0)
        address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result = RequestResult(sent_s=0, input_tokens=1)
        client = StreamClient(Target(base_url=address), lambda: 0.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.complete({}, result)
        server.close()
        await left.wait()
        return result

    assert asyncio.run(use()).ending is Ending.FAILED


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--base-url", "http://127.0.0.1:9"], "127.0.0.1:9/v1/models"),
        (["--workload", "trace"], "needs --trace"),
        (["--workload", "trace", "--trace", "/nowhere"], "No such file"),
        (["--request-rate", "0"], "positive"),
        (["--base-url", "ftp://x"], "not the URL"),
    ],
)
def test_the_command_says_what_is_wrong(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(["serve", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_trace_file_names_its_bad_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{}\n')
    assert bench.run(["serve", "--workload", "trace", "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err
