"""``mooncake bench serve``: load for a server, and how it was served.

The figures have the names of ``vllm bench serve``, and beside them goodput under objectives, the share of prompt tokens
that came from the pool, and prefill that was wasted. The report goes to stdout, progress to stderr. An API key comes
from the variable MOONCAKE_API_KEY: a flag could be read by others.

Exit codes: 0 when all requests were answered or refused in order, 1 when some failed, 2 when there is no such server or
workload.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mooncake_mesh.loadtest.driver import LoadRun, Plan, ServedModel, drive, served_model
from mooncake_mesh.loadtest.outcomes import Ending, LoadObjectives, RequestResult, summarise
from mooncake_mesh.loadtest.plots import NoMatplotlib, draw
from mooncake_mesh.loadtest.report import json_report, text_report
from mooncake_mesh.loadtest.stream_client import NoServer, Target
from mooncake_mesh.loadtest.trace_file import read_trace_file
from mooncake_mesh.loadtest.workloads import (
    Arrivals,
    Lengths,
    LoadRequest,
    Replay,
    first_of,
    fitting,
    random_lengths,
    shared_prefixes,
    traced,
)

_PROG: Final = "mooncake bench serve"
_DEFAULT_REQUESTS: Final = 100


def run(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return asyncio.run(_run(arguments))
    except (NoServer, ValueError, OSError) as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    except NoMatplotlib as missing:
        sys.stderr.write(f"{_PROG}: {missing}\n")
        return 2
    except KeyboardInterrupt:
        return 130


async def _run(args: argparse.Namespace) -> int:
    target = Target(base_url=args.base_url, api_key=os.environ.get("MOONCAKE_API_KEY", ""))
    objectives = LoadObjectives(ttft_s=args.ttft, tbt_s=args.tbt)
    asked = workload(args)
    model = await served_model(target, args.model)
    requests = asked if model.max_context_tokens is None else fitting(asked, model.max_context_tokens)
    if len(requests) < len(asked):
        sys.stderr.write(f"{_PROG}: {len(asked) - len(requests)} requests left out: longer than the model's context\n")
    if not requests:
        raise ValueError("no request is left to be sent")
    done = await _drive(target, requests, model, args)
    summary = summarise(done.results, objectives)
    if args.json:
        report = {"model_id": model.name, "workload": args.workload, **json_report(summary, objectives, done.mesh)}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        sys.stdout.write(text_report(summary, objectives, done.mesh) + "\n")
    if args.plot is not None:
        draw(done.results, objectives, args.plot)
    return 1 if summary.failed else 0


async def _drive(target: Target, requests: list[LoadRequest], model: ServedModel, args: argparse.Namespace) -> LoadRun:
    plan = Plan(model=model.name, max_concurrency=args.max_concurrency, timeout_s=args.timeout)
    with Progress(
        TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
    ) as bars:  # fmt: skip
        bar = bars.add_task("", total=len(requests))
        troubles = 0

        def over(result: RequestResult) -> None:
            nonlocal troubles
            troubles += result.ending is not Ending.OK
            bars.update(bar, advance=1, description=f"{troubles} refused or failed" if troubles else "")

        return await drive(target, requests, plan, over)


def workload(args: argparse.Namespace) -> list[LoadRequest]:
    """What the flags ask for. Raises OSError or ValueError."""
    if args.workload == "trace":
        if args.trace is None:
            raise ValueError("--workload trace needs --trace FILE")
        replay = Replay(
            seconds=args.seconds,
            speed=args.speed,
            length_scale=args.length_scale,
            jitter_seed=args.jitter,
            seed=args.seed,
        )
        requests = traced(read_trace_file(args.trace), replay)
        return requests if args.requests is None else requests[: args.requests]
    arrivals = Arrivals(rate=args.request_rate, burstiness=args.burstiness)
    inputs = Lengths(mean=args.input_len, spread=args.spread)
    outputs = Lengths(mean=args.output_len, spread=args.spread)
    if args.workload == "shared-prefix":
        endless = shared_prefixes(
            arrivals, inputs, outputs, prefixes=args.prefixes, prefix_tokens=args.prefix_len, seed=args.seed
        )
    else:
        endless = random_lengths(arrivals, inputs, outputs, seed=args.seed)
    return first_of(endless, n=args.requests or _DEFAULT_REQUESTS, seconds=args.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake bench",
        description="Measure a server.",
        epilog="Where API keys are in use, one is taken from MOONCAKE_API_KEY.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "what", choices=["serve"], help="serve: send load to a running server and report how it is served"
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="the server, without /v1")
    add("--model", help="model to ask; the one that is served otherwise")
    add("--workload", default="random", choices=["random", "shared-prefix", "trace"])
    add("--requests", type=_positive, metavar="N", help=f"the first N (default {_DEFAULT_REQUESTS}; all of a trace)")
    add(
        "--seconds",
        type=float,
        default=float("inf"),
        metavar="S",
        help="only requests that come in the first S seconds",
    )
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="requests a second; inf: all at once")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; below: in bursts; above: evener",
    )
    add("--max-concurrency", type=_positive, metavar="N", help="requests that run at a time; no limit otherwise")
    add("--input-len", type=_positive, default=256, metavar="N", help="mean prompt tokens")
    add("--output-len", type=_positive, default=32, metavar="N", help="mean answer tokens")
    add("--spread", type=float, default=0.0, metavar="X", help="lengths are uniform within ± X of their mean")
    add("--prefixes", type=_positive, default=4, metavar="N", help="shared-prefix: how many there are")
    add(
        "--prefix-len",
        type=_positive,
        default=256,
        metavar="N",
        help="shared-prefix: their tokens, before the prompt's",
    )
    add("--trace", type=Path, metavar="FILE", help="trace: JSON lines as published by Mooncake")
    add("--speed", type=float, default=1.0, metavar="X", help="trace: replay X times faster")
    add("--length-scale", type=float, default=1.0, metavar="X", help="trace: multiply all lengths by X")
    add("--jitter", type=int, metavar="SEED", help="trace: move each arrival by U(0, 3 s)")
    add("--ttft", type=float, metavar="S", help="objective for the time to first token")
    add("--tbt", type=float, metavar="S", help="objective for the mean of a request's longest 10 %% of token intervals")
    add("--timeout", type=float, default=600.0, metavar="S", help="for each request")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print the report as one JSON object")
    add("--plot", type=Path, metavar="DIR", help="write pictures: times of the requests, load (needs matplotlib)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value
