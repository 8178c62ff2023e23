"""Placement and overload strategies on this machine, live: `python -m bench.policies`.

Placement: 40 conversations of three turns, each turn carrying the whole history, over two prefill instances, under four
policies. Every policy has a mesh of its own; rounds are interleaved, so that what else the machine does hits all alike.
Overload: twice the arrivals that the mesh can serve, under the four strategies; good requests met both objectives.
It takes about a quarter of an hour with the model, most of it in turns of the conversations.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Final

from bench.load import Connection, StreamTimes
from bench.mesh import LocalMesh, local_mesh, prefill_node
from bench.report import Report
from bench.simulator_results import longest_mean_s
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
_ARENA_BYTES: Final = 256 << 20
_SENTENCES: Final = (
    "The harbour was quiet when the first boats came in with the tide. ",
    "Nobody had expected the letter to arrive before the end of winter. ",
    "A small engine can pull a long train if the track is level. ",
    "She counted the steps twice and wrote the number on the wall. ",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a user says in each turn; conversations of one ``topic`` begin alike."""

    turns: tuple[str, ...]


def conversations(n: int, seed: int) -> list[Conversation]:
    """*n* conversations over a few long openings, about 250 tokens each, that several of them share."""
    random = Random(seed)
    openings = ["".join(random.choice(_SENTENCES) for _ in range(16)) + f"Topic {topic}. " for topic in range(8)]
    return [
        Conversation(
            turns=tuple(
                (openings[number % len(openings)] if turn == 0 else "")
                + f"Question {number}.{turn}: "
                + "".join(random.choice(_SENTENCES) for _ in range(4))
                for turn in range(_TURNS)
            )
        )
        for number in range(n)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both parts; 0 when the measurements were made."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", choices=("transformers", "fake"), default="transformers")
    parser.add_argument("--conversations", type=int, default=40, metavar="N")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="pieces that the conversations are cut into")
    parser.add_argument("--overload-requests", type=int, default=48, metavar="N", help="0: no overload part")
    parser.add_argument("--ttft", type=float, default=10.0, metavar="S", help="objective in the overload part")
    parser.add_argument("--tbt", type=float, default=0.25, metavar="S", help="objective in the overload part")
    parser.add_argument("--seed", type=int, default=1)
    Report.add_flags(parser)
    args = parser.parse_args(argv)
    report = Report("policies", f"{args.engine}, 2 prefill and 1 decode instances, {args.conversations} conversations")
    _placement(report, args)
    if args.overload_requests:
        _overload(report, args)
    report.finish(args)
    return 0


def _engine(args: argparse.Namespace) -> list[str]:
    flags = ["--engine", args.engine]
    if args.engine == "fake":
        flags += ["--fake-prefill-s-per-token", "0.001", "--fake-decode-s-base", "0.02"]
        flags += ["--fake-decode-s-per-slot", "0.01"]
    return flags


@contextmanager
def _mesh(args: argparse.Namespace, settings: dict[str, str]) -> Iterator[LocalMesh]:
    """Two prefill instances on nodes of their own and one decode instance on a third."""
    flags = [*_engine(args), "--arena-bytes", str(_ARENA_BYTES)]
    with local_mesh(flags, settings) as mesh, prefill_node(mesh, 2, _engine(args), _ARENA_BYTES):
        yield mesh


# --- placement --------------------------------------------------------------------------------------------------------


def _placement(report: Report, args: argparse.Namespace) -> None:
    talks = conversations(args.conversations, args.seed)
    pieces = [talks[i :: args.rounds] for i in range(args.rounds)]
    ttfts: dict[PlacementKind, list[float]] = {policy: [] for policy in _POLICIES}
    failed: dict[PlacementKind, int] = dict.fromkeys(_POLICIES, 0)
    with ExitStack() as meshes:
        running: dict[PlacementKind, LocalMesh] = {}
        for policy in _POLICIES:
            _tell(f"starting a mesh that places by {policy.value}")
            settings = {
                "MOONCAKE_CONDUCTOR_PLACEMENT": policy.value,
                "MOONCAKE_CONDUCTOR_ADMISSION": AdmissionKind.BASELINE.value,
                "MOONCAKE_CONDUCTOR_TTFT_SLO_S": "600",
                "MOONCAKE_CONDUCTOR_TBT_SLO_S": "60",
            }
            running[policy] = meshes.enter_context(_mesh(args, settings))
        for number, piece in enumerate(pieces, start=1):
            for policy, mesh in running.items():
                _tell(f"round {number} of {len(pieces)}: {len(piece)} conversations, {policy.value}")
                times = asyncio.run(_talk(mesh, piece))
                ttfts[policy] += [stream.ttft_s for stream in times if not stream.error and stream.tokens_s]
                failed[policy] += sum(bool(stream.error) for stream in times)
    base = before = mean(ttfts[PlacementKind.RANDOM])
    for policy in _POLICIES:
        mean_s = mean(ttfts[policy])
        _tell(f"mean TTFT under {policy.value}: {mean_s:.3f} s")
        report.row(f"mean TTFT, {policy.value} (baseline: random)", mean_s, "s", baseline=base, n=len(ttfts[policy]),
                   aim="" if policy is PlacementKind.RANDOM else "≤ the one before",
                   met=None if policy is PlacementKind.RANDOM else mean_s <= before)  # fmt: skip
        report.row(f"median TTFT, {policy.value}", median(ttfts[policy]), "s", n=len(ttfts[policy]))
        report.row(f"failed turns, {policy.value}", failed[policy], "turns", aim="0", met=not failed[policy])
        before = mean_s


