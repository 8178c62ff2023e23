"""What a stress run's clients do: put, get, fetch from another node, transfer, hold, and lose patience or heart midway.

Each operation returns how it ended in a word. A get may find nothing; what it finds must be right. A transfer that
nothing disturbed must succeed at both ends.
"""

import asyncio
import enum
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Final
from uuid import uuid4

from bench.stress_books import Contents, Ledger
from bench.stress_jobs import Job, Wanted
from bench.stress_nodes import BLOCK_BYTES, LAYERS, Node, Worker, WorkerLost
from mooncake_mesh.errors import MooncakeError
from mooncake_proto.ids import TransferId
from mooncake_proto.transfer import FinishSend, SendReport, SliceReady, StartSend

_CALL_S: Final = 10.0
_LANDING_S: Final = 15.0
_LIVE_CHAINS: Final = 150
_MOST_KEYS: Final = 9
_MOST_TAIL: Final = 2


class Mishap(enum.Enum):
    """What goes wrong in a transfer, by one end's own doing."""

    NONE = "none"
    SENDER_RELEASES = "sender releases its job"
    RECEIVER_RELEASES = "receiver releases its job"
    RECEIVER_CANCELS = "receiver cancels its call"
    SHORT_DEADLINE = "deadline of milliseconds"
    ANNOUNCED_TWICE = "slices announced twice"


_HARMLESS: Final = frozenset({Mishap.NONE, Mishap.ANNOUNCED_TWICE})
_MISHAPS: Final = [*[Mishap.NONE] * 7, *Mishap]


