"""What 100,000 transfers leave behind, and where the start of a 1 GiB arena spends its time: `python -m bench.soak`.

Two messengers in processes of their own; this process plays the workers of both. Half of the transfers are puts (KV of
a job into blocks reserved elsewhere), half are gets (sealed blocks by their keys). Descriptors and memory of each
process are taken at rest after 10 %, 50 % and all of them. The arenas are written once before, so that their pages are
there.
"""

import argparse
import asyncio
import resource
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import psutil
import uvloop

from bench.report import Report
from bench.transfer_nodes import Node, fill, get, put
from mooncake_proto.control import Ping, Pong

_TRANSFERS: Final = 100_000
_BLOCK_BYTES: Final = 16 << 10
_BLOCKS: Final = 1024
_AT_ONCE: Final = 16
_MARKS: Final = (0.1, 0.5, 1.0)
_MOST_GROWTH_MIB: Final = 4.0
_START_BLOCK_BYTES: Final = 32 << 10
_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Of one process at rest. ``anonymous_mib`` is what is neither a file nor an arena: where leaks are."""

    descriptors: int
    rss_mib: float
    pss_mib: float
    anonymous_mib: float


def sample(pid: int) -> Sample:
    process = psutil.Process(pid)
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    mib = {name.rstrip(":"): int(value) / 1024 for name, value, *_ in map(str.split, lines)}
    return Sample(descriptors=process.num_fds(), rss_mib=mib["Rss"], pss_mib=mib["Pss"], anonymous_mib=mib["Pss_Anon"])


class Soak:
    """Two messengers, one larger than the other, so that what is fetched leaves again before its next turn."""

    def __init__(self, folder: Path, transport: str) -> None:
        self._a = Node("a", folder, transport, _BLOCKS * _BLOCK_BYTES)
        self._b = Node("b", folder, transport, _BLOCKS // 2 * _BLOCK_BYTES)
        self.samples: dict[str, list[Sample]] = {"messenger a": [], "messenger b": []}

    async def run(self, transfers: int) -> float:
        """Do *transfers*, taking samples at the marks; transfers per second. Raises MooncakeError."""
        nodes = (self._a, self._b)
        try:
            for node in nodes:
                await node.attach(_BLOCK_BYTES)
                node.content[:] = 7
            started_s, done = perf_counter(), 0
            for mark in _MARKS:
                while done < int(mark * transfers):
                    done += await self._cycle(int(mark * transfers) - done)
                for name, node in zip(self.samples, nodes, strict=True):
                    self.samples[name].append(sample(node.process.pid))
            return done / (perf_counter() - started_s)
        finally:
            for node in nodes:
                node.close()

    async def _cycle(self, most: int) -> int:
        """Some gets, then as many puts; how many transfers in all."""
        n = min(_BLOCKS - _AT_ONCE, -(-most // 2))
        keys = await fill(self._a, n)
        await self._at_once(n, lambda i: get(self._a, self._b, [keys[i]]))
        await self._at_once(n, lambda _: put(self._a, self._b, 1))
        return 2 * n

    async def _at_once(self, n: int, transfer: Callable[[int], Awaitable[None]]) -> None:
        """*n* transfers, a few at a time."""
        for first in range(0, n, _AT_ONCE):
            await asyncio.gather(*[transfer(i) for i in range(first, min(first + _AT_ONCE, n))])


def _report_soak(soak: Soak, transfers: int, per_s: float, transport: str, report: Report) -> None:
    report.row(f"transfers of 16 KiB, {transport}", per_s, "1/s", n=transfers)
    for name, samples in soak.samples.items():
        for mark, taken in zip(_MARKS, samples, strict=True):
            where = f"{name}, {transport}, at {mark:.0%}"
            report.row(f"{where}: descriptors", taken.descriptors, "")
            report.row(f"{where}: RSS", taken.rss_mib, "MiB")
            report.row(f"{where}: PSS", taken.pss_mib, "MiB")
            report.row(f"{where}: of that anonymous", taken.anonymous_mib, "MiB")
        opened = samples[-1].descriptors - samples[0].descriptors
        grown_mib = samples[-1].anonymous_mib - samples[0].anonymous_mib
        report.row(f"{name}, {transport}: descriptors opened from 10 % on", opened, "", aim="0", met=opened <= 0)
        report.row(
            f"{name}, {transport}: anonymous memory taken from 10 % on",
            grown_mib,
            "MiB",
            aim=f"< {_MOST_GROWTH_MIB:g}",
            met=grown_mib < _MOST_GROWTH_MIB,
        )


# --- the start of a large arena ---------------------------------------------------------------------------------------


async def start(folder: Path, arena_bytes: int, report: Report) -> None:
    """Time each step from the start of a messenger to the second use of its arena."""
    clock = _Clock(report)
    node = Node("large", folder, "auto", arena_bytes, {"commit": "use"})  # the touch is timed by itself
    try:
        await node.rpc.call(Ping(), Pong, timeout_s=30.0)
        process_s = clock.took("start: process, until it answers")
        await node.attach(_START_BLOCK_BYTES)
        attach_s = clock.took(f"start: arena cut into {node.n_blocks} blocks, handed over and mapped by a worker")
        node.content[:] = 7
        clock.took_with_faults(f"first touch of {arena_bytes >> 20} MiB by the worker")
        node.content[:] = 8
        clock.took_with_faults("second write of the same")
        assert node.arena is not None
        node.arena.close()
        await node.attach(_START_BLOCK_BYTES)
        again_s = clock.took("registration and mapping of the touched arena")
        node.content[:, ::4096].sum()
        reached_s = clock.took_with_faults("one byte of every page reached through the new mapping")
    finally:
        node.close()
    total_s = process_s + attach_s + again_s + reached_s
    report.row("start, registration and mapping without first touch", total_s, "s", aim="< 1", met=total_s < 1.0)
    without_s = attach_s + again_s + reached_s
    report.row("of that, without starting Python", without_s, "s", aim="< 1", met=without_s < 1.0)
    if _HUGE.exists():
        report.note(f"2 MiB pages for arenas ({_HUGE}): {_HUGE.read_text().strip()}")


class _Clock:
    def __init__(self, report: Report) -> None:
        self._report = report
        self._mark = perf_counter()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)

    def took(self, what: str) -> float:
        seconds = perf_counter() - self._mark
        self._report.row(what, seconds, "s")
        self._start()
        return seconds

    def took_with_faults(self, what: str) -> float:
        """Also says how much of it was the kernel's, for how many page faults."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        faults = usage.ru_minflt - self._usage.ru_minflt
        kernel_s = usage.ru_stime - self._usage.ru_stime
        seconds = self.took(what)
        each = f", {1e6 * kernel_s / faults:.2f} us each" if faults else ""
        self._report.note(f"{what}: {kernel_s:.3f} s of {seconds:.3f} s in the kernel, {faults} page faults{each}")
        return seconds

    def _start(self) -> None:
        self._mark = perf_counter()
        self._usage = resource.getrusage(resource.RUSAGE_SELF)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--transfers", type=int, default=_TRANSFERS, help="how many (default %(default)s)")
    parser.add_argument("--transport", choices=["auto", "tcp"], default="auto", help="auto is shm on one machine")
    parser.add_argument("--arena-bytes", type=int, default=1 << 30, help="of the start that is timed")
    Report.add_flags(parser)
    args = parser.parse_args()
    report = Report("soak", f"{args.transfers:,} transfers between two messengers, and the start of an arena")
    with tempfile.TemporaryDirectory(prefix="mm-soak-", dir="/tmp") as folder:
        uvloop.run(_measure(Path(folder), args, report))
    report.finish(args)


async def _measure(folder: Path, args: argparse.Namespace, report: Report) -> None:
    await start(folder, args.arena_bytes, report)
    soak = Soak(folder, args.transport)
    per_s = await soak.run(args.transfers)
    _report_soak(soak, args.transfers, per_s, args.transport, report)


if __name__ == "__main__":
    main()
