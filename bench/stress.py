"""Three messengers under work and harm, every byte checked: `python -m bench.stress --seconds 60`.

Real processes, two nodes on shared memory and one on tcp, an SSD folder each, arenas so small that blocks leave and
come back all the time. Clients put, get, fetch, transfer and abort; meanwhile messengers are killed and started again,
stopped for a second, lose workers, and their disks lie, tear and refuse. A block's bytes follow from its key, so that
any mix-up is seen. A get may find nothing; it may never find something wrong. Every few seconds all work ends, and then
nothing may be held.

The exit code is 1 after any violation; the seed and the last that happened to the chain are printed with it.
"""

import argparse
import asyncio
import logging
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Final

import structlog
import uvloop

from bench.stress_audit import Auditor
from bench.stress_books import Contents, Ledger, table
from bench.stress_harm import Harm
from bench.stress_nodes import BLOCK_BYTES, Conductor, Node, Worker
from bench.stress_work import Chains, Client

SECONDS: Final = 1200.0
_CLIENTS: Final = 18
_WORKERS: Final = 2
_LEAST_ROUND_S: Final = 12.0
_ROUNDS: Final = 60
_HARM_EVERY_S: Final = (0.2, 1.5)
_REST_S: Final = 60.0
_SETUPS: Final = (("a", "auto", "lru"), ("b", "auto", "reuse"), ("c", "tcp", "length_aware"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one run: ``violations`` in words, and counts by name."""

    violations: list[str]
    counts: dict[str, int]
    outcomes: dict[str, int]


class Stress:
    """One run."""

    def __init__(self, folder: Path, seconds: float, seed: str) -> None:
        self.ledger = ledger = Ledger()
        self._seconds = seconds
        self._contents = Contents(seed, BLOCK_BYTES)
        self._chains = Chains()
        self._conductor = Conductor(folder, ledger)
        self._nodes = [Node(name, folder, transport, eviction, ledger) for name, transport, eviction in _SETUPS]
        self._harm = Harm(random.Random(f"{seed} harm"), self._nodes, ledger, self._replace)
        self.auditor = Auditor(random.Random(f"{seed} audit"), self._conductor, self._chains, self._contents, ledger)
        self._rngs = [random.Random(f"{seed} client {number}") for number in range(_CLIENTS)]
        self._tasks: asyncio.TaskGroup | None = None
        self._is_over = False

    async def run(self) -> Result:
        """Start all, work and harm for the given time, audit, stop all."""
        processes = [self._conductor, *self._nodes]
        for process in processes:
            process.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for node in self._nodes:
                    await node.answers()
                    for _ in range(_WORKERS):
                        self._add_worker(node)
                await self._rounds()
                for node in self._nodes:
                    for worker in node.workers:
                        worker.die()
        finally:
            codes = {process.name: process.stop() for process in reversed(processes) if process.process is not None}
        if any(codes.values()):
            self.ledger.violation(f"exit codes {codes}")
        return Result(
            violations=self.ledger.violations, counts=dict(self.ledger.counts), outcomes=dict(self.ledger.outcomes)
        )

    async def _rounds(self) -> None:
        ends_s = self.ledger.started_s + self._seconds
        round_s = max(_LEAST_ROUND_S, self._seconds / _ROUNDS)
        while monotonic() < ends_s and not self.ledger.violations:
            round_ends_s = min(ends_s, monotonic() + round_s)
            async with asyncio.TaskGroup() as work:
                for rng in self._rngs:
                    client = Client(rng, self._nodes, self._chains, self._contents, self.ledger)
                    work.create_task(self._until(round_ends_s, client.step))
                work.create_task(self._until(round_ends_s, self._harm_soon))
            for node in self._nodes:
                await self._attached(node)
            await self.auditor.audit(self._nodes)

    async def _until(self, ends_s: float, step: Callable[[], Awaitable[None]]) -> None:
        """Steps until the round is over. One that does not end after it is a violation by itself."""
        while monotonic() < ends_s:
            try:
                async with asyncio.timeout(ends_s - monotonic() + _REST_S):
                    await step()
            except TimeoutError:
                self.ledger.violation(f"{step.__qualname__} has not ended {_REST_S:g} s after its round")

    async def _harm_soon(self) -> None:
        await asyncio.sleep(self._harm.rng.uniform(*_HARM_EVERY_S))
        await self._harm.step()

    async def _attached(self, node: Node) -> None:
        async with asyncio.timeout(_REST_S):
            for worker in node.workers:
                await worker.attached.wait()

    def _add_worker(self, node: Node) -> None:
        assert self._tasks is not None, "run first"
        worker = Worker(node, self.ledger.counts["workers"], self.ledger)
        self.ledger.counts["workers"] += 1
        node.workers.append(worker)
        self._tasks.create_task(worker.run())

    def _replace(self, dead: Worker) -> None:
        dead.node.workers.remove(dead)
        self._add_worker(dead.node)

    # --- words --------------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Everything that was counted."""
        ledger = self.ledger
        took_s = monotonic() - ledger.started_s
        mib = ledger.verified_blocks * BLOCK_BYTES / 2**20
        said = {f"{node.name}: {event}": n for node in self._nodes for event, n in node.said.items()}
        lines = [
            table("operations and faults", ledger.counts),
            table("how operations ended", ledger.outcomes),
            table("longest of each, in seconds", ledger.longest_s),
            table("what messengers said", said),
            f"{self._chains.made} chains, {ledger.written_blocks} blocks written, {ledger.verified_blocks} verified: "
            f"{mib:.0f} MiB, {mib / took_s:.1f} MiB/s",
        ]
        for node in self._nodes:
            samples = [sample for sample in self.auditor.samples.get(node.name, []) if sample.life == node.life]
            if samples:
                lines.append(f"{node.name}, life {node.life}, at rest:")
                lines += [f"  {samples[at]}" for at in sorted({0, len(samples) // 2, len(samples) - 1})]
        for name, load in self.auditor.loads.items():
            lines.append(
                f"{name} at the end: {load.running_jobs} jobs, {load.blocks_free} free + {load.blocks_evictable} "
                f"evictable of {load.blocks_total}, SSD {load.ssd_blocks} of {load.ssd_slots}, "
                f"{load.ssd_faults} faults, transports {load.transports}"
            )
        return "\n".join(lines)


def stress(seconds: float, seed: str) -> tuple[Result, str]:
    """Run it; the result and a report for people."""
    with tempfile.TemporaryDirectory(prefix="mm-stress-", dir="/tmp") as folder:
        run = None

        async def all_of_it() -> Result:
            nonlocal run
            run = Stress(Path(folder), seconds, seed)
            return await run.run()

        result = uvloop.run(all_of_it())
        assert run is not None
        return result, run.report()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stress", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long to work (default %(default)g)")
    parser.add_argument("--seed", default=str(random.randrange(10**6)), help="of all choices; times still differ")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    print(f"bench.stress --seconds {args.seconds:g} --seed {args.seed}", flush=True)
    result, report = stress(args.seconds, args.seed)
    print(report)
    for violation in result.violations:
        print(f"VIOLATION {violation}")
    verdict = "FAILED" if result.violations else "passed"
    print(f"stress {verdict}: {len(result.violations)} violations, seed {args.seed}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
