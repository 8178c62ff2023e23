"""Checks of a stress run while nobody works: nothing is held, nothing has grown, and what is on SSD reads back."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final
from uuid import uuid4

from bench.stress_books import Contents, Ledger
from bench.stress_jobs import Job, Wanted
from bench.stress_nodes import N_BLOCKS, Conductor, Node
from bench.stress_work import Chains
from mooncake_mesh.errors import MooncakeError
from mooncake_proto.control import Load

_SETTLE_S: Final = 20.0
_LOOK_EVERY_S: Final = 0.1
_CALL_S: Final = 20.0
_READ_BACK: Final = 30
_MORE_DESCRIPTORS: Final = 24
"""A node that met its peers after the first audit has links to them: two lanes and a control connection each way."""
_MORE_MEMORY_KIB: Final = 24 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one process at rest; memory in KiB."""

    life: int
    at_s: float
    descriptors: int
    memory: dict[str, int]

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {self.memory[name] / 1024:.1f}" for name in ("Rss", "Pss", "Pss_Anon"))
        return f"at {self.at_s:7.1f} s: {self.descriptors} descriptors, MiB: {kinds}"


class Auditor:
    """Call :meth:`audit` when all operations have ended and nothing is being harmed."""

    def __init__(
        self, rng: random.Random, conductor: Conductor, chains: Chains, contents: Contents, ledger: Ledger
    ) -> None:
        self._rng = rng
        self._conductor = conductor
        self._chains = chains
        self._contents = contents
        self._ledger = ledger
        self.samples: dict[str, list[Sample]] = {}
        self.loads: dict[str, Load] = {}

    async def audit(self, nodes: Sequence[Node]) -> None:
        """Violations go into the ledger."""
        for node in nodes:
            node.check_alive()
            await self._nothing_is_held(node)
            self._nothing_has_grown(node)
        for node in nodes:
            await self._all_blocks_can_be_had(node)
            await self._read_back(node)
        self._ledger.counts["audits"] += 1

    async def _nothing_is_held(self, node: Node) -> None:
        """No job is left at the node, and each of its blocks is free or can be evicted."""
        deadline_s = monotonic() + _SETTLE_S
        while True:
            load = self.loads[node.name] = await self._conductor.load(node)
            held = load.blocks_total - load.blocks_free - load.blocks_evictable
            if load.blocks_total == N_BLOCKS and load.running_jobs == 0 and held == 0:
                return
            if monotonic() > deadline_s:
                self._ledger.violation(f"{node.name} at rest: {load.running_jobs} jobs, {held} blocks held: {load}")
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _nothing_has_grown(self, node: Node) -> None:
        at_s = monotonic() - self._ledger.started_s
        sample = Sample(life=node.life, at_s=at_s, descriptors=node.descriptors(), memory=node.memory_kib())
        samples = self.samples.setdefault(node.name, [])
        samples.append(sample)
        first = next(earlier for earlier in samples if earlier.life == node.life)
        if sample.descriptors > first.descriptors + _MORE_DESCRIPTORS:
            self._ledger.violation(f"{node.name} has more and more descriptors: {first}, {sample}")
        if sample.memory["Pss_Anon"] > first.memory["Pss_Anon"] + _MORE_MEMORY_KIB:
            self._ledger.violation(f"{node.name} takes more and more memory: {first}, {sample}")

    async def _all_blocks_can_be_had(self, node: Node) -> None:
        """One job gets the whole arena, so nothing is left in it: what is found next comes from SSD."""
        worker = node.workers[0]
        wanted = Wanted(chain=f"sweep {uuid4().hex}", n_keys=0, n_tail=N_BLOCKS)
        try:
            async with Job(worker, wanted, self._contents, self._ledger) as job:
                await job.acquire(_CALL_S)
                job.write()
        except MooncakeError as error:
            self._ledger.violation(f"{node.name} at rest cannot give all its blocks to one job: {error}")

    async def _read_back(self, node: Node) -> None:
        for chain in self._chains.some(self._rng, _READ_BACK):
            try:
                async with Job(node.workers[0], Wanted(chain=chain, n_keys=6), self._contents, self._ledger) as job:
                    await job.acquire(_CALL_S)
                    self._ledger.counts["  blocks found on SSD by audits"] += job.cached
            except MooncakeError as error:
                self._ledger.violation(f"{node.name} at rest cannot be read: {error}", chain)
