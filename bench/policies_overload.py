"""Twice the load that a live mesh can serve, under the four overload strategies; a part of `bench.policies`.

Requests that share nothing, with answers long enough for decoding to be what is short. What the mesh can serve is
measured first, by a few clients that always have a request running: requests a second, and the times that go with it.
All instances share this machine's cores, so multiples of unloaded times would be missed by whoever is not alone;
objectives are what the mesh keeps when it is just busy, and half as much again.
"""

import argparse
import asyncio
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

_MARGIN: Final = 1.5
"""Objectives over the P90 of the times at capacity."""

_SENTENCES: Final = range(6, 30)
_NEW_TOKENS: Final = 40
_CLOSED_REQUESTS: Final = 24
_CLIENTS: Final = 6


@dataclass(slots=True)
class Overload:
    """Times of all requests so far, by strategy: only of rounds that all strategies were through with."""

    times: dict[AdmissionKind, list[StreamTimes]] = field(default_factory=lambda: {kind: [] for kind in AdmissionKind})
    seconds: float = 0.0
    rate: float = 0.0
    ttft_s: float = 0.0
    tbt_s: float = 0.0

    def run(self, mesh: PolicyMesh, args: argparse.Namespace) -> None:
        """Measure the capacity, then serve the same arrivals under all strategies, round by round."""
        mesh.use({"admission": AdmissionKind.BASELINE.value, "ttft_slo_s": 600.0, "tbt_slo_s": 60.0})
        capacity, ttft_s, tbt_s = asyncio.run(_closed_loop(mesh, args.seed))
        self.rate = 2.0 * capacity
        self.ttft_s, self.tbt_s = args.ttft or _MARGIN * ttft_s, args.tbt or _MARGIN * tbt_s
        tell(f"capacity {capacity:.2f}/s; objectives {self.ttft_s:.2f} s and {self.tbt_s:.3f} s")
        kinds = list(AdmissionKind)
        for number in range(args.overload_rounds):
            done: dict[AdmissionKind, list[StreamTimes]] = {}
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                mesh.use(self._settings(kind))
                share_s = args.overload_s / args.overload_rounds
                done[kind] = asyncio.run(_open_loop(mesh, share_s, self.rate, f"{args.seed}.{number}", kind))
                good = sum(is_good(stream, self.ttft_s, self.tbt_s) for stream in done[kind])
                tell(f"overload round {number + 1}, {kind.value}: {good} of {len(done[kind])} good")
            self.seconds += args.overload_s / args.overload_rounds
            for kind, times in done.items():
                self.times[kind] += times

    def _settings(self, kind: AdmissionKind) -> dict[str, str | float]:
        return {
            "placement": PlacementKind.ADAPTIVE.value,
            "admission": kind.value,
            "ttft_slo_s": self.ttft_s,
            "tbt_slo_s": self.tbt_s,
        }

    def rows(self, report: Report) -> None:
        """Nothing where no round was finished."""
        if not self.seconds:
            return
        report.note(
            f"2x overload: {self.rate:.2f} requests/s, twice what was measured; good: answered whole, TTFT within"
            f" {self.ttft_s:.2f} s and TBT within {self.tbt_s * 1e3:.0f} ms"
        )
        good = {k: sum(is_good(one, self.ttft_s, self.tbt_s) for one in times) for k, times in self.times.items()}
        base = good[AdmissionKind.BASELINE] / self.seconds
        for kind, times in self.times.items():
            name = f"2x overload, {kind.value}:"
            is_last = kind is AdmissionKind.HOLD
            best_other = max(n for other, n in good.items() if other is not AdmissionKind.HOLD)
            report.row(f"{name} goodput (baseline: baseline)", good[kind] / self.seconds, "good/s",
                       baseline=base or None, n=len(times), aim="≥ the others" if is_last else "",
                       met=0 < good[kind] >= best_other if is_last else None)  # fmt: skip
            report.row(f"{name} good requests", good[kind], f"of {len(times)}")
            report.row(
                f"{name} served, but late", len(times) - good[kind] - sum(bool(t.error) for t in times), "requests"
            )
            report.row(f"{name} refused", sum(map(refused, times)), "requests")
            n_failed = sum(map(failed, times))
            report.row(f"{name} failed", n_failed, "requests", aim="0", met=n_failed == 0)


async def _closed_loop(mesh: PolicyMesh, seed: int) -> tuple[float, float, float]:
    """What the mesh can do: requests a second, and the P90 of TTFT and TBT. The first of each client warm up."""
    random = Random(seed + 1)
    places = asyncio.Semaphore(_CLIENTS)

    async def one(prompt: str) -> StreamTimes:
        async with places:
            return await _ask(mesh, prompt)

    async def wave(n: int, owner: str) -> list[StreamTimes]:
        return list(await asyncio.gather(*(one(_prompt(random, f"{owner} {i}")) for i in range(n))))

    await wave(_CLIENTS, "warm")
    started_s = perf_counter()
    times = [stream for stream in await wave(_CLOSED_REQUESTS, "closed") if not stream.error]
    per_s = len(times) / (perf_counter() - started_s)
    tbts_s = [longest_mean_s(tbt_gaps(stream.tokens_s)) for stream in times]
    return per_s, quantile([stream.ttft_s for stream in times], 0.9), quantile(tbts_s, 0.9)


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
