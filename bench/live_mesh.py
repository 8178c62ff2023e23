"""A live mesh as the simulator needs to know it: what it is, and what its work was measured to take."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.live_work import as_simulated
from bench.mesh import LocalMesh
from bench.nodes import NodeKind
from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RunResult
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.loadtest.outcomes import LoadObjectives, RequestResult
from mooncake_mesh.loadtest.workloads import LoadRequest
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_fit import PolynomialCost
from mooncake_mesh.policy.cost_profile import DEFAULT_KIND, load_kinds
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.queue_order import QueueRules
from mooncake_mesh.policy.views import Objectives

_PROFILE: Final = ("--longest-prompt-tokens=2048", "--largest-batch=8", "--repeats=2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A mesh as the simulator needs to know it. ``pool_blocks`` are those of each of its two nodes."""

    cost: PolynomialCost
    block_tokens: int
    block_bytes: int
    pool_blocks: int
    max_batch: int


def measure(mesh: LocalMesh, profile: Path) -> Measured:
    """What *mesh* is and what its work takes; *profile* is written. Raises RuntimeError."""
    command = [sys.executable, "-m", "mooncake_mesh", "profile", f"--conductor={mesh.conductor}",
               f"--gateway={mesh.sdk}", f"--output={profile}", *_PROFILE]  # fmt: skip
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise RuntimeError("the mesh could not be measured")
    members = _members(mesh)
    decode = next(m for m in members if m["member"]["role"] == "decode")
    card = decode["member"]["model"]
    return Measured(
        cost=load_kinds(profile.read_text())[DEFAULT_KIND],
        block_tokens=card["block_tokens"],
        block_bytes=card["block_bytes"],
        pool_blocks=next(m["load"]["blocks_total"] for m in members if m["member"]["role"] == "messenger"),
        max_batch=decode["load"]["max_batch"],
    )


def _members(mesh: LocalMesh) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "mooncake_mesh", "status", "--json", f"--conductor={mesh.conductor}"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    members: list[dict[str, Any]] = json.loads(answer.stdout)["cluster"]["members"]
    return members


def simulated(
    requests: Sequence[LoadRequest], results: Sequence[RequestResult], measured: Measured, objectives: LoadObjectives
) -> RunResult:
    """The requests of the live run, at the times when they were sent, on a mesh that is as *measured*."""
    work = as_simulated(requests, [result.sent_s for result in results], measured.block_tokens)
    return simulate(work, mesh_setup(measured, objectives, max(request.output_tokens for request in requests)))


def mesh_setup(measured: Measured, objectives: LoadObjectives, max_new_tokens: int) -> MeshSetup:
    """`mooncake up --nodes=2`. A prompt is one chunk: the profile's times are those of whole prompts."""
    return MeshSetup(
        prefill=1,
        decode=1,
        kind=node_kind(measured),
        objectives=Objectives(ttft_s=objectives.ttft_s, tbt_s=objectives.tbt_s),
        scheduling=Scheduling(
            placement=PlacementKind.ADAPTIVE,
            replication_share=0.0,  # there is no other prefill node
            admission=Admission(kind=AdmissionKind.HOLD),
        ),
        queue_rules=QueueRules(),
        max_batch=measured.max_batch,
        max_new_tokens=max_new_tokens,
        block_tokens=measured.block_tokens,
        prefill_blocks=measured.pool_blocks,
        decode_blocks=measured.pool_blocks,
        decode_shares=True,
    )


def node_kind(measured: Measured) -> NodeKind:
    """The measured costs as a kind of node; KV is loaded while it is computed behind, at no cost of its own."""
    cost = measured.cost
    pool_tokens = measured.pool_blocks * measured.block_tokens
    return NodeKind(
        name="measured",
        kv_token_bytes=measured.block_bytes // measured.block_tokens,
        prefill_base_s=cost.prefill_base_s,
        prefill_token_s=cost.prefill_token_s,
        prefill_pair_s=cost.prefill_pair_s,
        prefill_pad_tokens=0,
        cached_token_s=cost.cached_token_s,
        weights_s=0.0,
        step_base_s=cost.step_base_s,
        step_sequence_s=cost.step_sequence_s,
        step_context_token_s=cost.step_context_token_s,
        load_bytes_per_s=1e12,
        network_bytes_per_s=1 / cost.transfer_byte_s if cost.transfer_byte_s else 1e12,
        vram_kv_tokens=pool_tokens,
        dram_kv_tokens=pool_tokens,
    )
