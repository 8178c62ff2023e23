"""This project beside other servers on the same two cores: `python -m bench.serving --peers vllm,llamacpp`.

Each peer is installed into an environment of its own the first time, serves the same weights in bfloat16, and is asked
by the same client over HTTP. The servers take turns, measurement by measurement, while the others are frozen. Printed
are the medians and, for each peer, the ratio to it in the same round. What cannot be installed or started is named
under the table, and the rest goes on.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.peers.environments import NotInstalled
from bench.report import Report, say
from bench.serving_client import Prompts, RequestFailed, complete
from bench.serving_measures import Measure, measures, tell
from bench.serving_servers import (
    CORES,
    OURS,
    NotStarted,
    Server,
    ServerPlan,
    free_port,
    our_plan,
    peer_plan,
    running,
    write_config,
)
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model

LENGTHS: Final = (32, 512, 2048, 6000)
CONCURRENCIES: Final = (1, 4, 8, 16)
QUICK_LENGTHS: Final = (32, 512)
QUICK_CONCURRENCIES: Final = (1, 4)
_SEED: Final = 5
_SETTLE_TOKENS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to measure, and where to say how it goes. ``notes`` are for the end of the report."""

    measures: Sequence[Measure]
    rounds: int
    prompts: Prompts
    log: Callable[[str], None]
    notes: list[str]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, short prompts, few streams")
    parser.add_argument("--peers", default="vllm", help="servers to compare with, by commas; none: only this project")
    parser.add_argument("--rounds", type=int, help="how often each measurement is made (default: 3)")
    parser.add_argument("--only", default="", metavar="TEXT", help="measurements whose name has TEXT in it")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ours", default="", metavar="FLAGS", help="more flags for `mooncake up`")
    Report.add_flags(parser)
    args = parser.parse_args()
    model = resolve_model(args.model)
    sizes = (QUICK_LENGTHS, QUICK_CONCURRENCIES) if args.quick else (LENGTHS, CONCURRENCIES)
    run = Run(
        measures=[measure for measure in measures(*sizes) if args.only in measure.name],
        rounds=args.rounds or (1 if args.quick else 3),
        prompts=Prompts(model / "tokenizer.json", _SEED),
        log=say,
        notes=[],
    )
    with tempfile.TemporaryDirectory(prefix="mooncake-serving-") as folder:
        plans = _plans(args, model, Path(folder), run)
        samples = _measure_all(plans, Path(folder), run)
    report = Report("serving", f"{args.model} in bfloat16 on {CORES} cores; ratio and spread: pairs of one round")
    for measure in run.measures:
        tell(report, measure, samples[measure.name], OURS)
    for note in run.notes:
        report.note(note)
    report.finish(args)


def _plans(args: argparse.Namespace, model: Path, folder: Path, run: Run) -> list[ServerPlan]:
    plans = [our_plan(free_port(), model, write_config(folder / "mooncake.toml"), args.ours.split())]
    for name in filter(None, args.peers.split(",")):
        try:
            plans.append(peer_plan(name, model, folder, run.log))
        except NotInstalled as error:
            run.log(f"{name}: {error}")
            run.notes.append(f"{name} is not compared, it cannot be installed: {error}")
    return plans


def _measure_all(plans: Sequence[ServerPlan], folder: Path, run: Run) -> dict[str, dict[str, list[list[float]]]]:
    """Samples by measure, server and round."""
    with ExitStack() as stack:
        servers = []
        for plan in plans:
            try:
                servers.append(stack.enter_context(running(plan, folder, run.log)))
            except NotStarted as error:
                run.log(str(error))
                run.notes.append(f"{plan.name} is not compared: {error}")
        samples: dict[str, dict[str, list[list[float]]]] = {
            measure.name: {server.name: [] for server in servers} for measure in run.measures
        }
        for turn in range(run.rounds):
            for measure in run.measures:
                for server in rotated(servers, turn):
                    samples[measure.name][server.name].append(_take(server, measure, run))
    return samples


def rotated(servers: Sequence[Server], turn: int) -> list[Server]:
    """Nobody is always first."""
    first = turn % len(servers) if servers else 0
    return [*servers[first:], *servers[:first]]


def _take(server: Server, measure: Measure, run: Run) -> list[float]:
    """One round's samples; none where the server failed, which is noted."""

    async def measured() -> list[float]:
        await complete(server.target, run.prompts.text(_SETTLE_TOKENS), 4)  # caches and clocks after the freeze
        return await measure.take(server.target, run.prompts)

    with server.awake():
        try:
            samples = asyncio.run(measured())
        except (OSError, RequestFailed, TimeoutError) as error:
            run.notes.append(f"{server.name}, {measure.name}: a round failed: {error}")
            run.log(run.notes[-1])
            return []
    run.log(f"{server.name}: {measure.name}: {', '.join(f'{sample:.4g}' for sample in samples)} {measure.unit}")
    return samples


if __name__ == "__main__":
    main()
