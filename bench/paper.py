"""The papers' experiments on the simulator: `python -m bench.paper`.

Each quantity stands beside the papers' figure and that of the prototype that the aims were taken from. Every ratio to
a baseline of the papers has the strong coupled baseline ("s2") beside it, shares are of requests *and* of tokens, and
a number of refusals never stands alone. Loads are part of each row; what names no admission strategy runs without.
"""

import argparse
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.paper_beyond import b1_b2_sizing, b3_hybrid_decode
from bench.paper_cache import RunCache, code_digest
from bench.paper_jobs import Jobs, end_with_workers
from bench.paper_long import a6_long_context
from bench.paper_overload import a8_early_rejection, b4_queue_order, b5_b6_hold
from bench.paper_plots import draw_report
from bench.paper_report import PaperReport
from bench.paper_reproduction import (
    a1_prefill_time,
    a2_policy_ladder,
    a3_mean_tbt,
    a4_effective_share,
    a5_capacity,
    a7_global_cache,
)
from bench.paper_roles import b7_dynamic_roles
from bench.paper_runs import Bench
from bench.report import Report
from bench.simulator_plots import NoMatplotlib
from bench.traces import TraceMissing

EXPERIMENTS: Final[dict[str, Callable[[Bench], None]]] = {
    "A1": a1_prefill_time,
    "A2": a2_policy_ladder,
    "A3": a3_mean_tbt,
    "A4": a4_effective_share,
    "A5": a5_capacity,
    "A6": a6_long_context,
    "A7": a7_global_cache,
    "A8": a8_early_rejection,
    "B1": b1_b2_sizing,
    "B3": b3_hybrid_decode,
    "B4": b4_queue_order,
    "B5": b5_b6_hold,
    "B7": b7_dynamic_roles,
}
_ALSO: Final = {"B2": "B1", "B6": "B5"}
"""Sections that another experiment fills."""

_QUICK: Final = ("A1", "A2", "A4", "A7")
_QUICK_REQUESTS: Final = 1_000
_SEEDS: Final = 3
_RUNS_PER_LINE: Final = 25


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen experiments; 0 when the measurements were made, whatever they say."""
    args = _parser().parse_args(argv)
    requests = (_QUICK_REQUESTS if args.quick else 0) if args.requests is None else args.requests
    seeds = args.seeds or (1 if args.quick else _SEEDS)
    report = PaperReport(f"{requests or 'All'} requests of each workload, {seeds} seed{'s' if seeds > 1 else ''}.")
    if requests:
        report.note("The aims are for whole workloads: the first requests of one meet cold caches and an empty mesh.")
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-paper-")))
            jobs = Jobs(args.jobs, folder)
            stack.callback(jobs.end)
            signal.signal(signal.SIGINT, end_with_workers)
            bench = Bench(
                report=report,
                seeds=range(1, 1 + seeds),
                requests=requests,
                say=Console(stderr=True).print,
                cache=RunCache(folder=folder) if args.no_cache else RunCache.at_home(),
                jobs=jobs,
            )
            _measure(bench, jobs, args.only or list(_QUICK if args.quick else EXPERIMENTS))
    except TraceMissing as missing:
        sys.stderr.write(f"bench.paper: {missing}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("bench.paper: interrupted; what was run is kept\n")
        return 130
    report.shown().finish(argparse.Namespace(json=None))
    if args.json:
        machines = report.plain()
        machines.write(args.json, machines.rows)
    return _written(report, args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="one seed, the first requests only; aims may be missed")
    add("--only", nargs="+", choices=sorted(EXPERIMENTS), metavar="ID", help="these experiments only")
    add("--requests", type=int, metavar="N", help="the first N requests of each workload; 0: all")
    add("--seeds", type=int, metavar="N", help="how many seeds")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="worker processes (default: one a CPU)")
    add("--report", type=Path, metavar="FILE", help="write the report as Markdown, its pictures beside it")
    add("--no-cache", action="store_true", help="run everything again, and keep nothing")
    Report.add_flags(parser)
    return parser


def _measure(bench: Bench, jobs: Jobs, ids: Sequence[str]) -> None:
    """All experiments at once: each waits for its runs, and the workers always have something to do."""
    code_digest()  # before there are threads that would all find it out
    for also, by in _ALSO.items():
        if by in ids:
            bench.report.title(also, EXPERIMENTS[by])
    with Progress(
        TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True)
    ) as bars:
        bar = bars.add_task("runs", total=0)

        def say(text: str) -> None:
            bars.console.print(text, highlight=False)
            bars.update(bar, completed=jobs.done, total=jobs.done + jobs.waiting)

        def made() -> None:
            bars.update(bar, completed=jobs.done, total=jobs.done + jobs.waiting)
            if jobs.done % _RUNS_PER_LINE == 0:
                say(f"{jobs.done} runs made, {jobs.waiting} wait")

        bench.say, jobs.on_made = say, made

        def measure(id_: str) -> None:
            started_s = perf_counter()
            bench.report.title(id_, EXPERIMENTS[id_])
            try:
                EXPERIMENTS[id_](bench)
            except (BrokenExecutor, TraceMissing):
                raise  # nobody can go on
            except Exception:  # noqa: BLE001  one experiment's fault must not take the others' results with it
                told = traceback.format_exc()
                bench.report.note(f"{id_}: broken off:\n\n```\n{told}```")
                say(f"{id_}: {told}")
            say(f"{id_}: done after {perf_counter() - started_s:.0f} s; {jobs.done} runs made, {jobs.waiting} wait")

        bench.each(measure, ids)


def _written(report: PaperReport, args: argparse.Namespace) -> int:
    """Write what *args* asks for besides the table and JSON; the exit code."""
    folder = args.plot or (args.report.parent / f"{args.report.stem}-pictures" if args.report else None)
    pictures: list[Path] = []
    if folder is not None:
        try:
            pictures = draw_report(report.rows, folder)
        except NoMatplotlib as missing:
            sys.stderr.write(f"bench.paper: {missing}\n")
            if args.plot:
                return 2
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(report.markdown(pictures, args.report.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
