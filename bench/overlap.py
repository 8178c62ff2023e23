"""How much of the KVCache's way to the decode node lies inside the prefill: `python -m bench.overlap`.

A real model prefills prompts; the messenger streams each finished slice (one layer of one chunk) to the decode node.
Measured are the share of the bytes that had landed when the prefill ended, and the time from there until all had. The
baseline is the same transfer without overlap: as many blocks, between the same two messengers over the same transport,
asked for when all of them are there. Both are measured in turns, in one mesh.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from bench.load import Connection
from bench.mesh import LocalMesh, local_mesh
from bench.report import Report
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Ok, StatusQuery, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.transfer import Acquire, Acquired, FinishSend, Release, SendReport, SliceReady, StartSend

LENGTHS = (512, 2048)
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """One prompt: its TTFT, its KV, and how its transfer went. ``after_s`` counts from the end of the prefill."""

    ttft_s: float
    kv_bytes: int
    transport: str
    landed_share: float
    after_s: float
    whole_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts of each length, under a minute")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--transport", default="auto", choices=("auto", "shm", "tcp"))
    Report.add_flags(parser)
    args = parser.parse_args()
    rounds = 2 if args.quick else 7
    report = Report("overlap", f"{args.model}, {args.dtype}, chunks of {args.chunk_tokens} tokens")
    with tempfile.TemporaryDirectory(prefix="mooncake-overlap-") as folder:
        logs, config = Path(folder) / "logs", Path(folder) / "mooncake.toml"
        config.write_text("[conductor]\nttft_slo_s = 600\ntbt_slo_s = 60\n")  # a busy machine is measured all the same
        flags = [
            "--nodes=2",
            f"--config={config}",
            f"--model={args.model}",
            f"--dtype={args.dtype}",
            f"--chunk-tokens={args.chunk_tokens}",
            f"--transport={args.transport}",
            f"--log-dir={logs}",
            "--log-level=info",
            "--log-format=json",
        ]
        with local_mesh(flags) as mesh:
            found = asyncio.run(_measure(mesh, logs, rounds))
    for length, overlaps in found.items():
        _tell(report, length, overlaps)
    report.finish(args)


def _tell(report: Report, length: int, overlaps: Sequence[Overlap]) -> None:
    n = len(overlaps)
    shares = [100 * one.landed_share for one in overlaps]
    after_ms = [1e3 * one.after_s for one in overlaps]
    whole_ms = [1e3 * one.whole_s for one in overlaps]
    ttft_s = [one.ttft_s for one in overlaps]
    share, after, whole = median(shares), median(after_ms), median(whole_ms)
    report.row(
        f"{length} tokens: KV landed when prefill ended",
        share,
        "%",
        aim="> 50",
        met=share > 50,
        n=n,
        spread=(min(shares), max(shares)),
    )
    report.row(
        f"{length} tokens: end of prefill to KV complete",
        after,
        "ms",
        baseline=whole,
        aim="< baseline",
        met=after < whole,
        n=n,
        spread=(min(after_ms), max(after_ms)),
    )
    report.row(f"{length} tokens: time to first token", median(ttft_s), "s", n=n, spread=(min(ttft_s), max(ttft_s)))
    report.note(
        f"{length} tokens have {overlaps[0].kv_bytes / 2**20:.1f} MiB of KV; all of it over {overlaps[0].transport} "
        f"after the prefill took {min(whole_ms):.3g} … {max(whole_ms):.3g} ms (the baseline)"
    )


async def _measure(mesh: LocalMesh, logs: Path, rounds: int) -> dict[int, list[Overlap]]:
    """A first request of each length is thrown away: it pays for memory that is touched for the first time."""
    numbers = random.Random(1)
    found: dict[int, list[Overlap]] = {length: [] for length in LENGTHS}
    async with _Bystander(mesh) as bystander:
        for turn in range(rounds + 1):
            for length in LENGTHS:
                prompt = [int(numbers.random() * 256) for _ in range(length)]  # a new one: nothing of it is cached
                overlap = await _one(mesh, logs, bystander, prompt)
                if turn:
                    found[length].append(overlap)
    return found


async def _one(mesh: LocalMesh, logs: Path, bystander: "_Bystander", prompt: list[int]) -> Overlap:
    before = len(_events(logs / "prefill0.log", "prefill_sent"))
    connection = Connection(mesh.host, mesh.port)
    body: dict[str, object] = {"model": mesh.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    times = await connection.stream(body)
    await connection.close()
    if times.error:
        raise RuntimeError(times.error)
    sent = await _event_after(logs / "prefill0.log", "prefill_sent", before)
    return Overlap(
        ttft_s=times.ttft_s,
        kv_bytes=sent["sent_bytes"],
        transport=sent["transport"],
        landed_share=sent["overlapped_bytes"] / sent["sent_bytes"],
        after_s=sent["tail_s"],
        whole_s=await bystander.transfer(sent["sent_bytes"]),
    )


def _events(log: Path, name: str) -> list[dict[str, Any]]:
    lines = log.read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if f'"event": "{name}"' in line]


async def _event_after(log: Path, name: str, before: int) -> dict[str, Any]:
    """The event behind the first *before* ones; it may come a moment after the answer."""
    deadline_s = monotonic() + TIMEOUT_S
    while len(events := _events(log, name)) <= before:
        if monotonic() > deadline_s:
            raise RuntimeError(f"{log.stem} did not log {name!r} within {TIMEOUT_S:g} s")
        await asyncio.sleep(0.01)
    return events[before]


class _Bystander:
    """Moves blocks between the mesh's two messengers as workers do, but none before all of them are ready."""

    def __init__(self, mesh: LocalMesh) -> None:
        folder = mesh.conductor.rpartition("/")[0]
        self._target = f"{folder}/messenger1.ipc"
        self._sender, self._receiver = RpcClient(f"{folder}/messenger0.ipc"), RpcClient(self._target)
        self._conductor = RpcClient(mesh.conductor)
        self._n = 0

    async def __aenter__(self) -> "_Bystander":
        report = await self._conductor.call(StatusQuery(), StatusReport, timeout_s=TIMEOUT_S)
        cards = [state.member.model for state in report.cluster.members if state.member.model is not None]
        self._block_bytes = cards[0].block_bytes
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in (self._sender, self._receiver, self._conductor):
            client.close()

    async def transfer(self, kv_bytes: int) -> float:
        """Seconds from blocks of *kv_bytes* being ready on node0 to the word that all of them are on node1."""
        self._n += 1
        n_blocks = kv_bytes // self._block_bytes
        transfer_id = TransferId(f"bench.{self._n}")
        source, landing = JobId(f"bench.{self._n}.from"), JobId(f"bench.{self._n}.to")
        await self._sender.call(_acquire(source, n_blocks), Acquired, timeout_s=TIMEOUT_S)
        async with asyncio.TaskGroup() as tasks:
            acquire = _acquire(landing, n_blocks, landing=transfer_id)
            tasks.create_task(self._receiver.call(acquire, Acquired, timeout_s=TIMEOUT_S))
            start = StartSend(
                job_id=source,
                transfer_id=transfer_id,
                target=self._target,
                n_blocks=n_blocks,
                layers=1,
                deadline_s=TIMEOUT_S,
            )
            self._sender.post(start)
            began_s = perf_counter()
            whole = SliceReady(transfer_id=transfer_id, layer=0, n_layers=1, first_block=0, n_blocks=n_blocks)
            self._sender.post(whole)
            await self._sender.call(FinishSend(transfer_id=transfer_id), SendReport, timeout_s=TIMEOUT_S)
            elapsed_s = perf_counter() - began_s
        await self._sender.call(Release(job_id=source), Ok, timeout_s=TIMEOUT_S)
        await self._receiver.call(Release(job_id=landing), Ok, timeout_s=TIMEOUT_S)
        return elapsed_s


def _acquire(job_id: JobId, n_blocks: int, *, landing: TransferId | None = None) -> Acquire:
    return Acquire(
        job_id=job_id,
        instance_id=InstanceId("bench"),
        incarnation=Incarnation("bench"),
        keys=b"",
        n_blocks=n_blocks,
        max_cached_blocks=0,
        landing=landing,
        landing_blocks=n_blocks if landing else 0,
        landing_layers=1 if landing else 0,
    )


if __name__ == "__main__":
    main()
