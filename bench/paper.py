"""The papers' experiments on the simulator: `python -m bench.paper`.

Each row stands beside the papers' figure and that of the prototype that the aims were taken from. Every ratio to a
baseline of the papers is followed by one to the strong coupled baseline ("s2"), and a number of refusals never stands
alone. Loads are part of each row's name; what is not called an admission strategy runs without admission control.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Final

from rich.console import Console

from bench.paper_beyond import NOT_RUN, b1_b2_sizing, b3_hybrid_decode
from bench.paper_cache import RunCache
from bench.paper_overload import a8_early_rejection, b4_queue_order, b5_b6_hold
from bench.paper_plots import draw_report
from bench.paper_reproduction import (
    a1_prefill_time,
    a2_policy_ladder,
    a3_mean_tbt,
    a4_effective_share,
    a5_capacity,
    a6_long_context,
    a7_global_cache,
)
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
}
_QUICK: Final = ("A1", "A2", "A4", "A7")
_QUICK_REQUESTS: Final = 1_000
_SEEDS: Final = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen experiments; 0 when the measurements were made, whatever they say."""
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, the first requests only; aims may be missed")
    parser.add_argument("--only", nargs="+", choices=sorted(EXPERIMENTS), metavar="ID", help="these experiments only")
    parser.add_argument("--requests", type=int, metavar="N", help="the first N requests of each workload; 0: all")
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--no-cache", action="store_true", help="run everything again, and keep nothing")
    Report.add_flags(parser)
    args = parser.parse_args(argv)
    requests = (_QUICK_REQUESTS if args.quick else 0) if args.requests is None else args.requests
    report = Report("paper", f"simulated; {requests or 'all'} requests of each workload")
    console = Console(stderr=True)
    bench = Bench(
        report=report,
        seeds=range(1, 1 + (args.seeds or (1 if args.quick else _SEEDS))),
        requests=requests,
        say=console.print,
        cache=RunCache(folder=None) if args.no_cache else RunCache.at_home(),
    )
    try:
        for id_ in args.only or (_QUICK if args.quick else EXPERIMENTS):
            started_s = perf_counter()
            EXPERIMENTS[id_](bench)
            bench.say(f"{id_}: {perf_counter() - started_s:.0f} s")
            if args.json:  # after each: all together take hours
                report.write(args.json, report.rows)
    except TraceMissing as missing:
        sys.stderr.write(f"bench.paper: {missing}\n")
        return 2
    if requests:
        report.note("The aims are for whole workloads: the first requests of one meet cold caches and an empty mesh.")
    report.note(NOT_RUN)
    report.finish(args)
    pictures = []
    if args.plot:
        try:
            pictures = draw_report(report.rows, args.plot)
        except NoMatplotlib as missing:
            sys.stderr.write(f"bench.paper: {missing}\n")
            return 2
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(markdown(report, pictures))
    return 0


def markdown(report: Report, pictures: Sequence[Path] = ()) -> str:
    """The report as one Markdown table, and *pictures* below it."""
    lines = [
        f"# {report.title}",
        "",
        "| experiment | value | unit | baseline | aim | met | n | least … greatest |",
        "|---|--:|---|--:|---|---|--:|---|",
    ]
    for row in report.rows:
        met = "" if row.met is None else "yes" if row.met else "**MISSED**"
        spread = "" if row.spread is None else f"{row.spread[0]:.4g} … {row.spread[1]:.4g}"
        baseline = "" if row.baseline is None else f"{row.baseline:.4g}"
        lines.append(
            f"| {row.metric} | {row.value:.4g} | {row.unit} | {baseline} | {row.aim} | {met} | {row.n} | {spread} |"
        )
    lines += ["", *report.notes, "", *(f"![{path.stem}]({path.resolve()})" for path in pictures), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
