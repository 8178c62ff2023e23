"""How far the draining of an instance is, as the conductor's report tells. Pure."""

import enum
from collections.abc import Sequence

from mooncake_mesh.errors import Refused
from mooncake_proto.control import Health, MemberState, Role, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId

_WORKERS = (Role.PREFILL, Role.DECODE)


class DrainState(enum.Enum):
    """Of a worker; a messenger is ACTIVE until it is GONE."""

    ACTIVE = "active"
    DRAINING = "draining"
    SERVING_KV = "drained, serving KV"
    """It has no job left and gets none; what it computed is served by its node's messenger."""

    GONE = "gone"


def drain_state(state: MemberState) -> DrainState:
    """Of one member."""
    if state.health is Health.DEAD:
        return DrainState.GONE
    if not state.load.draining:
        return DrainState.ACTIVE
    has_jobs = state.load.running_jobs or state.load.queued_jobs
    return DrainState.DRAINING if has_jobs else DrainState.SERVING_KV


def state_of(report: StatusReport, instance_id: InstanceId, incarnation: Incarnation) -> DrainState:
    """Of one life of an instance: another one on its address, or none, means that it is gone."""
    for state in report.cluster.members:
        if state.member.instance_id == instance_id and state.member.incarnation == incarnation:
            return drain_state(state)
    return DrainState.GONE


def chosen(report: StatusReport, names: list[str]) -> tuple[list[MemberState], list[MemberState]]:
    """Workers, and messengers, that *names* of instances and nodes stand for. Raises Refused for an unknown one."""
    workers: dict[InstanceId, MemberState] = {}
    messengers: dict[InstanceId, MemberState] = {}
    living = [state for state in report.cluster.members if state.health is not Health.DEAD]
    for name in names:
        meant = [
            state
            for state in living
            if (state.member.role in _WORKERS and name in (state.member.instance_id, state.member.node_id))
            or (state.member.role is Role.MESSENGER and name == state.member.node_id)
        ]
        if not meant:
            known = sorted(
                {n for s in living if s.member.role in _WORKERS for n in (s.member.instance_id, s.member.node_id)}
            )
            raise Refused(
                "unknown_name",
                f"{name} is no prefill or decode instance, nor a node with one; there are {', '.join(known)}",
            )
        for state in meant:
            group = workers if state.member.role in _WORKERS else messengers
            group[state.member.instance_id] = state
    return list(workers.values()), list(messengers.values())


def check_others_are_left(report: StatusReport, workers: Sequence[MemberState]) -> None:
    """Raises Refused if without *workers* nobody takes work of a role, for a model, that somebody takes now."""
    leaving = {state.member.instance_id for state in workers}
    taking = [state for state in report.cluster.members if state.member.role in _WORKERS and state.takes_work]
    left = {_service(state) for state in taking if state.member.instance_id not in leaving}
    lost = [state for state in taking if state.member.instance_id in leaving and _service(state) not in left]
    if lost:
        names = ", ".join(sorted(f"{state.member.instance_id} ({state.member.role.value})" for state in lost))
        raise Refused(
            "last_of_its_role",
            f"nobody else takes the work of {names}: requests would be refused meanwhile; --force drains anyway",
        )


def _service(state: MemberState) -> tuple[Role, str]:
    """What one worker can do in place of another."""
    return state.member.role, "" if state.member.model is None else state.member.model.name
