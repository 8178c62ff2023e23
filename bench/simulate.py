"""Replay a trace on a simulated mesh: `python -m bench.simulate`, also `mooncake simulate`.

One mesh, or several systems on the same arrivals, side by side: disaggregated ones as 8P8D, coupled ones as vllm:16,
vllm+prefix:16, vllm-chunked:16, s1:16, s2:16.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench.nodes import NODES, NodeKind
from bench.simulator import MeshSetup, simulate
from bench.simulator_coupled import baseline, simulate_coupled
from bench.simulator_plots import NoMatplotlib, draw_runs
from bench.simulator_results import RunResult, quantile, write_csv
from bench.traces import TRACES, TraceMissing, TraceRequest, read_trace
from bench.workloads import replayed, tool_agent
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, PlacementKind
from mooncake_mesh.kv.eviction import EvictionKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.hybrid import longest_step_s
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives

_MESH: Final = re.compile(r"(\d+)[Pp](\d+)[Dd]")
_COUPLED: Final = re.compile(r"([a-z0-9+-]+):(\d+)")


def main(argv: Sequence[str] | None = None, prog: str = "python -m bench.simulate") -> int:
    """Run the command; its exit code."""
    args = _parser(prog).parse_args(argv)
    try:
        requests = _workload(args)
        runs = [_system(text, args) for text in args.nodes]
    except (TraceMissing, ValueError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 2
    console = Console(stderr=True)
    results = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console,
    ) as bars:  # fmt: skip
        for text, run in zip(args.nodes, runs, strict=True):
            bar = bars.add_task(text, total=len(requests))

            def advance(arrived: int, bar: "int" = int(bar)) -> None:
                if arrived % 16 == 0 or arrived == len(requests):
                    bars.update(bars.task_ids[bar], completed=arrived)

            results.append(run(requests, text, advance))
    Console(width=None if sys.stdout.isatty() else 160).print(_table(results, args.ttft, args.tbt))
    for result in results:
        for reason, n in result.reasons().items():
            print(f"{result.name}: {n:,} refused: {reason}")
    if args.csv:
        for result in results:
            write_csv(result, args.csv / f"{result.name.replace(':', '-')}.csv")
    if args.plot:
        try:
            draw_runs(results, args.plot)
        except NoMatplotlib as missing:
            sys.stderr.write(f"{prog}: {missing}\n")
            return 2
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--trace", default="conversation", help="a .jsonl file, or: conversation, synthetic, tool-agent (generated)")
    add("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of the published traces")
    add("--nodes", nargs="+", default=["8P8D"], metavar="SYSTEM", help="8P8D, or a coupled baseline as s2:16")
    add("--kind", default="8xa800", choices=sorted(NODES), help="kind of node")
    add("--speed", type=float, default=1.0, help="replay that many times faster")
    add("--requests", type=int, default=0, metavar="N", help="the first N requests only")
    add("--jitter", type=int, default=None, metavar="SEED", help="move each arrival by U(0, 3 s)")
    add("--placement", default="adaptive", choices=[kind.value for kind in PlacementKind])
    add("--threshold", type=float, default=2.0, help="kvcache_balancing_threshold, for kvcache_centric")
    add("--hybrid", action="store_true", help="decode nodes compute prompts too, where that is sooner and --tbt allows")
    add("--admission", default="none", choices=["none", *(kind.value for kind in AdmissionKind)])
    add("--eviction", default="lru", choices=[kind.value for kind in EvictionKind])
    add("--ttft", type=float, default=30.0, metavar="S", help="objective for the time to first token")
    add("--tbt", type=float, default=0.1, metavar="S", help="objective for the time between tokens")
    add("--seed", type=int, default=0, help="for the random policy and generated workloads")
    add("--csv", type=Path, metavar="DIR", help="write one table of all requests for each system")
    add("--plot", type=Path, metavar="DIR", help="write pictures: TTFT, TBT, load over time (needs matplotlib)")
    return parser


def _workload(args: argparse.Namespace) -> list[TraceRequest]:
    if args.trace == "tool-agent":
        requests = tool_agent(seed=args.seed)
    elif args.trace.endswith(".jsonl"):
        path = Path(args.trace)
        if not path.name.endswith("_trace.jsonl"):
            raise ValueError(f"{path}: a trace file is named NAME_trace.jsonl")
        requests = read_trace(path.name.removesuffix("_trace.jsonl"), path.parent)
    else:
        requests = read_trace(args.trace, args.traces)
    return replayed(requests[: args.requests or None], speed=args.speed, jitter_seed=args.jitter)


Run = Callable[[Sequence[TraceRequest], str, Callable[[int], None]], RunResult]


def _system(text: str, args: argparse.Namespace) -> Run:
    """How to run what *text* names. Raises ValueError for what it cannot mean."""
    kind: NodeKind = NODES[args.kind]
    if mesh := _MESH.fullmatch(text):
        is_open = args.admission == "none"
        hybrid = HybridDecodeKind.AUTO if args.hybrid else HybridDecodeKind.OFF
        setup = MeshSetup(
            prefill=int(mesh[1]),
            decode=int(mesh[2]),
            kind=kind,
            objectives=Objectives() if is_open else Objectives(ttft_s=args.ttft, tbt_s=args.tbt),
            scheduling=Scheduling(
                placement=PlacementKind(args.placement),
                threshold=args.threshold,
                admission=Admission(kind=AdmissionKind.BASELINE if is_open else AdmissionKind(args.admission)),
                hybrid_decode=hybrid,
                hybrid_step_s=longest_step_s(Objectives(tbt_s=args.tbt)),
            ),
            decode_shares=args.hybrid,
            eviction=EvictionKind(args.eviction),
            seed=args.seed,
        )
        return lambda requests, name, progress: simulate(requests, setup, name=name, progress=progress)
    if coupled := _COUPLED.fullmatch(text):
        other = baseline(coupled[1], int(coupled[2]), kind, tbt_slo_s=args.tbt)
        return lambda requests, name, progress: simulate_coupled(requests, other, name=name, progress=progress)
    raise ValueError(f"--nodes: {text!r} is neither like 8P8D nor like vllm:16")


def _table(results: Sequence[RunResult], ttft_s: float, tbt_s: float) -> Table:
    table = Table(title=f"objectives: TTFT {ttft_s:g} s, TBT {tbt_s * 1e3:g} ms", title_justify="left")
    table.add_column("system")
    for name in (
        "requests", "refused", "TTFT mean", "P50", "P90", "P99", "TBT P50", "P90", "effective", "of tokens",
        "hit blocks", "hit requests", "prefill s", "wasted Mtok", "wall s",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for result in results:
        ttfts, tbts = result.ttfts(), result.tbts()
        table.add_row(
            result.name,
            f"{len(result.records):,}",
            f"{result.rejected:,}",
            *(f"{value:.2f}" for value in (result.mean_ttft_s(), *(quantile(ttfts, q) for q in (0.5, 0.9, 0.99)))),
            *(f"{quantile(tbts, q) * 1e3:.0f} ms" for q in (0.5, 0.9)),
            f"{result.share(ttft_s, tbt_s):.3f}",
            f"{result.token_share(ttft_s, tbt_s):.3f}",
            f"{result.block_hit():.3f}",
            f"{result.request_hit():.3f}",
            f"{result.mean_prefill_s():.3f}",
            f"{result.wasted_tokens(ttft_s, tbt_s) / 1e6:.2f}",
            f"{result.wall_s:.1f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
