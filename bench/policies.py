"""Placement and overload strategies on this machine, live: `python -m bench.policies`.

Placement: conversations of three turns, each turn carrying the whole history, over two prefill instances, under four
policies. Overload: twice the arrivals that the mesh can serve, under the four strategies, with the decode instance on a
core of its own. Each in one mesh whose conductor is restarted with the next policy; rounds are interleaved, so that
what else the machine does hits all alike, and every policy has texts of its own, so that none finds what another one
left in the pool.
It takes ten minutes with the model. What was finished is printed when it is cut off.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import mean, median
from typing import Final

from bench.load import Connection, StreamTimes
from bench.policies_mesh import PolicyMesh, failed, own_cores, shared_cores, tell
from bench.policies_overload import Overload
from bench.policies_text import sentences
from bench.report import Report
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind

_POLICIES: Final = (
    PlacementKind.RANDOM,
    PlacementKind.LOAD_BALANCE,
    PlacementKind.LOCAL,
    PlacementKind.KVCACHE_CENTRIC,
)
_TURNS: Final = 3
_TURN_TOKENS: Final = 8
_AT_A_TIME: Final = 4
_PER_TOPIC: Final = 4
_OPENING_SENTENCES: Final = 40
_TURN_SENTENCES: Final = 8
_LOOSE: Final[dict[str, str | float]] = {
    "ttft_slo_s": 600.0,
    "tbt_slo_s": 60.0,
    "admission": AdmissionKind.BASELINE.value,
}
"""Nobody is refused where placement is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a user says in each turn; conversations of one ``topic`` begin alike."""

    turns: tuple[str, ...]


def conversations(n: int, seed: int, owner: str) -> list[Conversation]:
    """*n* conversations over openings of about 550 tokens that four of them share; each turn adds about 120.

    Nothing of them is the same under another *owner*, but every length is. In an order in which those of one topic are
    spread.
    """
    random = Random(seed)
    topics = -(-n // _PER_TOPIC)
    openings = [f"{owner}, topic {topic}. " + sentences(random, _OPENING_SENTENCES) for topic in range(topics)]
    return [
        Conversation(
            turns=tuple(
                (openings[number % topics] if turn == 0 else "")
                + f"Question {number}.{turn}: "
                + sentences(random, _TURN_SENTENCES)
                for turn in range(_TURNS)
            )
        )
        for number in range(n)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts; 0 when the measurements were made, 1 when they were cut off."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("transformers", "fake"), default="transformers")
    parser.add_argument("--conversations", type=int, default=40, metavar="N", help="0: no placement part")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="pieces that each policy's work is cut into")
    parser.add_argument("--overload-s", type=float, default=30.0, metavar="S", help="of arrivals for each strategy")
    parser.add_argument("--overload-rounds", type=int, default=1, metavar="N", help="0: no overload part")
    parser.add_argument("--ttft", type=float, metavar="S", help="objective under overload; 10 times that of one alone")
    parser.add_argument("--tbt", type=float, metavar="S", help="objective under overload; 5 times that of one alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="12 conversations, and one round of 15 s under overload")
    Report.add_flags(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.conversations, args.rounds, args.overload_s, args.overload_rounds = 12, 1, 15.0, 1
    report = Report("policies", f"{args.engine}, {args.conversations} conversations on 2P1D, overload on 1P1D")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` sends that: what was finished is told
    whole = False
    placement, overload = Placement(), Overload()
    try:
        if args.conversations:
            with shared_cores(args, _LOOSE) as mesh:
                mesh.measure(largest_batch=4)
                placement.run(mesh, args)
        if args.overload_rounds:
            with own_cores(args, _LOOSE) as mesh:
                mesh.measure(largest_batch=16)
                overload.run(mesh, args)
        whole = True
    except KeyboardInterrupt:
        report.note("cut off: what was finished by then")
    finally:
        placement.rows(report)
        overload.rows(report)
        report.finish(args)
    return 0 if whole else 1


@dataclass(slots=True)
class Placement:
    """Times of all turns so far, by policy: only of rounds that all policies were through with."""

    times: dict[PlacementKind, list[StreamTimes]] = field(default_factory=lambda: {policy: [] for policy in _POLICIES})

    def run(self, mesh: PolicyMesh, args: argparse.Namespace) -> None:
        """All conversations in rounds, in every round under every policy; the rounds begin with different ones."""
        talks = {policy: conversations(args.conversations, args.seed, policy.value) for policy in _POLICIES}
        for number in range(args.rounds):
            shift = number % len(_POLICIES)
            done: dict[PlacementKind, list[StreamTimes]] = {}
            for policy in _POLICIES[shift:] + _POLICIES[:shift]:
                piece = talks[policy][number :: args.rounds]
                mesh.use({**_LOOSE, "placement": policy.value})
                done[policy] = asyncio.run(_talk(mesh, piece))
                mean_s = mean(ttfts(done[policy]) or [0.0])
                tell(f"round {number + 1} of {args.rounds}, {policy.value}: mean TTFT {mean_s:.3f} s")
            for policy, times in done.items():
                self.times[policy] += times

    def rows(self, report: Report) -> None:
        """Nothing where no round was finished."""
        means = {policy: mean(ttfts(times)) for policy, times in self.times.items() if ttfts(times)}
        before = None
        for policy, mean_s in means.items():
            ours = self.times[policy]
            report.row(f"mean TTFT, {policy.value} (baseline: random)", mean_s, "s",
                       baseline=means[PlacementKind.RANDOM], n=len(ttfts(ours)),
                       aim="" if before is None else "≤ the one before",
                       met=None if before is None else mean_s <= before)  # fmt: skip
            report.row(f"median TTFT, {policy.value}", median(ttfts(ours)), "s", n=len(ttfts(ours)))
            n_failed = sum(bool(stream.error) for stream in ours)
            report.row(f"failed turns, {policy.value}", n_failed, "turns", aim="0", met=not n_failed)
            before = mean_s


def ttfts(times: Sequence[StreamTimes]) -> list[float]:
    """Of those that were answered."""
    return [stream.ttft_s for stream in times if not stream.error and stream.tokens_s]


async def _talk(mesh: PolicyMesh, talks: Sequence[Conversation]) -> list[StreamTimes]:
    """All turns of *talks*, a few conversations at a time; each turn after the answer to the one before."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(talk: Conversation) -> list[StreamTimes]:
        async with places:
            connection = Connection(mesh.mesh.host, mesh.mesh.port)
            history, times = "", []
            for turn in talk.turns:
                history += turn
                times.append(await connection.stream(mesh.body(history, _TURN_TOKENS)))
                if failed(times[-1]):
                    tell(f"a turn failed: {times[-1].error}")
                history += " Noted. "
            await connection.close()
            return times

    return [stream for times in await asyncio.gather(*map(one, talks)) for stream in times]


if __name__ == "__main__":
    sys.exit(main())
