"""A conductor's core from its configuration: as its process makes it, and again for a recording of it."""

import hashlib
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.conductor.recording import RecordedCore, Recording, about, replayed
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, LoadMeasure, PlacementKind
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_model import CostModel, KindFactors, LinearCost, kind_factors
from mooncake_mesh.policy.cost_profile import DEFAULT_KIND, load_kinds
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.roles import RoleRules
from mooncake_mesh.policy.slo import ServiceLevels
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.ids import Incarnation
from mooncake_proto.serving import Placement, Rejected, Schedule

DEFAULT_COST: Final = LinearCost(
    prefill_base_s=0.01,
    prefill_token_s=0.0012,
    cached_token_s=0.000_002,
    step_base_s=0.03,
    step_sequence_s=0.003,
    step_context_token_s=0.000_005,
    transfer_base_s=0.002,
    transfer_bytes_per_s=2e9,
)
"""Where the instances have not reported speeds of their own yet: a 135 M model on one CPU core (prefill about
800 tokens/s, a decode step of 38 ms at batch 1), KV over loopback TCP. What they measure soon corrects it."""

_FORGET_AFTER_S: Final = 60.0
"""So long at least after its last beat a dead member is still told of; and as long again as it took to be dead."""

_DECIDING: Final = (
    "heartbeat_s", "suspect_after_s", "dead_after_s", "ttft_slo_s", "tbt_slo_s", "ttft_slo_factor", "tbt_slo_factor",
    "placement", "kvcache_balancing_threshold", "replication_share", "admission", "load_measure", "wip_limit",
    "decode_s", "hybrid_decode", "hybrid_step_s", "switch_roles", "switch_roles_after_s", "cost_profile",
    "seed", "index_max_blocks",
)  # fmt: skip
"""The settings that decisions depend on."""


def conductor_core(
    config: ConductorConfig, incarnation: Incarnation, started_s: float, recording: Recording | None = None
) -> ConductorCore:
    """The core of a conductor; what it hears and answers goes into *recording*.

    Raises ConfigError for a cost profile that cannot be used.
    """
    cost, kinds = _cost_models(config.cost_profile)
    given: dict[str, Any] = {
        "incarnation": incarnation,
        "peers": PeerTable(
            suspect_after_s=config.suspect_after_s,
            dead_after_s=config.dead_after_s,
            forget_after_s=max(_FORGET_AFTER_S, 2 * config.dead_after_s),
            look_every_s=config.heartbeat_s,
        ),
        "index": PrefixIndex(max_entries=config.index_max_blocks),
        "cost": cost,
        "kinds": kinds,
        "objectives": Objectives(ttft_s=config.ttft_slo_s, tbt_s=config.tbt_slo_s),
        "started_s": started_s,
        "scheduling": Scheduling(
            placement=config.placement,
            threshold=config.kvcache_balancing_threshold,
            replication_share=config.replication_share,
            admission=Admission(
                kind=config.admission,
                decode_s=config.decode_s,
                wip_limit=config.wip_limit,
                measure=config.load_measure,
            ),
            hybrid_decode=config.hybrid_decode,
            roles=RoleRules.lasting(config.switch_roles_after_s) if config.switch_roles else None,
            hybrid_step_s=config.hybrid_step_s,
        ),
        "seed": config.seed,
        "levels": ServiceLevels(
            ttft_s=config.ttft_slo_s,
            tbt_s=config.tbt_slo_s,
            ttft_factor=config.ttft_slo_factor,
            tbt_factor=config.tbt_slo_factor,
        ),
    }
    return ConductorCore(**given) if recording is None else RecordedCore(recording, **given)


def described(config: ConductorConfig, incarnation: Incarnation, started_s: float) -> dict[str, Any]:
    """The first line of a recording: what a core like this one is made from."""
    settings = {name: getattr(config, name) for name in _DECIDING}
    told = {name: _plain(value) for name, value in settings.items()}
    return {"incarnation": incarnation, "started_s": started_s, "config": told}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A request as the conductor heard of it, and what it answered."""

    now_s: float
    request: Schedule
    answer: Placement | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """``digest`` of all answers, as they are now, and as they were ``recorded``: equal when all was decided alike."""

    digest: str
    recorded: str
    events: int
    decisions: tuple[Decision, ...]


def replay(path: Path) -> Replay:
    """Tell a new core what the one of a recording was told. Raises BadRecording, ConfigError."""
    line = about(path)
    core = conductor_core(_config(line["config"]), Incarnation(line["incarnation"]), line["started_s"])
    answers, recorded, n_events = hashlib.sha256(), hashlib.sha256().hexdigest(), 0
    decisions = []
    for event, answer in replayed(path, core):
        answers.update(repr(answer).encode())
        recorded = event.digest
        n_events += 1
        if isinstance(event.message, Schedule) and isinstance(answer, Placement | Rejected):
            decisions.append(Decision(now_s=event.now_s, request=event.message, answer=answer))
    return Replay(digest=answers.hexdigest(), recorded=recorded, events=n_events, decisions=tuple(decisions))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _config(told: dict[str, Any]) -> ConductorConfig:
    profile = told["cost_profile"]
    return ConductorConfig(
        **{
            **told,
            "placement": PlacementKind(told["placement"]),
            "admission": AdmissionKind(told["admission"]),
            "load_measure": LoadMeasure(told["load_measure"]),
            "hybrid_decode": HybridDecodeKind(told["hybrid_decode"]),
            "cost_profile": None if profile is None else Path(profile),
        }
    )


def _cost_models(profile: Path | None) -> tuple[CostModel, dict[str, KindFactors]]:
    """The model that all are priced by, that of the default kind or else the first, and how the kinds compare with it.

    Raises ConfigError for a profile that cannot be used.
    """
    if profile is None:
        return DEFAULT_COST, {}
    try:
        costs = load_kinds(profile.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{profile}: {error}", path="conductor.cost_profile") from error
    base = costs.get(DEFAULT_KIND) or costs[min(costs)]
    return base, {kind: kind_factors(cost, base) for kind, cost in costs.items()}
