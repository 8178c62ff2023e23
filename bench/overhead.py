"""What the mesh itself adds: `python -m bench.overhead`.

64 concurrent streams run against a whole mesh (six processes) whose fake engine takes a fixed time for each prefill and
each decode step. The baseline is that engine alone, called in a loop in this process with the same work; for the TTFT,
the arrivals that were measured are replayed through an ideal prefill instance that serves one prompt after the other
and costs nothing else. What is left is ours: HTTP, scheduling, KV transfer, tokens.

The second part runs thousands of short requests and watches the memory of every process.
"""

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from bench.load import Connection, StreamTimes
from bench.mesh import LocalMesh, local_mesh
from bench.report import Report
from mooncake_mesh.engine.api import DecodeSlot, PrefillChunk, SampleRequest
from mooncake_mesh.engine.fake import FakeConfig, FakeEngine, FakeTiming
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_proto.serving import Sampling

PREFILL_S = 0.002
STEP_S = 0.040
STREAMS = 64
TOKENS = 64
PROMPT_TOKENS = 80
PROMPT = "The overhead of a system is what it adds to the work it was asked to do. "


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, under a minute")
    Report.add_flags(parser)
    args = parser.parse_args()
    rounds, short_requests = (3, 1_000) if args.quick else (8, 10_000)
    flags = [
        "--engine", "fake",
        "--arena-bytes", "256MiB",
        "--fake-prefill-s-base", str(PREFILL_S),
        "--fake-decode-s-base", str(STEP_S),
    ]  # fmt: skip
    report = Report("overhead", f"{STREAMS} streams, prefill {PREFILL_S * 1e3:g} ms, step {STEP_S * 1e3:g} ms")
    alone = _engine_alone()
    with local_mesh(flags) as mesh:
        asyncio.run(_measure_streams(mesh, rounds, alone, report))
    with local_mesh(["--engine", "fake", "--arena-bytes", "8MiB"]) as mesh:
        asyncio.run(_measure_memory(mesh, short_requests, report))
    report.finish(args)


# --- the engine alone -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAlone:
    """Median seconds of one prefill of one prompt, and of one decode step of STREAMS sequences."""

    prefill_s: float
    step_s: float


def _engine_alone() -> EngineAlone:
    layout = KvLayout(layers=2, kv_heads=2, head_dim=8, dtype=KvDtype.BFLOAT16, block_tokens=16)
    timing = FakeTiming(prefill_s_base=PREFILL_S, decode_s_base=STEP_S)
    engine = FakeEngine(FakeConfig(layout=layout, timing=timing))
    n_blocks = layout.blocks_for(PROMPT_TOKENS + TOKENS)
    engine.bind(memoryview(bytearray(STREAMS * n_blocks * layout.block_bytes)))
    tokens = np.arange(PROMPT_TOKENS, dtype=np.int32)
    samples = [SampleRequest(sampling=Sampling(), position=0, history=tokens) for _ in range(STREAMS)]
    blocks = [range(i * n_blocks, (i + 1) * n_blocks) for i in range(STREAMS)]
    prefills = []
    for i in range(STREAMS):
        chunk = PrefillChunk(sequence=str(i), tokens=tokens, start=0, blocks=blocks[i], sample=samples[i])
        prefills.append(_timed(partial(engine.prefill, chunk, lambda _: None)))
    steps = []
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS):
        batch = [
            DecodeSlot(sequence=str(i), token=65, position=position, blocks=blocks[i], sample=samples[i])
            for i in range(STREAMS)
        ]
        steps.append(_timed(partial(engine.decode, batch)))
    return EngineAlone(prefill_s=median(prefills), step_s=median(steps))


def _timed(work: Callable[[], object]) -> float:
    began_s = perf_counter()
    work()
    return perf_counter() - began_s


# --- streams ----------------------------------------------------------------------------------------------------------


