"""Answers of a given form: are they valid, and what does the form cost? `python -m bench.structured`.

A real model answers under a JSON schema at temperature 1; every answer is validated by another library than the one
that made the masks. The time per output token is measured in turns, in one mesh: batches of streams without a grammar,
under one that allows any text, and under a JSON schema. Neither can end before the last token that is asked for, so all
batches are equally long. Beside the time there is the CPU time of the decode process, which other work on the machine
stretches less.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import httpx
import jsonschema

from bench.load import Connection, StreamTimes
from bench.mesh import LocalMesh, local_mesh
from bench.report import Report

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"},
        "trade": {"enum": ["baker", "sailor", "teacher", "weaver"]},
        "tools": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"rooms": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 99}]}},
            "required": ["rooms"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "code", "trade", "tools", "home"],
    "additionalProperties": False,
}
"""Of bounded length: what may go on for ever is cut off at ``max_tokens`` sooner or later, and not valid then."""
_LONGEST_TOKENS: Final = 300
_CONCURRENT: Final = 16
_STREAMS: Final = 8
_TOKENS: Final = 24
_TIMEOUT_S: Final = 300.0
_PROMPT: Final = "<|im_start|>user\nInvent person number {number} and describe them.<|im_end|>\n<|im_start|>assistant\n"
_ANY_TEXT: Final = "(.|\\n){4000}"
_TIMED_SCHEMA: Final[dict[str, Any]] = {"type": "array", "items": {"type": "string"}, "minItems": 24}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer answers and rounds, about a minute")
    parser.add_argument("--rounds", type=int, help="of the times; a machine that does other work needs 30 or more")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    Report.add_flags(parser)
    args = parser.parse_args()
    answers, rounds = (24, 2) if args.quick else (200, 12)
    rounds = args.rounds or rounds
    report = Report("structured", f"{args.model}, {args.dtype}, temperature 1")
    settings = {"MOONCAKE_CONDUCTOR_TTFT_SLO_S": "600", "MOONCAKE_CONDUCTOR_TBT_SLO_S": "60"}
    with local_mesh([f"--model={args.model}", f"--dtype={args.dtype}"], settings) as mesh:
        asyncio.run(_validate(mesh, answers, report))
        asyncio.run(_time(mesh, rounds, report))
    report.finish(args)


async def _validate(mesh: LocalMesh, answers: int, report: Report) -> None:
    """Whether answers to different prompts with different seeds are what the schema asks for."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    slots = asyncio.Semaphore(_CONCURRENT)
    async with httpx.AsyncClient(base_url=f"http://{mesh.host}:{mesh.port}", timeout=_TIMEOUT_S) as client:

        async def ask(number: int) -> str:
            body = {
                "model": mesh.model,
                "messages": [{"role": "user", "content": f"Invent person number {number} and describe them."}],
                "temperature": 1.0,
                "seed": number,
                "max_tokens": _LONGEST_TOKENS,
                "response_format": form,
            }
            async with slots:
                answer = await client.post("/v1/chat/completions", json=body)
            return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

        texts = await asyncio.gather(*(ask(number) for number in range(answers)))
    wrong = [text for text in texts if not _is_valid(text)]
    report.row(
        "answers that are valid under the schema",
        answers - len(wrong),
        "answers",
        aim=f"{answers} of {answers}",
        met=not wrong,
        n=answers,
    )
    report.note(f"{len(set(texts))} different answers, for example {texts[0]}")
    for text in wrong[:3]:
        report.note(f"not valid: {text}")


def _is_valid(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def _time(mesh: LocalMesh, rounds: int, report: Report) -> None:
    """Time per output token with and without a grammar, in turns; which is first changes from round to round."""
    forms: dict[str, dict[str, object]] = {
        "any text": {"structured_outputs": {"regex": _ANY_TEXT}},
        "JSON schema": {"structured_outputs": {"json": _TIMED_SCHEMA}},
    }
    for form in forms.values():
        await _tpot_s(mesh, form, 0)  # the grammars are compiled
    times: dict[str, list[float]] = {name: [] for name in ("free", *forms)}
    cpu: dict[str, list[float]] = {name: [] for name in ("free", *forms)}
    order = random.Random(0)
    for number in range(1, rounds + 1):
        turn = ["free", *forms]
        order.shuffle(turn)
        for name in turn:
            before_s = _decode_cpu_s(mesh)
            times[name].append(await _tpot_s(mesh, forms.get(name, {}), number))
            cpu[name].append((_decode_cpu_s(mesh) - before_s) / (_STREAMS * _TOKENS))
    for name in forms:
        _tell(report, f"time per output token, {_STREAMS} streams under a grammar: {name}", times[name], times["free"])
        _tell(report, f"CPU time of the decode process per token under a grammar: {name}", cpu[name], cpu["free"])


def _tell(report: Report, metric: str, values_s: Sequence[float], free_s: Sequence[float]) -> None:
    """Medians over the rounds; how far the rounds' own ratios lie apart says how much the machine had else to do."""
    value_ms, free_ms = 1e3 * median(values_s), 1e3 * median(free_s)
    ratios = sorted(value / free for value, free in zip(values_s, free_s, strict=True))
    report.row(
        metric,
        value_ms,
        "ms",
        baseline=free_ms,
        aim="1.15 x free text",
        met=value_ms <= 1.15 * free_ms,
        n=len(values_s),
        spread=(1e3 * min(values_s), 1e3 * max(values_s)),
    )
    report.note(f"{metric}: ratios of single rounds {ratios[0]:.2f} … {median(ratios):.2f} … {ratios[-1]:.2f}")


def _decode_cpu_s(mesh: LocalMesh) -> float:
    times = mesh.processes["decode0"].cpu_times()
    return float(times.user + times.system)


async def _tpot_s(mesh: LocalMesh, form: dict[str, object], number: int) -> float:
    """Time between tokens of a batch of streams: the median of their means."""
    connections = [Connection(mesh.host, mesh.port) for _ in range(_STREAMS)]
    bodies: list[dict[str, object]] = [
        {
            "model": mesh.model,
            "prompt": _PROMPT.format(number=_STREAMS * number + index),
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "seed": index,
            **form,
        }
        for index in range(_STREAMS)
    ]
    try:
        pairs = zip(connections, bodies, strict=True)
        streams = await asyncio.gather(*(connection.stream(body) for connection, body in pairs))
    finally:
        for connection in connections:
            await connection.close()
    return median(_spacing_s(stream) for stream in streams)


def _spacing_s(stream: StreamTimes) -> float:
    """Tokens that are parts of one character come together, so it is by the number asked for that time is divided."""
    if stream.error:
        raise RuntimeError(f"a stream failed: {stream.error}")
    return (stream.tokens_s[-1] - stream.tokens_s[0]) / (_TOKENS - 1)


if __name__ == "__main__":
    main()
