"""Hit rates of the KVCache pool by eviction policy: `python -m bench.eviction`.

The published traces run through the pool's own objects, a BlockPool and its policy, as a messenger would drive them:
match, hold, reserve, seal, release, one request after the other. The conventions are those of the papers' tables: one
pool for all, every block of 512 tokens (the partial last one too), hit rate = leading resident blocks / all blocks.

The limit is what no policy can pass: evict the block that is used again farthest in the future.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from time import process_time
from typing import Final

from bench.report import Report
from bench.traces import TRACES, TraceMissing, TraceRequest, read_trace
from mooncake_mesh.kv.block_pool import BlockPool, NoRoom
from mooncake_mesh.kv.eviction import EvictionKind, eviction_policy
from mooncake_mesh.kv.eviction_contract import BlockHistory, EvictionPolicy
from mooncake_proto.ids import BlockId, BlockKey

NAMES: Final = ("conversation", "synthetic")
CAPACITIES: Final = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
QUICK_CAPACITIES: Final = (10_000,)

PUBLISHED_LRU: Final = {
    "conversation": {1_000: 0.0445, 10_000: 0.2116, 30_000: 0.3257, 50_000: 0.3546, 100_000: 0.3637, None: 0.3664},
    "synthetic": {1_000: 0.0841, 10_000: 0.4239, 30_000: 0.6242, 50_000: 0.6396, 100_000: 0.6396, None: 0.6396},
}
"""LRU by an independent replay of the same files, by blocks; None is a pool without limit."""
TOLERANCE: Final = 0.005

GAIN: Final = 0.02
"""What the project's own policy should have over LRU where room is short ..."""
GAIN_AT: Final = frozenset({3_000, 10_000})
LOSS: Final = 0.005
"""... and the most it may lose elsewhere."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size of the pool, under a minute")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of the traces")
    Report.add_flags(parser)
    args = parser.parse_args()
    try:
        traces = {name: read_trace(name, args.traces) for name in NAMES}
    except TraceMissing as missing:
        sys.exit(f"bench.eviction: {missing}")
    report = Report("eviction", "hit rate of leading blocks, one pool, requests in order")
    for name, requests in traces.items():
        for n_blocks in QUICK_CAPACITIES if args.quick else CAPACITIES:
            _compare(report, name, requests, n_blocks)
        _without_limit(report, name, requests)
    report.finish(args)


# --- the replay -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    hit_rate: float
    cpu_us_per_block: float


def replay(requests: Sequence[TraceRequest], n_blocks: int, eviction: EvictionPolicy) -> Replayed:
    """Run *requests* through a pool of *n_blocks*. Requests longer than the pool are refused with ValueError."""
    pool = BlockPool(n_blocks, eviction=eviction)
    hits = blocks = 0
    start_s = process_time()
    for request in requests:
        keys = request.keys
        cached = pool.match(keys)
        pool.hold("request", cached)
        fresh = pool.reserve("request", len(keys) - len(cached))
        if isinstance(fresh, NoRoom):
            raise ValueError(f"a request of {len(keys)} blocks in a pool of {n_blocks}")
        for block, key in zip(fresh, keys[len(cached) :], strict=True):
            pool.seal("request", block, key)
        pool.release("request")
        pool.drain_events()
        hits += len(cached)
        blocks += len(keys)
    return Replayed(hit_rate=hits / blocks, cpu_us_per_block=1e6 * (process_time() - start_s) / blocks)


class ClairvoyantEviction:
    """Used again farthest in the future first: no policy has more hits. It is told the future, so it is no policy."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        """For one :func:`replay` of *requests*, which inserts each request's blocks deepest first."""
        self._next_uses = iter(_next_uses(requests))
        self._heap: list[tuple[int, int, BlockId]] = []
        self._turn_of: dict[BlockId, int] = {}
        self._turn = 0

    def use(self, chain: Sequence[BlockKey]) -> None:
        """What is used next is known already."""

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        self._turn += 1
        self._turn_of[block] = self._turn
        heappush(self._heap, (-next(self._next_uses), self._turn, block))

    def remove(self, block: BlockId) -> None:
        del self._turn_of[block]

    def evict(self) -> BlockId:
        while True:
            _, turn, block = heappop(self._heap)
            if self._turn_of.get(block) == turn:
                del self._turn_of[block]
                return block

    def order(self) -> Iterator[BlockId]:
        return (block for _, turn, block in sorted(self._heap) if self._turn_of.get(block) == turn)

    def __len__(self) -> int:
        return len(self._turn_of)


def _next_uses(requests: Sequence[TraceRequest]) -> list[int]:
    """For each use of a block, in the order of a replay's insertions: which request uses it next."""
    never = len(requests)
    upcoming: dict[BlockKey, int] = {}
    uses = []
    for i in reversed(range(len(requests))):
        for key in requests[i].keys:  # in the end the list is reversed: deepest first
            uses.append(upcoming.get(key, never))
            upcoming[key] = i
    uses.reverse()
    return uses


# --- the report -------------------------------------------------------------------------------------------------------


def _compare(report: Report, name: str, requests: Sequence[TraceRequest], n_blocks: int) -> None:
    lru = replay(requests, n_blocks, eviction_policy(EvictionKind.LRU))
    _published(report, f"{name} {n_blocks:,} lru", lru, PUBLISHED_LRU[name].get(n_blocks))
    for kind in (EvictionKind.LFU, EvictionKind.LENGTH_AWARE):
        hit_rate = replay(requests, n_blocks, eviction_policy(kind)).hit_rate
        report.row(f"{name} {n_blocks:,} {kind.value}", hit_rate, "share", baseline=lru.hit_rate)
    _own(
        report,
        f"{name} {n_blocks:,} reuse",
        replay(requests, n_blocks, eviction_policy(EvictionKind.REUSE)),
        lru,
        n_blocks,
    )
    bound = replay(requests, n_blocks, ClairvoyantEviction(requests))
    report.row(f"{name} {n_blocks:,} clairvoyant", bound.hit_rate, "share", baseline=lru.hit_rate)


def _own(report: Report, metric: str, own: Replayed, lru: Replayed, n_blocks: int) -> None:
    least, aim = (GAIN, f"lru + {GAIN}") if n_blocks in GAIN_AT else (-LOSS, f"lru - {LOSS}")
    met = own.hit_rate >= lru.hit_rate + least
    report.row(metric, own.hit_rate, "share", baseline=lru.hit_rate, aim=f">= {aim}", met=met)
    report.row(f"{metric}: CPU of the pool", own.cpu_us_per_block, "us a block", baseline=lru.cpu_us_per_block)


def _without_limit(report: Report, name: str, requests: Sequence[TraceRequest]) -> None:
    n_blocks = len({key for request in requests for key in request.keys})
    result = replay(requests, n_blocks, eviction_policy(EvictionKind.LRU))
    _published(report, f"{name} without limit", result, PUBLISHED_LRU[name][None])


def _published(report: Report, metric: str, result: Replayed, published: float | None) -> None:
    if published is None:
        report.row(metric, result.hit_rate, "share")
        return
    met = abs(result.hit_rate - published) <= TOLERANCE
    report.row(metric, result.hit_rate, "share", baseline=published, aim=f"{published} ± {TOLERANCE}", met=met)


if __name__ == "__main__":
    main()
