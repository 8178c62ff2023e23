"""One job of a stress run: its blocks at one worker, and what they must hold for as long as it has them."""

from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from bench.stress_books import Contents, Ledger
from bench.stress_nodes import BLOCK_BYTES, LAYERS, Worker, WorkerLost
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_proto.ids import JobId, TransferId
from mooncake_proto.transfer import Acquire, Acquired, Grow, Grown, Release, Seal

SLICE_BYTES: Final = BLOCK_BYTES // LAYERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a job asks for: the first ``n_keys`` blocks of ``chain``, and ``n_tail`` more that no key will name.

    ``max_cached`` of them may come from the pool; ``fetch_from`` is the messenger to ask for what is missing.
    """

    chain: str
    n_keys: int
    n_tail: int = 0
    max_cached: int = 10**6
    fetch_from: str = ""
    landing: TransferId | None = None
    tail_of: str = ""


class Job:
    """Use as an async context manager: leaving it checks the blocks once more, then gives them back."""

    def __init__(self, worker: Worker, wanted: Wanted, contents: Contents, ledger: Ledger) -> None:
        hold = worker.hold
        if hold is None:
            raise WorkerLost(worker.name)
        self.worker = worker
        self.wanted = wanted
        self.job_id = JobId(uuid4().hex)
        self.blocks: list[int] = []
        self.cached = 0
        self._hold = hold
        self._contents = contents
        self._ledger = ledger
        self._known: dict[int, tuple[str, int]] = {}
        self._is_given_up = False

    async def __aenter__(self) -> "Job":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.is_held:
                self.check("at the end")
        finally:
            await self.worker.release(self.job_id)

    @property
    def is_held(self) -> bool:
        return self.worker.hold is self._hold

    async def acquire(self, timeout_s: float) -> Acquired:
        """Get the blocks; those that are said to be cached, or to have landed, are checked. Raises MooncakeError."""
        wanted = self.wanted
        n_blocks = wanted.n_keys + wanted.n_tail
        request = Acquire(
            job_id=self.job_id,
            instance_id=self.worker.me.instance_id,
            incarnation=self.worker.me.incarnation,
            keys=join_keys([self._contents.key(wanted.chain, i) for i in range(wanted.n_keys)]),
            n_blocks=n_blocks,
            max_cached_blocks=min(wanted.max_cached, wanted.n_keys),
            fetch_from=wanted.fetch_from,
            fetch_blocks=wanted.n_keys if wanted.fetch_from else 0,
            landing=wanted.landing,
            landing_blocks=n_blocks if wanted.landing else 0,
            landing_layers=LAYERS if wanted.landing else 0,
        )
        acquired = await self.worker.call(request, Acquired, timeout_s)
        self.blocks, self.cached = list(acquired.blocks), acquired.cached_blocks
        if len(set(self.blocks)) != n_blocks or self.cached > request.max_cached_blocks:
            self._ledger.violation(f"{self.worker.name} asked for {n_blocks} blocks and got {acquired}", wanted.chain)
        n_filled = n_blocks if wanted.landing else self.cached
        if self._is_given_up:
            return acquired
        for logical in range(n_filled):
            self._known[self.blocks[logical]] = self.name(logical)
        self._ledger.note(
            wanted.chain, f"{self.worker.name} got {self.blocks}, {n_filled} filled, job {self.job_id[:6]}"
        )
        self.check("as given")
        return acquired

    def name(self, logical: int) -> tuple[str, int]:
        """Whose content belongs into a block of this job."""
        if logical < self.wanted.n_keys:
            return self.wanted.chain, logical
        return self.wanted.tail_of or f"tail of {self.job_id}", logical - self.wanted.n_keys

    def write_layer(self, layer: int) -> None:
        """Compute one layer of all blocks that had nothing yet. Raises WorkerLost."""
        start, stop = layer * SLICE_BYTES, (layer + 1) * SLICE_BYTES
        for logical in range(self.cached, len(self.blocks)):
            target = self.worker.block(self._hold, self.blocks[logical])
            target[start:stop] = self._contents.block(*self.name(logical))[start:stop]
        if layer == LAYERS - 1:
            for logical in range(self.cached, len(self.blocks)):
                self._known[self.blocks[logical]] = self.name(logical)
            self._ledger.written_blocks += len(self.blocks) - self.cached

    def write(self) -> None:
        for layer in range(LAYERS):
            self.write_layer(layer)

    def seal(self) -> None:
        """Share what has a key. Raises MeshError."""
        wanted = self.wanted
        keys = [self._contents.key(wanted.chain, i) for i in range(self.cached, wanted.n_keys)]
        self.worker.post(Seal(job_id=self.job_id, first_block=self.cached, keys=join_keys(keys)))
        self._ledger.note(wanted.chain, f"{self.worker.name} sealed {self.cached}..{wanted.n_keys - 1}")

    async def grow(self, n_blocks: int, timeout_s: float) -> int:
        """Ask for more blocks, and write those that came; how many did. Raises MooncakeError."""
        grown = await self.worker.call(Grow(wanted={self.job_id: n_blocks}), Grown, timeout_s)
        got = list(grown.blocks.get(self.job_id, ()))
        for block in got:
            self.blocks.append(block)
            name = self.name(len(self.blocks) - 1)
            self.worker.block(self._hold, block)[:] = self._contents.block(*name)
            self._known[block] = name
        return len(got)

    def part(self) -> None:
        """Check the blocks a last time: the messenger may take them back from now on."""
        self.check("before it parts with them")
        self._known.clear()

    def give_up(self) -> None:
        """Release the job in the middle of whatever it does. Raises WorkerLost or PeerUnreachable."""
        self._known.clear()
        self._is_given_up = True
        self.worker.post(Release(job_id=self.job_id))

    def check(self, when: str) -> None:
        """Compare every byte that is known with what it must be. Raises WorkerLost."""
        for block, (chain, index) in self._known.items():
            found = self.worker.block(self._hold, block)
            expected = self._contents.block(chain, index)
            self._ledger.verified_blocks += 1
            if (found != expected).any():
                difference = self._contents.difference(found.copy(), expected)
                what = f"{self.worker.name}, job {self.job_id[:6]} {when}: block {block} is not {chain}[{index}]"
                self._ledger.violation(f"{what}: {difference}", self.wanted.chain)
