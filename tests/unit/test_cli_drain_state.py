"""What `mooncake drain` reads off a report, and whom its names mean."""

import pytest

from mooncake_mesh.cli.drain_state import DrainState, check_others_are_left, chosen, drain_state, state_of
from mooncake_mesh.errors import Refused
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, ModelCard, Role, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId, NodeId

LIFE, NEXT_LIFE = Incarnation("a" * 16), Incarnation("b" * 16)


def _member(
    role: Role,
    name: str,
    load: Load,
    *,
    node: str = "node0",
    health: Health = Health.ALIVE,
    model: ModelCard | None = None,
) -> MemberState:
    member = Member(
        role=role,
        instance_id=InstanceId(name),
        node_id=NodeId(node),
        incarnation=LIFE,
        endpoint=f"ipc:///{name}",
        model=model,
    )
    return MemberState(member=member, health=health, load=load, takes_work=not load.draining, last_beat_s=0.0)


def _report(*members: MemberState) -> StatusReport:
    return StatusReport(
        cluster=ClusterState(conductor=LIFE, revision=1, members=members),
        healthy=True,
        reasons=(),
        indexed_blocks={},
        placed_total=0,
        rejected_total=0,
        uptime_s=1.0,
    )


@pytest.mark.parametrize(
    ("load", "health", "state"),
    [
        (Load(running_jobs=2), Health.ALIVE, DrainState.ACTIVE),
        (Load(running_jobs=1, draining=True), Health.ALIVE, DrainState.DRAINING),
        (Load(queued_jobs=1, draining=True), Health.SUSPECT, DrainState.DRAINING),
        (Load(draining=True), Health.ALIVE, DrainState.SERVING_KV),
        (Load(draining=True), Health.DEAD, DrainState.GONE),
    ],
)
def test_a_worker_drains_until_its_jobs_are_over(load: Load, health: Health, state: DrainState) -> None:
    assert drain_state(_member(Role.DECODE, "decode0", load, health=health)) is state


def test_the_next_life_of_an_instance_is_not_the_one_that_was_drained() -> None:
    report = _report(_member(Role.DECODE, "decode0", Load(draining=True)))
    assert state_of(report, InstanceId("decode0"), LIFE) is DrainState.SERVING_KV
    assert state_of(report, InstanceId("decode0"), NEXT_LIFE) is DrainState.GONE
    assert state_of(report, InstanceId("decode1"), LIFE) is DrainState.GONE


def test_a_node_means_its_workers_and_its_messenger_an_instance_only_itself() -> None:
    report = _report(
        _member(Role.MESSENGER, "messenger0", Load()),
        _member(Role.PREFILL, "prefill0", Load()),
        _member(Role.DECODE, "decode0", Load()),
        _member(Role.PREFILL, "prefill1", Load(), node="node1"),
        _member(Role.PREFILL, "prefill2", Load(), health=Health.DEAD),
    )

    def names(*asked: str) -> tuple[list[str], list[str]]:
        workers, messengers = chosen(report, list(asked))
        return [str(one.member.instance_id) for one in workers], [str(one.member.instance_id) for one in messengers]

    assert names("node0") == (["prefill0", "decode0"], ["messenger0"])
    assert names("decode0") == (["decode0"], [])
    assert names("prefill1", "node0", "prefill0") == (["prefill1", "prefill0", "decode0"], ["messenger0"])
    for nobody in ("messenger0", "prefill2", "node7"):
        with pytest.raises(Refused, match=f"{nobody} is no .*decode0, node0, node1, prefill0, prefill1"):
            names(nobody)


# --- who is left ------------------------------------------------------------------------------------------------------


def _card(name: str) -> ModelCard:
    return ModelCard(
        name=name, fingerprint="f", dtype="float32", block_tokens=16, block_bytes=64, max_context_tokens=64
    )


def _check(report: StatusReport, *names: str) -> None:
    check_others_are_left(report, chosen(report, list(names))[0])


def test_the_last_worker_of_a_role_is_not_drained() -> None:
    report = _report(
        _member(Role.PREFILL, "prefill0", Load()),
        _member(Role.PREFILL, "prefill1", Load(), node="node1"),
        _member(Role.DECODE, "decode0", Load(), node="node1"),
    )
    _check(report, "prefill0")
    with pytest.raises(Refused, match=r"nobody else takes the work of decode0 \(decode\): .*--force"):
        _check(report, "decode0")
    with pytest.raises(Refused, match=r"decode0 \(decode\)"):
        _check(report, "node1")
    with pytest.raises(Refused, match=r"prefill0 \(prefill\), prefill1 \(prefill\)"):
        _check(report, "prefill0", "prefill1")


def test_who_takes_no_work_is_nobody_who_is_left() -> None:
    report = _report(
        _member(Role.DECODE, "decode0", Load()),
        _member(Role.DECODE, "decode1", Load(draining=True)),
        _member(Role.DECODE, "decode2", Load(draining=True), health=Health.DEAD),
    )
    with pytest.raises(Refused, match="decode0"):
        _check(report, "decode0")


def test_who_takes_no_work_any_more_may_be_drained_to_the_end() -> None:
    report = _report(_member(Role.DECODE, "decode0", Load(draining=True, running_jobs=1)))
    _check(report, "decode0")


def test_a_worker_with_another_model_is_no_other() -> None:
    report = _report(
        _member(Role.DECODE, "decode0", Load(), model=_card("one")),
        _member(Role.DECODE, "decode1", Load(), model=_card("other")),
    )
    with pytest.raises(Refused, match="decode1"):
        _check(report, "decode1")
