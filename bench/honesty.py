"""Does the simulator say what a live mesh does? `python -m bench.honesty`.

For each seed, a live mesh with the fake engine, whose work takes known times, serves Poisson arrivals while its
conductor records. Then three things are held against each other: the recording, replayed (same digest, twice in one
process and in two with other hash seeds); the placements, of the recording and of the simulator, which is told when
each request came and how long it is, and nothing else; and the TTFT, as clients measured it and as the simulator says.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

from bench.load import Connection, StreamTimes
from bench.mesh import local_mesh, wait_until_working
from bench.nodes import NodeKind
from bench.report import Report
from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RequestRecord, RunResult, quantile
from bench.traces import TraceRequest
from mooncake_mesh.conductor.making import Replay, replay
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_fit import PolynomialCost
from mooncake_mesh.policy.cost_profile import dump_profile
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Role
from mooncake_proto.ids import BlockKey
from mooncake_proto.serving import Placement, Rejected

_BLOCK: Final = 16
_BLOCKS: Final = 8_192
_NEW_TOKENS: Final = 12
_PREFILL: Final = 2
_DECODE: Final = 2
_LOAD: Final = 0.6
_TRIALS: Final = 16
_TOKENS: Final = range(200, 2_000)
_BLOCK_BYTES: Final = _BLOCK * 2 * 2 * 2 * 8 * 4  # K and V, two layers, two heads of eight float32 values
_TTFT_SLO_S: Final = 60.0
_TBT_SLO_S: Final = 2.0

FAKE: Final = NodeKind(
    name="fake",
    kv_token_bytes=_BLOCK_BYTES // _BLOCK,
    prefill_base_s=0.2,
    prefill_token_s=0.0005,
    prefill_pair_s=0.0,
    prefill_pad_tokens=0,
    cached_token_s=0.0,
    weights_s=0.0,
    step_base_s=0.1,
    step_sequence_s=0.0001,
    step_context_token_s=0.0,
    load_bytes_per_s=1e12,
    network_bytes_per_s=1e9,
    vram_kv_tokens=_BLOCK * _BLOCKS,
    dram_kv_tokens=_BLOCK * _BLOCKS,
)
"""What the fake engine is told to take: long enough for the time that messages take on a busy machine to be little
beside it. A step takes what one sequence takes, and a thousandth more for each other one: batches that differ by no
more than ten are as good as each other to the policy, which goes by reports that are up to half a second old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt of ``tokens``, no two of which are equally long, ``at_s`` after the start."""

    at_s: float
    tokens: int


def asks(n: int, seed: int, *, load: float = _LOAD) -> list[Ask]:
    """Poisson arrivals of prompts of all lengths, which keep the prefill instances busy for *load* of the time."""
    random = Random(seed)
    mean_s = FAKE.prefill_s((_TOKENS.start + _TOKENS.stop) // 2, 0)
    at_s = 0.0
    made = []
    for tokens in random.sample(_TOKENS, n):
        made.append(Ask(at_s=at_s, tokens=tokens))
        at_s += random.expovariate(load * _PREFILL / mean_s)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run live, replay, simulate, for each seed; 0 when the measurements were made."""
    parser = argparse.ArgumentParser(prog="python -m bench.honesty", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="of each seed, two minutes by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="SEED")
    parser.add_argument("--load", type=float, default=_LOAD, metavar="SHARE", help="of what prefill instances can do")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recordings there")
    Report.add_flags(parser)
    args = parser.parse_args(argv)
    report = Report(
        "honesty", f"{_PREFILL}P{_DECODE}D of the fake engine, {args.requests} requests at {args.load:g} load"
    )
    kind = measured_kind()
    report.note(
        f"a prompt takes {1e3 * (kind.prefill_base_s - FAKE.prefill_base_s):.1f} ms more than the engine's time"
    )
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.keep or Path(temporary)
            recording = folder / f"conductor-{seed}.jsonl"
            live = _live(asks(args.requests, seed, load=args.load), kind, folder, recording)
            replays = [replay(recording), replay(recording)]
            elsewhere = [_replayed_elsewhere(recording, hash_seed) for hash_seed in ("1", "2")]
        _compare_digests(report, seed, replays, elsewhere)
        _compare_runs(report, seed, replays[0], simulated(replays[0], kind), live)
    report.finish(args)
    return 0


def measured_kind() -> NodeKind:
    """What the fake engine's work takes in a mesh on this machine, as `mooncake profile` finds out for a real engine:
    prompts that wait for each other have their first tokens later by what handling them takes."""
    work = [Ask(at_s=0.0, tokens=_TOKENS.start + i) for i in range(_TRIALS)]
    with local_mesh(_flags(1, 1), {"MOONCAKE_PREFILL_QUEUE_ORDER": "fcfs"}) as mesh:
        streams = asyncio.run(_clients(mesh.host, mesh.port, mesh.model, work))
    firsts_s = sorted(times.tokens_s[0] for times in streams.values())
    each_s = (firsts_s[-1] - firsts_s[0]) / (_TRIALS - 1)
    nominal_s = FAKE.prefill_s(_TOKENS.start + _TRIALS // 2, 0)
    return replace(FAKE, prefill_base_s=FAKE.prefill_base_s + max(0.0, each_s - nominal_s))


def _flags(prefill: int, decode: int) -> list[str]:
    return [
        "--nodes", "2", "--engine", "fake", "--prefill", str(prefill), "--decode", str(decode), "--chunk-tokens", "0",
        "--arena-bytes", str(_BLOCKS * _BLOCK_BYTES), "--block-tokens", str(_BLOCK),
        "--fake-prefill-s-base", str(FAKE.prefill_base_s), "--fake-prefill-s-per-token", str(FAKE.prefill_token_s),
        "--fake-decode-s-base", str(FAKE.step_base_s), "--fake-decode-s-per-slot", str(FAKE.step_sequence_s),
    ]  # fmt: skip


def _live(work: Sequence[Ask], kind: NodeKind, folder: Path, recording: Path) -> dict[int, StreamTimes]:
    """Serve *work*; the times of each stream by prompt length."""
    profile = folder / "cost.json"
    profile.write_text(dump_profile(_cost(kind)))
    settings = {
        "MOONCAKE_CONDUCTOR_RECORD": str(recording),
        "MOONCAKE_CONDUCTOR_COST_PROFILE": str(profile),
        "MOONCAKE_CONDUCTOR_PLACEMENT": PlacementKind.KVCACHE_CENTRIC.value,
        "MOONCAKE_CONDUCTOR_ADMISSION": AdmissionKind.BASELINE.value,
        "MOONCAKE_CONDUCTOR_REPLICATION_SHARE": "0",
        "MOONCAKE_CONDUCTOR_TTFT_SLO_S": str(_TTFT_SLO_S),
        "MOONCAKE_CONDUCTOR_TBT_SLO_S": str(_TBT_SLO_S),
        "MOONCAKE_PREFILL_QUEUE_ORDER": "fcfs",
    }
    with local_mesh(_flags(_PREFILL, _DECODE), settings) as mesh:
        wait_until_working(mesh, [f"prefill{i}" for i in range(_PREFILL)] + [f"decode{i}" for i in range(_DECODE)])
        return asyncio.run(_clients(mesh.host, mesh.port, mesh.model, work))


async def _clients(host: str, port: int, model: str, work: Sequence[Ask]) -> dict[int, StreamTimes]:
    started_s = perf_counter()

    async def client(ask: Ask) -> tuple[int, StreamTimes]:
        await asyncio.sleep(started_s + ask.at_s - perf_counter())
        connection = Connection(host, port)
        text = f"{ask.tokens:05d} ".ljust(ask.tokens, "x")  # a token is a byte; no two prompts share a block
        times = await connection.stream(
            {"model": model, "prompt": text, "max_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        )
        await connection.close()
        return ask.tokens, times

    return dict(await asyncio.gather(*map(client, work)))


def _cost(kind: NodeKind) -> PolynomialCost:
    return PolynomialCost(
        prefill_base_s=kind.prefill_base_s,
        prefill_token_s=kind.prefill_token_s,
        prefill_pair_s=0.0,
        cached_token_s=0.0,
        step_base_s=kind.step_base_s,
        step_sequence_s=kind.step_sequence_s,
        step_context_token_s=0.0,
        transfer_base_s=0.0,
        transfer_byte_s=1 / kind.network_bytes_per_s,
    )


def simulated(decisions: Replay, kind: NodeKind) -> RunResult:
    """The recorded arrivals on a simulated mesh of *kind*."""
    work = []
    first_s = decisions.decisions[0].now_s
    for number, decision in enumerate(decisions.decisions):
        tokens = decision.request.prompt_tokens
        keys = tuple(BlockKey(number.to_bytes(8, "big") + i.to_bytes(8, "big")) for i in range(-(-tokens // _BLOCK)))
        work.append(
            TraceRequest(arrival_s=decision.now_s - first_s, input_tokens=tokens, output_tokens=_NEW_TOKENS, keys=keys)
        )
    setup = MeshSetup(
        prefill=_PREFILL,
        decode=_DECODE,
        kind=kind,
        block_tokens=_BLOCK,
        max_new_tokens=_NEW_TOKENS,
        objectives=Objectives(ttft_s=_TTFT_SLO_S, tbt_s=_TBT_SLO_S),
        scheduling=Scheduling(
            placement=PlacementKind.KVCACHE_CENTRIC,
            replication_share=0.0,
            admission=Admission(kind=AdmissionKind.BASELINE),
        ),
    )
    return simulate(work, setup)


def _replayed_elsewhere(recording: Path, hash_seed: str) -> str:
    command = [sys.executable, "-m", "bench.replay", str(recording)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.split(" ")[0]


def _compare_digests(report: Report, seed: int, replays: Sequence[Replay], elsewhere: Sequence[str]) -> None:
    recorded = replays[0].recorded
    digests = [found.digest for found in replays] + list(elsewhere)
    same, name = sum(digest == recorded for digest in digests), "replays with the recorded digest"
    report.row(f"seed {seed}: {name} (two here, two hash seeds)", same, "of 4", aim="4", met=same == 4)
    report.row(f"seed {seed}: recorded events", replays[0].events, "events")
    report.note(f"seed {seed}: digest {recorded}")


def _compare_runs(report: Report, seed: int, recorded: Replay, result: RunResult, live: dict[int, StreamTimes]) -> None:
    pairs = [(d.answer, record) for d, record in zip(recorded.decisions, result.records, strict=True)]
    n = len(pairs)
    for role in (Role.PREFILL, Role.DECODE):
        same = sum(_live_place(answer, role) == _simulated_place(record, role) for answer, record in pairs)
        name = f"seed {seed}: requests on the same {role.value} instance"
        report.row(name, same, f"of {n}", aim=f"{n}", met=same == n)
    errors = [times.error for times in live.values() if times.error]
    report.row(f"seed {seed}: failed streams", len(errors), "requests", aim="0", met=not errors)
    answered = [times.ttft_s for times in live.values() if not times.error]
    for q in (0.5, 0.9):
        measured, said = quantile(answered, q), quantile(result.ttfts(), q)
        report.row(f"seed {seed}: TTFT P{q * 100:.0f}, simulated (baseline: live)", said, "s", baseline=measured,
                   aim="within 10 %", met=abs(said / measured - 1) <= 0.1, n=len(answered))  # fmt: skip


def _live_place(answer: Placement | Rejected, role: Role) -> int | None:
    """The number of the instance; None for a request that was refused."""
    if isinstance(answer, Rejected):
        return None
    worker = answer.prefill if role is Role.PREFILL else answer.decode
    return int(worker.instance_id.removeprefix(role.value))


def _simulated_place(record: RequestRecord, role: Role) -> int | None:
    name = record.prefill if role is Role.PREFILL else record.decode
    return int(name.removeprefix(role.value)) if name else None


if __name__ == "__main__":
    sys.exit(main())