async def _measure_streams(mesh: LocalMesh, rounds: int, alone: EngineAlone, report: Report) -> None:
    await _run_streams(mesh, 1)
    cpu_before = _cpu_s(mesh)
    streams = await _run_streams(mesh, rounds)
    cpu_after = _cpu_s(mesh)
    good = [stream for stream in streams if not stream.error]
    report.note(f"{len(good)} of {len(streams)} streams ended well")
    added_ttft_ms = [1e3 * added for added in _added_ttfts_s(good, alone.prefill_s)]
    per_token_ms = [1e3 * (_interval_s(stream) - alone.step_s) for stream in good]
    tokens = sum(len(stream.tokens_s) for stream in good)
    report.row("added TTFT p50", median(added_ttft_ms), "ms", aim="< 3", met=median(added_ttft_ms) < 3, n=len(good))
    report.row("added TTFT p99", quantiles(added_ttft_ms, n=100)[98], "ms", n=len(good))
    report.row(
        "added time per token p50",
        median(per_token_ms),
        "ms",
        aim="< 0.3",
        met=median(per_token_ms) < 0.3,
        n=len(good),
        baseline=1e3 * alone.step_s,
    )
    report.row("added time per token p99", quantiles(per_token_ms, n=100)[98], "ms", n=len(good))
    for name in sorted(cpu_after):
        report.row(
            f"CPU of {name} per 1,000 tokens", 1e3 * (cpu_after[name] - cpu_before[name]) / tokens, "s", n=tokens
        )


async def _run_streams(mesh: LocalMesh, rounds: int) -> list[StreamTimes]:
    """STREAMS clients, each with *rounds* requests one after the other, starting spread over one request's life."""
    spread = random.Random(1)
    life_s = TOKENS * STEP_S

    async def client(number: int) -> list[StreamTimes]:
        connection = Connection(mesh.host, mesh.port)
        await asyncio.sleep(spread.random() * life_s)
        times = []
        for turn in range(rounds):
            prompt = f"{number} {turn} {PROMPT}"
            body = {"model": mesh.model, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "seed": number}
            times.append(await connection.stream(body))
            await asyncio.sleep(spread.random() * 0.2)
        await connection.close()
        return times

    async with asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(client(number)) for number in range(STREAMS)]
    return [times for task in tasks for times in task.result()]


def _added_ttfts_s(streams: Sequence[StreamTimes], prefill_s: float) -> list[float]:
    """Measured TTFT less that of an ideal instance: first come, first served, *prefill_s* each."""
    free_s = 0.0
    added = []
    for stream in sorted(streams, key=lambda stream: stream.sent_s):
        free_s = max(free_s, stream.sent_s) + prefill_s
        added.append(stream.tokens_s[0] - free_s)
    return added


def _interval_s(stream: StreamTimes) -> float:
    """Mean time between tokens, from the second on: the first waits for the running step to end."""
    return (stream.tokens_s[-1] - stream.tokens_s[1]) / (len(stream.tokens_s) - 2)


def _cpu_s(mesh: LocalMesh) -> dict[str, float]:
    times = {name: process.cpu_times() for name, process in mesh.processes.items()}
    return {name: time.user + time.system for name, time in times.items()}


# --- memory -----------------------------------------------------------------------------------------------------------


async def _measure_memory(mesh: LocalMesh, requests: int, report: Report) -> None:
    """Memory of every process at the end, less that after a fifth: the small pool and its books are full by then."""
    warm_up = requests // 5
    await _run_short(mesh, warm_up)
    before = _memory_bytes(mesh)
    started_s = perf_counter()
    await _run_short(mesh, requests - warm_up)
    elapsed_s = perf_counter() - started_s
    after = _memory_bytes(mesh)
    report.row("short requests per second", (requests - warm_up) / elapsed_s, "1/s", n=requests)
    for name in sorted(after):
        grown_mib = (after[name] - before[name]) / 2**20
        report.row(
            f"memory growth of {name} over {requests:,} requests",
            grown_mib,
            "MiB",
            aim="< 2",
            met=grown_mib < 2,
            baseline=before[name] / 2**20,
        )


async def _run_short(mesh: LocalMesh, requests: int) -> None:
    pending = iter(range(requests))

    async def client() -> None:
        connection = Connection(mesh.host, mesh.port)
        for number in pending:
            prompt = f"{number} {PROMPT}"
            times = await connection.stream(
                {"model": mesh.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            )
            if times.error:
                raise RuntimeError(f"request {number} failed: {times.error}")
        await connection.close()

    async with asyncio.TaskGroup() as clients:
        for _ in range(16):
            clients.create_task(client())


def _memory_bytes(mesh: LocalMesh) -> dict[str, int]:
    """Private memory: the arena is shared, and filling it is its purpose."""
    return {name: process.memory_full_info().uss for name, process in mesh.processes.items()}


if __name__ == "__main__":
    main()
