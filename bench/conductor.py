"""How fast a conductor decides: `python -m bench.conductor`.

Placing is measured on a ConductorCore, from the decoded request to the placement, in processor time of one core, with
every instance reporting a busy load twice a second: half of the instances prefill, half decode, each on a node of its
own. Prompts have 256 blocks: half are new, a sixth share 64 blocks that every tenth node holds, and a third continue a
prompt of which those nodes hold three quarters.

Prefix matching is measured beside Dynamo's RadixTree (ai-dynamo-runtime, in an environment of its own) on the same
chains and holders, in turn and in processor time; the depths found are compared too. Its insertion takes JSON, which is
what it offers.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import process_time
from typing import Final

from bench.report import Report
from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_model import LinearCost
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Load, Member, ModelCard, Role
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.kvcache import KvSnapshot
from mooncake_proto.serving import Placement, Schedule

BLOCKS: Final = 256
BLOCK_TOKENS: Final = 512
SHARED_BLOCKS: Final = 64
DYNAMO: Final = "ai-dynamo-runtime==1.6.1"
LIFE: Final = Incarnation("life")
CARD: Final = ModelCard(
    name="m",
    fingerprint="f",
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_TOKENS * 327_680,
    max_context_tokens=1 << 20,
)
COST: Final = LinearCost(
    prefill_base_s=0.07,
    prefill_token_s=1.15e-4,
    cached_token_s=2.6e-6,
    step_base_s=0.0225,
    step_sequence_s=1.1e-4,
    step_context_token_s=2.9e-8,
    transfer_base_s=0.001,
    transfer_bytes_per_s=87e9,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.conductor", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests, under a minute")
    parser.add_argument("--no-dynamo", action="store_true", help="leave the other index out; nothing is installed")
    Report.add_flags(parser)
    args = parser.parse_args()
    report = Report("conductor", f"placements of prompts of {BLOCKS} blocks; prefix index")
    requests = 1_000 if args.quick else 4_000
    for instances in (10, 100, 1_000):
        _measure_placing(report, instances, requests, Scheduling())
    for kind in (PlacementKind.KVCACHE_CENTRIC, PlacementKind.LOCAL):
        _measure_placing(report, 100, requests, Scheduling(placement=kind))
    for admission in (AdmissionKind.PREDICTIVE, AdmissionKind.HOLD):
        _measure_placing(report, 100, requests, Scheduling(admission=Admission(kind=admission)))
    python = None if args.no_dynamo else _dynamo_python(report)
    for blocks in (100, 1_000):
        _measure_index(report, blocks, rounds=5 if args.quick else 25, python=python)
    report.finish(args)


# --- placing ----------------------------------------------------------------------------------------------------------


class Fleet:
    """A core that knows *instances* workers, which report in turn as if each did twice a second."""

    def __init__(self, instances: int, scheduling: Scheduling) -> None:
        self._draw = random.Random(1)
        self._now_s = 0.0
        self.core = ConductorCore(
            incarnation=Incarnation("conductor"),
            peers=PeerTable(suspect_after_s=1e6, dead_after_s=2e6, forget_after_s=3e6),
            index=PrefixIndex(max_entries=10_000_000),
            cost=COST,
            objectives=Objectives(ttft_s=1e6, tbt_s=1.0),
            started_s=0.0,
            scheduling=scheduling,
        )
        self._beats: list[tuple[InstanceId, Role]] = []
        for number in range(instances):
            node = NodeId(f"node{number}")
            role = Role.PREFILL if number % 2 == 0 else Role.DECODE
            self._enter(Role.MESSENGER, f"messenger{number}", node)
            self._enter(role, f"{role.value}{number}", node)
        self._prompts = self._fill(instances)

    def _enter(self, role: Role, name: str, node: NodeId) -> None:
        card = None if role is Role.MESSENGER else CARD
        member = Member(
            role=role,
            instance_id=InstanceId(name),
            node_id=node,
            incarnation=LIFE,
            endpoint=f"ipc://{name}",
            model=card,
        )
        self.core.register(member, Load(), 0.0)
        self._beats.append((member.instance_id, role))
        self._beat(member.instance_id, role)

    def _fill(self, instances: int) -> list[list[BlockKey]]:
        """What every tenth node holds: the shared prefix, and three quarters of four prompts. Returns the prompts."""
        shared = self._keys(SHARED_BLOCKS)
        prompts = []
        for number in range(instances):
            if number % 10:
                continue
            own = [shared + self._keys(BLOCKS - SHARED_BLOCKS) for _ in range(4)]
            prompts += own
            held = dict.fromkeys(key for keys in own for key in keys[: BLOCKS * 3 // 4])
            node = NodeId(f"node{number}")
            self.core.kv_snapshot(KvSnapshot(node_id=node, incarnation=LIFE, seq=0, keys=join_keys(list(held))))
        return prompts

    def _keys(self, n: int) -> list[BlockKey]:
        return [BlockKey(self._draw.randbytes(16)) for _ in range(n)]

    def _beat(self, name: InstanceId, role: Role) -> None:
        draw = self._draw
        if role is Role.MESSENGER:
            load = Load(blocks_total=6_000, blocks_free=1_000, blocks_evictable=4_500)
        elif role is Role.PREFILL:
            prompts = tuple((draw.randrange(1_000, 20_000), 0) for _ in range(draw.randrange(6)))
            load = Load(queued_jobs=len(prompts), queued_prompts=prompts)
        else:
            sequences = tuple((draw.randrange(1_000, 20_000), draw.randrange(300)) for _ in range(40))
            tokens = sum(tokens for tokens, _ in sequences)
            load = Load(running_jobs=40, running_tokens=tokens, sequences=sequences, step_s=0.05, decoded_tokens=300.0)
        self.core.heartbeat(name, LIFE, load, self._now_s)

    def requests(self, n: int) -> list[Schedule]:
        """A third continue a known prompt, a sixth share the prefix, half are new."""
        made = []
        for number in range(n):
            keys = self._draw.choice(self._prompts)
            if number % 6 >= 3:
                keys = self._keys(BLOCKS)
            elif number % 6 == 2:
                keys = keys[:SHARED_BLOCKS] + self._keys(BLOCKS - SHARED_BLOCKS)
            made.append(
                Schedule(
                    job_id=JobId(f"r{number}"),
                    model="m",
                    prompt_tokens=BLOCKS * BLOCK_TOKENS,
                    max_new_tokens=256,
                    keys=join_keys(keys),
                )
            )
        return made

    def run(self, requests: Sequence[Schedule], rate_per_s: float) -> list[float]:
        """Processor seconds of each placement when requests come at *rate_per_s*; the beats between are not counted."""
        beats_per_request = 2 * len(self._beats) / rate_per_s
        due, at, times = 0.0, 0, []
        for request in requests:
            self._now_s += 1.0 / rate_per_s
            due += beats_per_request
            while due >= 1.0:
                self._beat(*self._beats[at % len(self._beats)])
                at, due = at + 1, due - 1.0
            started_s = process_time()
            result = self.core.schedule(request, self._now_s)
            times.append(process_time() - started_s)
            if not isinstance(result, Placement):
                raise RuntimeError(f"the bench meant this to be placed: {result.reason}")
        return times


def _measure_placing(report: Report, instances: int, requests: int, scheduling: Scheduling) -> None:
    fleet = Fleet(instances, scheduling)
    rate_per_s = max(20.0, instances * 0.5)
    fleet.run(fleet.requests(100), rate_per_s)
    work = fleet.requests(requests)
    gc.collect()
    gc.freeze()
    times = fleet.run(work, rate_per_s)
    gc.unfreeze()
    per_s = len(times) / sum(times)
    p99_ms = 1e3 * quantiles(times, n=100)[98]
    name = f"{instances:,} instances, {scheduling.placement.value}, {scheduling.admission.kind.value}"
    rate_aim, tail_aim = (instances == size and scheduling == Scheduling() for size in (100, 1_000))
    report.row(
        f"{name}: placements",
        per_s,
        "1/s",
        n=len(times),
        aim="≥ 2,000/s" if rate_aim else "",
        met=per_s >= 2_000 if rate_aim else None,
    )
    report.row(f"{name}: p50", 1e3 * median(times), "ms", n=len(times))
    report.row(
        f"{name}: p99",
        p99_ms,
        "ms",
        n=len(times),
        aim="≤ 5 ms" if tail_aim else "",
        met=p99_ms <= 5 if tail_aim else None,
    )


# --- the index --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Chains:
    """200 chains of hashes, half of each shared, and who holds how much of which: (worker, chain, depth)."""

    chains: list[list[int]]
    holders: list[tuple[int, int, int]]


def _chains(blocks: int) -> Chains:
    draw = random.Random(2)
    shared = [draw.getrandbits(63) for _ in range(blocks // 2)]
    chains = [shared + [draw.getrandbits(63) for _ in range(blocks - len(shared))] for _ in range(200)]
    return Chains(chains=chains, holders=[(number % 8, number, blocks) for number in range(len(chains))])


def _measure_index(report: Report, blocks: int, *, rounds: int, python: Path | None) -> None:
    made = _chains(blocks)
    keys = [[BlockKey(value.to_bytes(16, "little")) for value in chain] for chain in made.chains]
    index = PrefixIndex(max_entries=10_000_000)
    nodes = [NodeId(str(worker)) for worker in range(8)]
    started_s = process_time()
    for worker, chain, depth in made.holders:
        index.apply_all_stored(nodes[worker], keys[chain][:depth])
    insert_s = (process_time() - started_s) / len(made.holders)
    first_s, second_s = _timed_round(index, keys), _timed_round(index, keys)
    again_s: list[float] = []
    other_s: list[float] = []
    with ExitStack() as processes:
        other = None if python is None else processes.enter_context(Dynamo.started(python, made))
        if other is not None and other.matches != [dict(index.prefix_blocks(chain)) for chain in keys]:
            raise RuntimeError("the two indexes disagree about who holds what")
        for _ in range(rounds):  # in turn, so that whatever else the machine does hits both
            again_s.append(_timed_round(index, keys))
            if other is not None:
                other_s.append(other.timed_round())
    other_match_s = median(other_s) if other_s else None
    report.row(
        f"match {blocks:,} blocks, asked for before",
        1e6 * median(again_s),
        "µs",
        baseline=None if other_match_s is None else 1e6 * other_match_s,
        aim="≤ 0.25 of Dynamo" if other_match_s else "",
        met=None if other_match_s is None else median(again_s) <= 0.25 * other_match_s,
        spread=(1e6 * min(again_s), 1e6 * max(again_s)),
    )
    baseline_us = None if other_match_s is None else 1e6 * other_match_s
    report.row(f"match {blocks:,} blocks, first time", 1e6 * first_s, "µs", baseline=baseline_us)
    report.row(f"match {blocks:,} blocks, second time: remembered", 1e6 * second_s, "µs", baseline=baseline_us)
    report.row(
        f"insert {blocks:,} blocks", 1e6 * insert_s, "µs", baseline=None if other is None else 1e6 * other.insert_s
    )


def _timed_round(index: PrefixIndex, chains: Sequence[Sequence[BlockKey]]) -> float:
    started_s = process_time()
    for chain in chains:
        index.prefix_blocks(chain)
    return (process_time() - started_s) / len(chains)


def _dynamo_python(report: Report) -> Path | None:
    """The interpreter of an environment with Dynamo's index, made once; None, with a note, where it cannot be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "mooncake-mesh" / "peers" / "dynamo"
    python = home / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run((sys.executable, "-m", "venv", str(home)), check=True, capture_output=True)
        probe = subprocess.run([python, "-c", "import dynamo._core"], check=False, capture_output=True)
        if probe.returncode:
            subprocess.run(
                (python, "-m", "pip", "install", "--quiet", "--no-deps", DYNAMO),
                check=True,
                capture_output=True,
                timeout=600,
            )
    except (OSError, subprocess.SubprocessError) as error:
        report.note(f"Dynamo's RadixTree is not here: {error}")
        return None
    return python


class Dynamo:
    """Its index, filled, in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]", made: Chains) -> None:
        self._process = process
        answer = json.loads(self._ask(json.dumps({"chains": made.chains, "holders": made.holders})))
        self.insert_s: float = answer["insert_s"]
        self.matches: list[dict[str, int]] = answer["matches"]

    @classmethod
    @contextmanager
    def started(cls, python: Path, made: Chains) -> Iterator["Dynamo"]:
        """For the length of the block."""
        command = [python, Path(__file__).with_name("conductor_dynamo.py")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield cls(process, made)  # its end of input is its end

    def timed_round(self) -> float:
        """Seconds of a match, on average over all chains."""
        return float(self._ask("round"))

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


if __name__ == "__main__":
    main()
