"""Does the simulator say what a live mesh does? `python -m bench.honesty`.

A live mesh with the fake engine, whose work takes known times, serves seeded arrivals while its conductor records.
Then three things are held against each other: the recording, replayed (same digest, twice in one process and in two
with other hash seeds); the placements, of the recording and of the simulator on the recorded arrivals; and the TTFT,
as clients measured it and as the simulator says.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

from bench.load import Connection, StreamTimes
from bench.mesh import local_mesh
from bench.nodes import NodeKind
from bench.report import Report
from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RunResult, quantile
from bench.traces import TraceRequest
from mooncake_mesh.conductor.making import Replay, replay
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_fit import PolynomialCost
from mooncake_mesh.policy.cost_profile import dump_profile
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.ids import BlockKey
from mooncake_proto.serving import Placement

_BLOCK: Final = 16
_BLOCKS: Final = 8_192
_NEW_TOKENS: Final = 12
_PREFILL: Final = 2
_DECODE: Final = 1
_MARGIN_S: Final = 0.8
_LONGEST_WAIT_S: Final = 5.0
_BLOCK_BYTES: Final = _BLOCK * 2 * 2 * 2 * 8 * 4  # K and V, two layers, two heads of eight float32 values
_TTFT_SLO_S: Final = 60.0
_TBT_SLO_S: Final = 2.0

FAKE: Final = NodeKind(
    name="fake",
    kv_token_bytes=_BLOCK_BYTES // _BLOCK,
    prefill_base_s=0.2,
    prefill_token_s=0.002,
    prefill_pair_s=0.0,
    prefill_pad_tokens=0,
    cached_token_s=0.0,
    weights_s=0.0,
    step_base_s=0.04,
    step_sequence_s=0.01,
    step_context_token_s=0.0,
    load_bytes_per_s=1e12,
    network_bytes_per_s=1e9,
    vram_kv_tokens=_BLOCK * _BLOCKS,
    dram_kv_tokens=_BLOCK * _BLOCKS,
)
"""The fake engine's work, long enough for the time that messages take on a busy machine to be little beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A prompt of ``tokens``, no two of which are equally long, ``at_s`` after the start."""

    at_s: float
    tokens: int


def asks(n: int, seed: int) -> list[Ask]:
    """Seeded arrivals that keep the prefill instances busy, at moments when it matters where a prompt goes.

    Where two instances would take equally long, messages and learned factors of a percent decide: such moments are
    left out, since nothing follows from them for a simulator.
    """
    random = Random(seed)
    ends_s = [0.0] * _PREFILL
    at_s = 0.0
    made: list[Ask] = []
    for tokens in random.sample(range(200, 1_900), n):
        waits_s = sorted(max(0.0, end_s - at_s) for end_s in ends_s)
        while made and (waits_s[1] - waits_s[0] < _MARGIN_S or waits_s[0] > _LONGEST_WAIT_S):
            at_s += random.uniform(0.0, 0.1)
            waits_s = sorted(max(0.0, end_s - at_s) for end_s in ends_s)
            if not waits_s[1]:  # everybody is idle: the moment has passed
                at_s = max(made[-1].at_s, at_s - 2.0)
                break
        made.append(Ask(at_s=at_s, tokens=tokens))
        chosen = min(range(_PREFILL), key=lambda i: (max(at_s, ends_s[i]), i))
        ends_s[chosen] = max(at_s, ends_s[chosen]) + FAKE.prefill_s(tokens, 0)
        at_s += random.expovariate(2.0)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run live, replay, simulate; 0 when the measurement was made."""
    parser = argparse.ArgumentParser(prog="python -m bench.honesty", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=40, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    Report.add_flags(parser)
    args = parser.parse_args(argv)
    report = Report("honesty", f"{_PREFILL}P{_DECODE}D of the fake engine, {args.requests} requests")
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "conductor.jsonl"
        live = _live(asks(args.requests, args.seed), Path(folder), recording)
        replays = [replay(recording), replay(recording)]
        elsewhere = [_replayed_elsewhere(recording, seed) for seed in ("1", "2")]
    _compare_digests(report, replays, elsewhere)
    _compare_runs(report, replays[0], live)
    report.finish(args)
    return 0


def _live(work: Sequence[Ask], folder: Path, recording: Path) -> dict[int, StreamTimes]:
    """Serve *work*; the times of each stream by prompt length."""
    profile = folder / "cost.json"
    profile.write_text(dump_profile(_cost()))
    flags = [
        "--engine", "fake", "--prefill", str(_PREFILL), "--decode", str(_DECODE), "--chunk-tokens", "0",
        "--arena-bytes", str(_BLOCKS * _BLOCK_BYTES), "--block-tokens", str(_BLOCK),
        "--fake-prefill-s-base", str(FAKE.prefill_base_s), "--fake-prefill-s-per-token", str(FAKE.prefill_token_s),
        "--fake-decode-s-base", str(FAKE.step_base_s), "--fake-decode-s-per-slot", str(FAKE.step_sequence_s),
    ]  # fmt: skip
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
    with local_mesh(flags, settings) as mesh:
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


def _cost() -> PolynomialCost:
    return PolynomialCost(
        prefill_base_s=FAKE.prefill_base_s,
        prefill_token_s=FAKE.prefill_token_s,
        prefill_pair_s=0.0,
        cached_token_s=0.0,
        step_base_s=FAKE.step_base_s,
        step_sequence_s=FAKE.step_sequence_s,
        step_context_token_s=0.0,
        transfer_base_s=0.0,
        transfer_byte_s=1 / FAKE.network_bytes_per_s,
    )


def simulated(decisions: Replay) -> RunResult:
    """The recorded arrivals on a simulated mesh of the same kind."""
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
        kind=FAKE,
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


def _compare_digests(report: Report, replays: Sequence[Replay], elsewhere: Sequence[str]) -> None:
    recorded = replays[0].recorded
    digests = [found.digest for found in replays] + list(elsewhere)
    same = sum(digest == recorded for digest in digests)
    report.row("replays with the recorded digest (two here, two hash seeds)", same, "of 4", aim="4", met=same == 4)
    report.row("recorded events", replays[0].events, "events")
    report.note(f"digest {recorded}")


def _compare_runs(report: Report, recorded: Replay, live: dict[int, StreamTimes]) -> None:
    result = simulated(recorded)
    pairs = list(zip(recorded.decisions, result.records, strict=True))
    placed = [(d.answer, record) for d, record in pairs if isinstance(d.answer, Placement)]
    for role, same in (
        ("prefill", sum(_number(answer.prefill.instance_id) == _number(record.prefill) for answer, record in placed)),
        ("decode", sum(_number(answer.decode.instance_id) == _number(record.decode) for answer, record in placed)),
    ):
        report.row(f"requests on the same {role} instance", same / len(pairs), "share", aim="1", met=same == len(pairs))
    errors = [times.error for times in live.values() if times.error]
    report.row("failed streams", len(errors), "requests", aim="0", met=not errors)
    answered = [times.ttft_s for times in live.values() if not times.error]
    for q in (0.5, 0.9):
        measured, said = quantile(answered, q), quantile(result.ttfts(), q)
        report.row(f"TTFT P{q * 100:.0f}, simulated (baseline: live)", said, "s", baseline=measured, aim="within 10 %",
                   met=abs(said / measured - 1) <= 0.1, n=len(answered))  # fmt: skip


def _number(name: str) -> int:
    return int(name.removeprefix("prefill").removeprefix("decode"))


if __name__ == "__main__":
    sys.exit(main())
