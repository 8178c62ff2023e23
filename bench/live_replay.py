"""The conversation trace on a live mesh, and what the simulator says of it: `python -m bench.live_replay`.

A mesh with one prefill and one decode instance is measured by `mooncake profile`. The first minutes of the trace are
then sent to one that starts afresh, at the trace's own pace, with all lengths scaled until this machine can serve them.
The simulator is told the measured costs, the size of the pools, and of each request when it was sent, how long it is
and which blocks its prompt has; nothing of how it was served. Values are the simulator's, baselines the live ones.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from time import monotonic
from typing import Any, Final

import psutil

from bench.live_compare import compare, live_side, paired_ttfts, simulated_side
from bench.live_mesh import Measured, measure, simulated
from bench.live_work import demand, every_family, largest_block, scaled
from bench.mesh import LocalMesh, local_mesh
from bench.report import Report, say
from bench.simulator_results import RunResult
from bench.traces import TRACES
from mooncake_mesh.loadtest.driver import LoadRun, Plan, drive, served_model
from mooncake_mesh.loadtest.outcomes import LoadObjectives, RequestResult, summarise
from mooncake_mesh.loadtest.stream_client import Target
from mooncake_mesh.loadtest.trace_file import TRACE_BLOCK_TOKENS, TraceLine, read_trace_file
from mooncake_mesh.loadtest.workloads import Arrivals, Lengths, LoadRequest, first_of, random_lengths

_WARM_UP: Final = 6
_ONE_THREAD: Final = ("--threads=1",)
"""A profile is measured with one instance at work at a time, which would have all the cores that they share."""
_FAKE: Final = (
    "--engine", "fake", "--fake-prefill-s-base", "0.01", "--fake-prefill-s-per-token", "0.0012",
    "--fake-decode-s-base", "0.03", "--fake-decode-s-per-slot", "0.003", "--arena-bytes", "6MiB",
)  # fmt: skip
"""About what the real model takes here, and as many tokens of KV as it has in 1 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Shares of all processors that other processes took, at normal and at low priority."""

    normal: float
    low: float

    def __str__(self) -> str:
        return f"{self.normal:.0%} (and {self.low:.0%} at low priority)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """``others_before``: while the mesh was measured; ``others``: while another one served."""

    requests: list[LoadRequest]
    results: tuple[RequestResult, ...]
    measured: Measured
    others_before: Others
    others: Others


def main() -> int:
    """0 when the comparison was made and no request failed."""
    args = _parser().parse_args()
    path = args.traces / "conversation_trace.jsonl"
    try:
        whole = list(takewhile(lambda line: line.arrival_s < 60 * args.minutes, read_trace_file(path)))
    except OSError as error:
        sys.stderr.write(f"bench.live_replay: {error} (--traces)\n")
        return 2
    objectives = LoadObjectives(ttft_s=args.ttft, tbt_s=args.tbt)
    live = _live(every_family(whole, args.every), args)
    say("simulating")
    result = simulated(live.requests, live.results, live.measured, objectives)
    ours, said = live_side(live.results, objectives), simulated_side(result, objectives)
    report = Report("live replay", f"conversation trace, {args.engine} engine; value: simulator, baseline: live")
    compare(report, ours, said, paired_ttfts(live.results, result.records))
    for note in _notes(live, objectives, args):
        report.note(note)
    if args.keep:
        _keep(args.keep, live, result)
    report.finish(args)
    return 1 if ours.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.live_replay", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--engine", default="transformers", choices=["transformers", "fake"])
    add("--minutes", type=float, default=5.0, metavar="M", help="how much of the trace")
    add("--scale", type=float, metavar="X", help="all lengths times X (default: what the profile says fits --load)")
    add("--load", type=float, default=0.5, metavar="SHARE", help="of what each instance can do, by its profile")
    add("--every", type=int, default=1, metavar="K", help="only every K-th family of prompts")
    add("--ttft", type=float, default=5.0, metavar="S", help="objective for the time to first token")
    add("--tbt", type=float, default=0.5, metavar="S", help="objective for the time between tokens")
    add("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of the published traces")
    add("--keep", type=Path, metavar="FILE", help="write both runs there, request by request, as JSON")
    Report.add_flags(parser)
    return parser


# --- the live mesh ----------------------------------------------------------------------------------------------------


def _live(lines: Sequence[TraceLine], args: argparse.Namespace) -> LiveRun:
    """Measure a mesh, choose the scale by that, and replay *lines* on another one that is like it."""
    flags = ["--nodes", "2", *(_FAKE if args.engine == "fake" else _ONE_THREAD)]
    with tempfile.TemporaryDirectory(prefix="mooncake-live-") as folder:
        profile = Path(folder) / "cost.json"
        say("profiling a mesh")
        with local_mesh(flags) as mesh, others() as beside_profile:
            measured = measure(mesh, profile)
        requests = scaled(lines, _block_tokens(lines, measured, args))
        settings = {
            "MOONCAKE_CONDUCTOR_COST_PROFILE": str(profile),
            "MOONCAKE_CONDUCTOR_TTFT_SLO_S": str(args.ttft),
            "MOONCAKE_CONDUCTOR_TBT_SLO_S": str(args.tbt),
        }
        with local_mesh(flags, settings) as mesh:
            asyncio.run(_send(mesh, _warm_up()))
            say(f"sending {len(requests)} requests in {args.minutes:g} minutes")
            with others() as beside_run:
                run = asyncio.run(_send(mesh, requests))
    return LiveRun(
        requests=requests,
        results=run.results,
        measured=measured,
        others_before=beside_profile[0],
        others=beside_run[0],
    )


def _block_tokens(lines: Sequence[TraceLine], measured: Measured, args: argparse.Namespace) -> int:
    """What a block of the trace becomes."""
    scale: float | None = args.scale
    if scale is not None:
        return max(1, round(scale * TRACE_BLOCK_TOKENS))
    return largest_block(lines, measured.cost, 60 * args.minutes, measured.block_tokens, args.load)


def _warm_up() -> list[LoadRequest]:
    """An engine's first prompts take longer than any like them."""
    arrivals = Arrivals(rate=2.0)
    endless = random_lengths(arrivals, Lengths(mean=300, spread=0.8), Lengths(mean=8), seed=-1)
    return first_of(endless, n=_WARM_UP, seconds=float("inf"))


