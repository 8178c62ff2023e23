"""What the page shows, as one JSON object, from what the conductor reports. Pure.

Names of tenants are left out, and so are the decisions on other tenants' requests.
"""

import dataclasses
from collections.abc import Sequence

from mooncake_mesh.gateway.openai_responses import Json
from mooncake_proto.control import MemberState, ModelCard, Role, StatusReport
from mooncake_proto.decisions import Decision, DecisionsReport

_WORKERS = (Role.GATEWAY, Role.PREFILL, Role.STAGE, Role.DECODE)


def page_state(
    report: StatusReport | None,
    decisions: DecisionsReport | None,
    *,
    models: Sequence[ModelCard],
    tenant: str,
) -> Json:
    """``mesh`` is null while the conductor does not answer; ``decisions`` are those after the asked number.

    ``decided`` is the number to ask after next time, null where nothing was decided since the last.
    """
    fresh = decisions.decisions if decisions is not None else ()
    return {
        "models": sorted({model.name for model in models}),
        "conductor": decisions.conductor if decisions is not None else None,
        "mesh": None if report is None else _mesh(report),
        "decisions": [_decision(one) for one in fresh if one.tenant == tenant],
        "decided": fresh[-1].number if fresh else None,
    }


def _mesh(report: StatusReport) -> Json:
    states = sorted(report.cluster.members, key=lambda state: state.member.instance_id)
    return {
        "healthy": report.healthy,
        "reasons": report.reasons,
        "uptime_s": report.uptime_s,
        "placed": report.placed_total,
        "rejected": report.rejected_total,
        "instances": [_instance(state) for role in _WORKERS for state in states if state.member.role is role],
        "pool": [
            _node(state, report.indexed_blocks.get(state.member.node_id, 0))
            for state in states
            if state.member.role is Role.MESSENGER
        ],
        "classes": [dataclasses.asdict(one) for one in report.classes],
    }


def _instance(state: MemberState) -> Json:
    member, load = state.member, state.load
    return {
        "id": member.instance_id,
        "role": member.role.value,
        "node": member.node_id,
        "health": state.health.value,
        "takes_work": state.takes_work,
        "draining": load.draining,
        "last_beat_s": state.last_beat_s,
        "queued_jobs": load.queued_jobs,
        "queued_tokens": load.queued_tokens,
        "running_jobs": load.running_jobs,
        "running_tokens": load.running_tokens,
        "max_batch": load.max_batch,
        "step_s": load.step_s,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
    }


def _node(state: MemberState, indexed_blocks: int) -> Json:
    load = state.load
    return {
        "id": state.member.instance_id,
        "node": state.member.node_id,
        "health": state.health.value,
        "blocks": load.blocks_total,
        "free": load.blocks_free,
        "cached": load.blocks_cached,
        "evictable": load.blocks_evictable,
        "ssd_blocks": load.ssd_blocks,
        "ssd_slots": load.ssd_slots,
        "ssd_faults": load.ssd_faults,
        "indexed": indexed_blocks,
        "transports": load.transports,
        "pages": load.pages,
    }


def _decision(decision: Decision) -> Json:
    body = dataclasses.asdict(decision)
    del body["tenant"]
    return body