def _tell(progress: str) -> None:
    sys.stderr.write(f"bench.policies: {progress}\n")


async def _talk(mesh: LocalMesh, talks: Sequence[Conversation]) -> list[StreamTimes]:
    """All turns of *talks*, a few conversations at a time; each turn after the answer to the one before."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(talk: Conversation) -> list[StreamTimes]:
        async with places:
            connection = Connection(mesh.host, mesh.port)
            history, times = "", []
            for turn in talk.turns:
                history += turn
                times.append(await connection.stream(_body(mesh, history, _TURN_TOKENS)))
                history += " Noted. "
            await connection.close()
            return times

    return [stream for times in await asyncio.gather(*map(one, talks)) for stream in times]


def _body(mesh: LocalMesh, prompt: str, max_tokens: int) -> dict[str, object]:
    return {"model": mesh.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


# --- overload ---------------------------------------------------------------------------------------------------------


def _overload(report: Report, args: argparse.Namespace) -> None:
    """Arrivals at twice the rate that a closed loop reaches; each strategy has a mesh of its own, one after another."""
    rate = 0.0
    good_of_baseline = 0
    for kind in AdmissionKind:
        settings = {
            "MOONCAKE_CONDUCTOR_ADMISSION": kind.value,
            "MOONCAKE_CONDUCTOR_TTFT_SLO_S": str(args.ttft),
            "MOONCAKE_CONDUCTOR_TBT_SLO_S": str(args.tbt),
        }
        _tell(f"overload under {kind.value}")
        with _mesh(args, settings) as mesh:
            warm_s = asyncio.run(_closed_loop(mesh, args.seed))
            rate = rate or 2.0 / warm_s  # measured once: all strategies get the same arrivals
            times = asyncio.run(_open_loop(mesh, args.overload_requests, rate, args.seed))
        good = sum(_is_good(stream, args.ttft, args.tbt) for stream in times)
        refused = sum("429" in stream.error or "503" in stream.error for stream in times)
        failed = sum(bool(stream.error) for stream in times) - refused
        if kind is AdmissionKind.BASELINE:
            good_of_baseline = good
        _tell(f"{good} of {len(times)} good under {kind.value}, {refused} refused")
        report.row(f"2x overload ({rate:.2f}/s): good requests, {kind.value}", good, f"of {len(times)}",
                   baseline=good_of_baseline or None)  # fmt: skip
        report.row(f"2x overload: refused, {kind.value}", refused, "requests")
        report.row(f"2x overload: failed, {kind.value}", failed, "requests", aim="0", met=failed == 0)


async def _closed_loop(mesh: LocalMesh, seed: int) -> float:
    """Seconds per request with a few clients that always have one running: what the mesh can do."""
    prompts = _prompts(3 * _AT_A_TIME, seed + 1)
    started_s = perf_counter()
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(prompt: str) -> None:
        async with places:
            connection = Connection(mesh.host, mesh.port)
            await connection.stream(_body(mesh, prompt, 24))
            await connection.close()

    await asyncio.gather(*map(one, prompts))
    return (perf_counter() - started_s) / len(prompts)


async def _open_loop(mesh: LocalMesh, n: int, rate: float, seed: int) -> list[StreamTimes]:
    random = Random(seed)
    started_s = perf_counter()
    at_s = 0.0
    arrivals = []
    for prompt in _prompts(n, seed):
        at_s += random.expovariate(rate)
        arrivals.append((at_s, prompt))

    async def one(at_s: float, prompt: str) -> StreamTimes:
        await asyncio.sleep(max(0.0, started_s + at_s - perf_counter()))
        connection = Connection(mesh.host, mesh.port)
        times = await connection.stream(_body(mesh, prompt, 24))
        await connection.close()
        return times

    return list(await asyncio.gather(*(one(at_s, prompt) for at_s, prompt in arrivals)))


def _prompts(n: int, seed: int) -> list[str]:
    """Prompts of 60 to 250 tokens that share nothing."""
    random = Random(seed)
    return [f"{seed}.{i} " + "".join(random.choice(_SENTENCES) for _ in range(random.randint(4, 16))) for i in range(n)]


def _is_good(stream: StreamTimes, ttft_s: float, tbt_s: float) -> bool:
    if stream.error or not stream.tokens_s or stream.ttft_s > ttft_s:
        return False
    gaps = [(b - a, 1) for a, b in zip(stream.tokens_s, stream.tokens_s[1:], strict=False)]
    return not gaps or longest_mean_s(gaps) <= tbt_s


if __name__ == "__main__":
    sys.exit(main())