async def _send(mesh: LocalMesh, requests: Sequence[LoadRequest]) -> LoadRun:
    target = Target(base_url=f"http://{mesh.host}:{mesh.port}")
    model = await served_model(target, mesh.model)
    return await drive(target, requests, Plan(model=model.name), lambda _: None)


@contextmanager
def others() -> Iterator[list[Others]]:
    """A list that gets what other processes took during the block. Ours all run at normal priority."""
    shares: list[Others] = []
    before, own_s, began_s = psutil.cpu_times(), _own_s(), monotonic()
    yield shares
    spent_s = (monotonic() - began_s) * psutil.cpu_count()
    now = psutil.cpu_times()
    taken_s = _busy_s(now) - _busy_s(before) - (_own_s() - own_s)
    shares.append(Others(normal=max(0.0, taken_s) / spent_s, low=(now.nice - before.nice) / spent_s))


def _busy_s(times: Any) -> float:
    """At normal priority, by what psutil counts of all processors."""
    return float(times.user + times.system + times.irq + times.softirq)


def _own_s() -> float:
    """Of this process and all that it started, the ended ones included."""
    mine = psutil.Process()
    times = [process.cpu_times() for process in (mine, *mine.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


# --- what is told -----------------------------------------------------------------------------------------------------


def _notes(live: LiveRun, objectives: LoadObjectives, args: argparse.Namespace) -> Iterator[str]:
    """What was done, plainly."""
    requests, measured = live.requests, live.measured
    mean_in = sum(request.input_tokens for request in requests) / len(requests)
    mean_out = sum(request.output_tokens for request in requests) / len(requests)
    block = max(segment.tokens for request in requests for segment in request.segments)
    families = "all" if args.every == 1 else f"every family of {args.every}"
    yield (
        f"{len(requests)} requests ({families}) of {args.minutes:g} minutes at the trace's pace; lengths x 1/"
        f"{TRACE_BLOCK_TOKENS / block:.3g}: {mean_in:.0f} tokens in and {mean_out:.1f} out on average"
    )
    asked = demand(requests, measured.cost, 60 * args.minutes, measured.block_tokens)
    yield (
        f"by the profile that is {asked.prefill:.0%} of a prefill instance, {asked.decode:.0%} of decoding in batches "
        f"of 8; {asked.hit_rate:.1%} of the prompt tokens were seen before; a pool has {measured.pool_blocks} blocks "
        f"of {measured.block_tokens} tokens"
    )
    if args.scale is None and asked.highest > args.load:
        yield f"that is more than --load {args.load:g} at the smallest scale: --every K takes fewer requests"
    yield f"objectives: TTFT {args.ttft:g} s, TBT {args.tbt:g} s (mean of a request's longest 10 % of intervals)"
    yield f"others took {live.others_before} of the processors while profiling, {live.others} during the replay"
    lag_s = max(sent.sent_s - due.arrival_s for due, sent in zip(requests, live.results, strict=True))
    yield f"the client sent each request within {1e3 * lag_s:.0f} ms of when it was due"
    for reason, n in summarise(live.results, objectives).reasons.items():
        yield f"live: {n} x {reason}"


def _keep(path: Path, live: LiveRun, simulation: RunResult) -> None:
    in_order = sorted(zip(live.requests, live.results, strict=True), key=lambda pair: pair[1].sent_s)
    rows = [
        {
            "sent_s": result.sent_s,
            "input_tokens": request.input_tokens,
            "output_tokens": request.output_tokens,
            "live": {
                "ending": result.ending.value,
                "ttft_s": result.ttft_s,
                "tbt_s": result.tbt_s,
                "cached_tokens": result.cached_tokens,
                "ended_s": result.ended_s,
            },
            "simulated": {
                "refused": said.refused,
                "ttft_s": said.ttft_s,
                "tbt_s": said.tbt_s,
                "cached_tokens": said.cached_tokens,
                "queue_s": said.queue_s,
            },
        }
        for (request, result), said in zip(in_order, simulation.records, strict=True)
    ]
    path.write_text(json.dumps({"cost": asdict(live.measured.cost), "requests": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
