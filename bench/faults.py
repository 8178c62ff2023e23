"""What breaks a mesh of real processes, and whether anything is lost: `python -m bench.faults`.

====================== ==============================================================================================
without an option      the matrix: process x stage of a request x fault, see fault_matrix.py
``--random MINUTES``   random faults under load, see fault_random.py; with ``--engine transformers`` on real engines,
                       with ``--one-node`` on a single node, as `mooncake up` has it
``--storm``            hundreds of streams cancelled at once, see fault_storm.py
``--stalled``          memory while clients, the gateway or the conductor stall, see fault_stall.py
====================== ==============================================================================================

All but ``--engine transformers`` on a mesh of fake engines; all but ``--stalled`` with a spare for each worker and
messenger (fault_mesh.py). The exit code is 1 after any violation.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import fault_stall
from bench.fault_matrix import Cell, Fault, Target, run_matrix, table
from bench.fault_mesh import Books, fault_mesh
from bench.fault_random import RandomRun
from bench.fault_stages import Stage
from bench.fault_storm import STORMS, STREAMS, judged, storm
from bench.fault_work import FakeWork, OneNodeWork, RealWork, Work
from tests.mesh.fork_server import REAL_MODULES, ForkServer
from tests.mesh.harness import Mesh

_WORK: Final[dict[str, Callable[[], Work]]] = {"fake": FakeWork, "transformers": RealWork}
_MODULES: Final = {"fake": (), "transformers": REAL_MODULES}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=float, metavar="MINUTES", help="random faults under load, for so long")
    parser.add_argument("--engine", choices=_WORK, default="fake", help="of --random: which engines")
    parser.add_argument("--one-node", action="store_true", help="of --random with fake engines: all on one node")
    parser.add_argument(
        "--storm", action="store_true", help=f"cancel {STREAMS} streams within two seconds, {STORMS} times"
    )
    parser.add_argument("--stalled", action="store_true", help="memory of every process while somebody stalls")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="of what is random; times still differ")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of what was violated there")
    for name, choices in (("target", Target), ("fault", Fault), ("stage", Stage)):
        names = [choice.name.lower() for choice in choices]
        parser.add_argument(f"--{name}", choices=names, action="append", help="only this part of the matrix")
    arguments = parser.parse_args()
    if arguments.engine != "fake" and arguments.random is None:
        parser.error("--engine: all but --random is of fake engines")
    if arguments.one_node and (arguments.engine != "fake" or arguments.random is None):
        parser.error("--one-node: only of --random with fake engines")
    return _with_forks(arguments.engine, lambda: _chosen(arguments)(arguments))


def _chosen(arguments: argparse.Namespace) -> Callable[[argparse.Namespace], list[str]]:
    if arguments.random is not None:
        return _random
    if arguments.storm:
        return _storm
    return _stalled if arguments.stalled else _matrix


def _with_forks(engine: str, act: Callable[[], list[str]]) -> int:
    """Run *act*, which says what was violated; the exit code."""
    began_s = time.monotonic()
    with ForkServer(*_MODULES[engine]) as server:
        Mesh.fork_servers[engine] = server
        violations = act()
    for violation in violations:
        print(f"VIOLATION {violation}")
    print(
        f"faults {'FAILED' if violations else 'passed'}: {len(violations)} violations, "
        f"{time.monotonic() - began_s:.0f} s"
    )
    return 1 if violations else 0


def _matrix(arguments: argparse.Namespace) -> list[str]:
    def is_meant(choice: Target | Fault | Stage, names: list[str] | None) -> bool:
        return not names or choice.name.lower() in names

    cells = [
        Cell(target=target, fault=fault, stage=stage)
        for target in Target
        for fault in Fault
        for stage in Stage
        if is_meant(target, arguments.target) and is_meant(fault, arguments.fault) and is_meant(stage, arguments.stage)
    ]
    outcomes = run_matrix(cells, logs=arguments.logs)
    print(table(outcomes))
    ends = sum((outcome.ends for outcome in outcomes), Counter[str]())
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(ends.items()))
    print(f"{len(outcomes)} cells, {sum(ends.values())} requests: {kinds}")
    return [violation for outcome in outcomes for violation in outcome.violations]


def _random(arguments: argparse.Namespace) -> list[str]:
    one_node = " --one-node" * arguments.one_node
    about = f"--random {arguments.random:g} --engine {arguments.engine}{one_node} --seed {arguments.seed}"
    print(f"bench.faults {about}", flush=True)
    work = OneNodeWork() if arguments.one_node else _WORK[arguments.engine]()
    run = RandomRun(minutes=arguments.random, seed=arguments.seed, work=work, logs=arguments.logs)
    run.run()
    print(run.report())
    return [f"{violation} (seed {arguments.seed})" for violation in run.violations]


def _storm(arguments: argparse.Namespace) -> list[str]:
    print(f"bench.faults --storm --seed {arguments.seed}", flush=True)
    rng, results, violations = random.Random(arguments.seed), [], []
    with fault_mesh() as mesh:
        books = Books(mesh)
        books.open()
        for _ in range(STORMS):
            results.append(asyncio.run(storm(mesh.http, rng)))
            print(results[-1], flush=True)
            violations += books.differences(time.monotonic())
    return violations + judged(results)


def _stalled(_: argparse.Namespace) -> list[str]:
    results = fault_stall.run_stalls(fault_stall.StallPlan())
    print(fault_stall.table(results))
    return [violation for result in results for violation in result.violations]


if __name__ == "__main__":
    sys.exit(main())