class Client:
    """Does one operation after the other on random workers. Clients share chains, contents and the ledger."""

    def __init__(
        self, rng: random.Random, nodes: Sequence[Node], chains: "Chains", contents: Contents, ledger: Ledger
    ) -> None:
        self._rng = rng
        self._nodes = nodes
        self._chains = chains
        self._contents = contents
        self._ledger = ledger
        self._operations: list[tuple[str, int, Callable[[], Awaitable[str]]]] = [
            ("put", 8, self.put),
            ("get", 8, self.get),
            ("get from another node", 8, self.fetch),
            ("transfer", 10, self.transfer),
            ("hold", 1, self.hold),
            ("get without patience", 3, self.lose_patience),
        ]

    async def step(self) -> None:
        """One operation, counted."""
        started_s = monotonic()
        name, _, operation = self._rng.choices(self._operations, [weight for _, weight, _ in self._operations])[0]
        try:
            outcome = await operation()
        except WorkerLost:
            outcome = "worker lost"
        except MooncakeError as error:
            outcome = error.code
        self._ledger.counts[name] += 1
        self._ledger.outcomes[f"{name}: {outcome}"] += 1
        self._ledger.took(f"{name}: {outcome}", round(monotonic() - started_s, 2))
        if outcome == "worker lost":
            await asyncio.sleep(0.02)  # its node may be down for a while

    # --- operations ---------------------------------------------------------------------------------------------------

    async def put(self) -> str:
        """Compute a prefix, sharing what is new; sometimes most of it is cached already."""
        async with self._job(self._worker(), self._wanted()) as job:
            await job.acquire(_CALL_S)
            job.write()
            await self._pause()
            job.seal()
            return "done"

    async def get(self) -> str:
        """Read what the node has of a prefix."""
        async with self._job(self._worker(), self._wanted()) as job:
            await job.acquire(_CALL_S)
            await self._pause()
            return self._found(job)

    async def fetch(self) -> str:
        """Read a prefix, asking another node for what is missing."""
        worker = self._worker()
        other = self._rng.choice([node for node in self._nodes if node is not worker.node])
        async with self._job(worker, self._wanted(fetch_from=other.endpoint)) as job:
            await job.acquire(_CALL_S + _LANDING_S)
            return self._found(job)

    async def hold(self) -> str:
        """A job that lives for seconds: what it has may not change, whatever happens around it."""
        async with self._job(self._worker(), self._wanted()) as job:
            await job.acquire(_CALL_S)
            job.write()
            for _ in range(self._rng.randint(2, 12)):
                await asyncio.sleep(0.3)
                job.check("while held")
                if self._rng.random() < 0.3:
                    await job.grow(self._rng.randint(1, 3), _CALL_S)
            return "done"

    async def lose_patience(self) -> str:
        worker = self._worker()
        other = self._rng.choice(self._nodes)
        async with self._job(
            worker, self._wanted(fetch_from=other.endpoint if other is not worker.node else "")
        ) as job:
            await job.acquire(self._rng.choice([0.001, 0.003, 0.01, 0.03]))
            return self._found(job)

    async def transfer(self) -> str:
        """Send a prefix, layer by layer as it is computed, into the blocks of a job on another node."""
        source, target = self._worker(), self._worker()
        if source.node is target.node:
            return "same node"
        mishap = self._rng.choice(_MISHAPS)
        transfer_id = TransferId(uuid4().hex)
        wanted = self._wanted(tail_of=f"tail of {transfer_id}")
        here = self._job(source, wanted)
        there = self._job(target, self._wanted_of(wanted, transfer_id))
        before = (source.node.harm, target.node.harm)
        outcomes = list(
            await asyncio.gather(
                self._sends(here, transfer_id, target.node.endpoint, mishap, there), self._lands(there, mishap)
            )
        )
        undisturbed = before == (source.node.harm, target.node.harm) and here.is_held and there.is_held
        if undisturbed and mishap in _HARMLESS and outcomes != ["done", "done"]:
            what = f"transfer {transfer_id} {source.name} to {target.name} ended as {outcomes} though nothing happened"
            self._ledger.violation(what, wanted.chain)
        if undisturbed and mishap is not Mishap.RECEIVER_CANCELS and outcomes[1] == "call_timeout":
            what = f"transfer {transfer_id} to {target.name}, {mishap.value}: {outcomes}, the receiver was not told"
            self._ledger.violation(what, wanted.chain)
        self._ledger.counts[f"  mishap: {mishap.value}"] += 1
        return " / ".join(outcomes)

    async def _sends(self, job: Job, transfer_id: TransferId, endpoint: str, mishap: Mishap, there: Job) -> str:
        try:
            async with job:
                await job.acquire(_CALL_S)
                deadline_s = self._rng.uniform(0.001, 0.03) if mishap is Mishap.SHORT_DEADLINE else _CALL_S
                start = StartSend(
                    job_id=job.job_id,
                    transfer_id=transfer_id,
                    target=endpoint,
                    n_blocks=len(job.blocks),
                    layers=LAYERS,
                    deadline_s=deadline_s,
                )
                job.worker.post(start)
                if job.cached:
                    self._announce(job, transfer_id, range(job.cached), range(LAYERS))
                ends_before = self._rng.randrange(LAYERS + 1)
                for layer in range(LAYERS):
                    if layer == ends_before and mishap is Mishap.SENDER_RELEASES:
                        return "released"
                    if layer == ends_before and mishap is Mishap.RECEIVER_RELEASES:
                        there.give_up()
                    job.write_layer(layer)
                    for _ in range(2 if mishap is Mishap.ANNOUNCED_TWICE else 1):
                        self._announce(job, transfer_id, range(job.cached, len(job.blocks)), range(layer, layer + 1))
                    await self._pause()
                job.seal()
                if mishap is Mishap.SENDER_RELEASES:
                    return "released"
                job.part()  # a transfer that is over ends the job of its sender
                await job.worker.call(FinishSend(transfer_id=transfer_id), SendReport, _CALL_S)
                self._ledger.counts["  bytes transferred"] += len(job.blocks) * BLOCK_BYTES
                return "done"
        except WorkerLost:
            return "worker lost"
        except MooncakeError as error:
            return error.code

    def _announce(self, job: Job, transfer_id: TransferId, blocks: range, layers: range) -> None:
        ready = SliceReady(
            transfer_id=transfer_id,
            layer=layers.start,
            n_layers=len(layers),
            first_block=blocks.start,
            n_blocks=len(blocks),
        )
        job.worker.post(ready)

    async def _lands(self, job: Job, mishap: Mishap) -> str:
        try:
            async with job:
                patience_s = self._rng.uniform(0.001, 0.05) if mishap is Mishap.RECEIVER_CANCELS else _LANDING_S
                await job.acquire(patience_s)
                await self._pause()
                return "done"
        except WorkerLost:
            return "worker lost"
        except MooncakeError as error:
            return error.code

    # --- choices ------------------------------------------------------------------------------------------------------

    def _worker(self) -> Worker:
        """One that has its arena. Raises WorkerLost where none has."""
        workers = [worker for node in self._nodes for worker in node.workers if worker.hold is not None]
        if not workers:
            raise WorkerLost("all")
        return self._rng.choice(workers)

    def _wanted(self, *, fetch_from: str = "", tail_of: str = "") -> Wanted:
        n_keys = self._rng.randint(1, _MOST_KEYS)
        return Wanted(
            chain=self._chains.pick(self._rng),
            n_keys=n_keys,
            n_tail=self._rng.randint(0, _MOST_TAIL),
            max_cached=n_keys if self._rng.random() < 0.8 else self._rng.randint(0, n_keys),
            fetch_from=fetch_from,
            tail_of=tail_of,
        )

    def _wanted_of(self, sent: Wanted, transfer_id: TransferId) -> Wanted:
        """The receiver's side of what is sent."""
        return Wanted(
            chain=sent.chain, n_keys=sent.n_keys, n_tail=sent.n_tail, landing=transfer_id, tail_of=sent.tail_of
        )

    def _job(self, worker: Worker, wanted: Wanted) -> Job:
        return Job(worker, wanted, self._contents, self._ledger)

    def _found(self, job: Job) -> str:
        if job.cached == 0:
            return "nothing found"
        return "all found" if job.cached == min(job.wanted.n_keys, job.wanted.max_cached) else "part found"

    async def _pause(self) -> None:
        if self._rng.random() < 0.5:
            await asyncio.sleep(self._rng.choice([0.0, 0.001, 0.01]))


class Chains:
    """Prefixes in use: more than all nodes can hold together, some of them hot, and ever new ones."""

    def __init__(self) -> None:
        self._live: deque[str] = deque(maxlen=_LIVE_CHAINS)
        self._made = 0

    def pick(self, rng: random.Random) -> str:
        if not self._live or rng.random() < 0.08:
            self._made += 1
            self._live.append(f"chain {self._made}")
            return self._live[-1]
        if rng.random() < 0.5:
            return self._live[-1 - min(int(rng.expovariate(0.2)), len(self._live) - 1)]
        return rng.choice(self._live)

    def some(self, rng: random.Random, n: int) -> list[str]:
        return rng.sample(list(self._live), min(n, len(self._live)))

    @property
    def made(self) -> int:
        return self._made
