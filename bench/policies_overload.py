"""Twice the load that a live mesh can serve, under the four overload strategies; a part of `bench.policies`.

Requests that share nothing, with answers long enough for decoding to be what is short. At the beginning of every round
two things are measured: the times of requests that come one at a time, whose multiples are the objectives as in the
paper (10 times TTFT, 5 times TBT), and how many requests a second the mesh serves a few clients that always have one
running. Twice that comes in every strategy's turn.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Final

from bench.load import Connection, StreamTimes
from bench.policies_mesh import PolicyMesh, failed, refused, tell
from bench.policies_text import sentences
from bench.report import Report
from bench.simulator_results import longest_mean_s, quantile
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind

_TTFT_FACTOR: Final = 10.0
_TBT_FACTOR: Final = 5.0
"""Objectives over the P90 of the times of a request that is alone (arXiv 2407.00079, section 8.1)."""

_SENTENCES: Final = range(6, 30)
_NEW_TOKENS: Final = 128
_ALONE_REQUESTS: Final = 5
_CLOSED_REQUESTS: Final = 24
_CLIENTS: Final = 12


@dataclass(slots=True)
class Overload:
    """Times of all requests so far, how many of them were good and how long they came, by strategy. ``rounds`` are the
    rates and objectives (1/s, TTFT in s, TBT in s); of the last one some strategies may be missing."""

    times: dict[AdmissionKind, list[StreamTimes]] = field(default_factory=lambda: {kind: [] for kind in AdmissionKind})
    good: Counter[AdmissionKind] = field(default_factory=Counter)
    seconds: dict[AdmissionKind, float] = field(default_factory=lambda: dict.fromkeys(AdmissionKind, 0.0))
    rounds: list[tuple[float, float, float]] = field(default_factory=list)

    def run(self, mesh: PolicyMesh, args: argparse.Namespace) -> None:
        """Round by round, measure the capacity, then serve the same arrivals under all strategies."""
        kinds = list(AdmissionKind)
        for number in range(args.overload_rounds):
            mesh.use({"admission": AdmissionKind.BASELINE.value, "ttft_slo_s": 600.0, "tbt_slo_s": 60.0})
            ttft_s, tbt_s, capacity = asyncio.run(_measured(mesh, f"{args.seed}.{number}"))
            rate, ttft_s, tbt_s = 2.0 * capacity, args.ttft or _TTFT_FACTOR * ttft_s, args.tbt or _TBT_FACTOR * tbt_s
            tell(f"capacity {capacity:.2f}/s; objectives {ttft_s:.2f} s and {tbt_s:.3f} s")
            share_s = args.overload_s / args.overload_rounds
            self.rounds.append((rate, ttft_s, tbt_s))
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                mesh.use(_settings(kind, ttft_s, tbt_s))
                times = asyncio.run(_open_loop(mesh, share_s, rate, f"{args.seed}.{number}", kind))
                n_good = sum(is_good(stream, ttft_s, tbt_s) for stream in times)
                self.times[kind] += times
                self.good[kind] += n_good
                self.seconds[kind] += share_s
                tell(f"overload round {number + 1}, {kind.value}: {n_good} of {len(times)} good")

    def rows(self, report: Report) -> None:
        """Of the strategies that had a turn; who is best is said once all had the same."""
        for number, (rate, ttft_s, tbt_s) in enumerate(self.rounds, start=1):
            report.note(
                f"2x overload, round {number}: {rate:.2f} requests/s, twice what was measured; good: answered whole,"
                f" TTFT within {ttft_s:.2f} s and TBT within {tbt_s * 1e3:.0f} ms"
            )
        goodput = {kind: self.good[kind] / seconds for kind, seconds in self.seconds.items() if seconds}
        is_whole = len(goodput) == len(self.seconds) and len(set(self.seconds.values())) == 1
        for kind, good_per_s in goodput.items():
            times, name = self.times[kind], f"2x overload, {kind.value}:"
            is_judged = is_whole and kind is AdmissionKind.HOLD
            report.row(f"{name} goodput (baseline: baseline)", good_per_s, "good/s",
                       baseline=goodput.get(AdmissionKind.BASELINE) or None, n=len(times),
                       aim="≥ the others" if is_judged else "",
                       met=0 < good_per_s >= max(goodput.values()) if is_judged else None)  # fmt: skip
            report.row(f"{name} good requests", self.good[kind], f"of {len(times)}")
            report.row(
                f"{name} served, but late", len(times) - self.good[kind] - sum(bool(t.error) for t in times), "requests"
            )
            report.row(f"{name} refused", sum(map(refused, times)), "requests")
            n_failed = sum(map(failed, times))
            report.row(f"{name} failed", n_failed, "requests", aim="0", met=n_failed == 0)


def _settings(kind: AdmissionKind, ttft_s: float, tbt_s: float) -> dict[str, str | float]:
    return {
        "placement": PlacementKind.ADAPTIVE.value,
        "admission": kind.value,
        "ttft_slo_s": ttft_s,
        "tbt_slo_s": tbt_s,
    }


async def _measured(mesh: PolicyMesh, seed: str) -> tuple[float, float, float]:
    """P90 of TTFT and TBT of a request that is alone, and the requests a second that busy clients are served."""
    random = Random(f"measured {seed}")

    async def waves(n: int, at_a_time: int, owner: str) -> list[StreamTimes]:
        places = asyncio.Semaphore(at_a_time)

        async def one(prompt: str) -> StreamTimes:
            async with places:
                return await _ask(mesh, prompt)

        return list(await asyncio.gather(*(one(_prompt(random, f"{owner} {seed}.{i}")) for i in range(n))))

    await waves(1, 1, "warm")
    alone = [stream for stream in await waves(_ALONE_REQUESTS, 1, "alone") if not stream.error]
    tbts_s = [longest_mean_s(tbt_gaps(stream.tokens_s)) for stream in alone]
    await waves(_CLIENTS, _CLIENTS, "filling")
    started_s = perf_counter()
    served = sum(not stream.error for stream in await waves(_CLOSED_REQUESTS, _CLIENTS, "busy"))
    per_s = served / (perf_counter() - started_s)
    return quantile([stream.ttft_s for stream in alone], 0.9), quantile(tbts_s, 0.9), per_s


async def _open_loop(
    mesh: PolicyMesh, seconds: float, rate: float, seed: str, kind: AdmissionKind
) -> list[StreamTimes]:
    """Poisson arrivals, the same for every *kind* but for what makes the texts its own."""
    random = Random(seed)
    started_s = perf_counter()
    at_s = random.expovariate(rate)
    arrivals: list[tuple[float, str]] = []
    while at_s < seconds:
        arrivals.append((at_s, _prompt(random, f"{kind.value} {seed}.{len(arrivals)}")))
        at_s += random.expovariate(rate)

    async def one(at_s: float, prompt: str) -> StreamTimes:
        await asyncio.sleep(max(0.0, started_s + at_s - perf_counter()))
        return await _ask(mesh, prompt)

    return list(await asyncio.gather(*(one(at_s, prompt) for at_s, prompt in arrivals)))


async def _ask(mesh: PolicyMesh, prompt: str) -> StreamTimes:
    connection = Connection(mesh.mesh.host, mesh.mesh.port)
    times = await connection.stream(mesh.body(prompt, _NEW_TOKENS))
    await connection.close()
    return times


def _prompt(random: Random, owner: str) -> str:
    """80 to 400 tokens of which nothing is cached."""
    return f"{owner}: " + sentences(random, random.choice(_SENTENCES))


def is_good(stream: StreamTimes, ttft_s: float, tbt_s: float) -> bool:
    """Answered whole, with both objectives kept."""
    if stream.error or not stream.tokens_s or stream.ttft_s > ttft_s:
        return False
    gaps = tbt_gaps(stream.tokens_s)
    return not gaps or longest_mean_s(gaps) <= tbt_s


def tbt_gaps(tokens_s: Sequence[float]) -> list[tuple[float, int]]:
    """Intervals between tokens, as the simulator counts them."""
    return [(b - a, 1) for a, b in pairwise(tokens_s)]
