"""What the supervisor of ``mooncake up`` decides, event by event."""

import signal

import pytest

from mooncake_mesh.cli.supervision import (
    STOP_GRACE_S,
    Announce,
    ChildExited,
    Exit,
    Kill,
    MeshBecameReady,
    Start,
    StopAsked,
    StopStage,
    Supervision,
    Terminate,
    TimePassed,
    UpAsked,
)

CHILDREN = {
    "conductor": StopStage.CONDUCTOR,
    "gateway0": StopStage.GATEWAY,
    "messenger0": StopStage.MESSENGERS,
    "prefill0": StopStage.WORKERS,
    "decode0": StopStage.WORKERS,
}


def _up(*, ready: bool = True) -> Supervision:
    mesh = Supervision(CHILDREN)
    assert mesh.handle(UpAsked(), 0.0) == [Start(name=name) for name in CHILDREN]
    if ready:
        assert mesh.handle(MeshBecameReady(), 1.0) == [Announce()]
    return mesh


def _die(mesh: Supervision, name: str, now: float, code: int = -9) -> float:
    """Let a child die that will be started again; when that is."""
    assert mesh.handle(ChildExited(name=name, code=code), now) == []
    wake_at = mesh.wake_at()
    assert wake_at is not None
    return wake_at


def test_readiness_is_announced_once() -> None:
    mesh = _up()
    assert mesh.handle(MeshBecameReady(), 2.0) == []
    assert mesh.wake_at() is None


def test_dead_child_is_started_again_after_a_moment() -> None:
    mesh = _up()
    assert _die(mesh, "decode0", 10.0) == pytest.approx(10.2)
    assert mesh.handle(TimePassed(), 10.1) == []
    assert mesh.handle(TimePassed(), 10.2) == [Start(name="decode0")]
    assert mesh.wake_at() is None


def test_delay_doubles_to_five_seconds() -> None:
    mesh, now, delays = _up(), 10.0, []
    for _ in range(7):
        due = _die(mesh, "decode0", now)
        delays.append(due - now)
        assert mesh.handle(TimePassed(), due) == [Start(name="decode0")]
        now = due + 1.0
    assert delays == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_delay_starts_over_after_a_long_life() -> None:
    mesh = _up()
    for now in (10.0, 20.0):
        mesh.handle(TimePassed(), _die(mesh, "decode0", now))
    assert _die(mesh, "decode0", 20.4 + 30.0) == pytest.approx(50.6)


def test_children_wait_for_their_own_time() -> None:
    mesh = _up()
    mesh.handle(TimePassed(), _die(mesh, "prefill0", 10.0))
    _die(mesh, "prefill0", 11.0)
    assert _die(mesh, "decode0", 11.1) == pytest.approx(11.3)
    assert mesh.handle(TimePassed(), 11.3) == [Start(name="decode0")]
    assert mesh.handle(TimePassed(), 11.4) == [Start(name="prefill0")]


def test_refusal_at_start_ends_the_mesh() -> None:
    mesh = _up(ready=False)
    assert mesh.handle(ChildExited(name="prefill0", code=2), 1.0) == [Terminate(name="gateway0")]
    assert mesh.handle(ChildExited(name="gateway0", code=0), 1.1) == [Terminate(name="decode0")]
    assert mesh.handle(ChildExited(name="decode0", code=-signal.SIGTERM), 1.2) == [Terminate(name="messenger0")]
    assert mesh.handle(ChildExited(name="messenger0", code=0), 1.3) == [Terminate(name="conductor")]
    assert mesh.handle(ChildExited(name="conductor", code=0), 1.4) == [Exit(code=2, culprit="prefill0")]


def test_refusal_after_the_mesh_was_ready_is_a_death_like_others() -> None:
    mesh = _up()
    assert mesh.handle(ChildExited(name="prefill0", code=2), 5.0) == []


def test_start_that_fails_again_and_again_ends_the_mesh() -> None:
    mesh, now = _up(ready=False), 1.0
    for _ in range(4):
        now = _die(mesh, "decode0", now, code=1)
        assert mesh.handle(TimePassed(), now) == [Start(name="decode0")]
    assert mesh.handle(ChildExited(name="decode0", code=1), now) == [Terminate(name="gateway0")]


def test_stop_goes_stage_by_stage() -> None:
    mesh = _up()
    assert mesh.handle(StopAsked(), 100.0) == [Terminate(name="gateway0")]
    assert mesh.wake_at() == 100.0 + STOP_GRACE_S
    assert mesh.handle(ChildExited(name="gateway0", code=0), 101.0) == [
        Terminate(name="prefill0"),
        Terminate(name="decode0"),
    ]
    assert mesh.handle(ChildExited(name="decode0", code=0), 102.0) == []
    assert mesh.handle(ChildExited(name="prefill0", code=0), 103.0) == [Terminate(name="messenger0")]
    assert mesh.handle(ChildExited(name="messenger0", code=0), 104.0) == [Terminate(name="conductor")]
    assert mesh.handle(ChildExited(name="conductor", code=0), 105.0) == [Exit(code=0)]


def test_who_does_not_stop_is_killed_and_named() -> None:
    mesh = _up()
    mesh.handle(StopAsked(), 100.0)
    mesh.handle(ChildExited(name="gateway0", code=0), 101.0)
    mesh.handle(ChildExited(name="prefill0", code=0), 101.0)
    assert mesh.handle(TimePassed(), 110.9) == []
    assert mesh.handle(TimePassed(), 111.0) == [Kill(name="decode0")]
    assert mesh.wake_at() is None
    assert mesh.handle(ChildExited(name="decode0", code=-9), 111.1) == [Terminate(name="messenger0")]
    mesh.handle(ChildExited(name="messenger0", code=0), 111.2)
    assert mesh.handle(ChildExited(name="conductor", code=0), 111.3) == [Exit(code=1, culprit="decode0")]


def test_death_out_of_turn_while_stopping_is_no_restart() -> None:
    mesh = _up()
    mesh.handle(StopAsked(), 100.0)
    assert mesh.handle(ChildExited(name="messenger0", code=0), 100.1) == []
    assert mesh.handle(ChildExited(name="gateway0", code=0), 100.2) == [
        Terminate(name="prefill0"),
        Terminate(name="decode0"),
    ]
    mesh.handle(ChildExited(name="prefill0", code=0), 100.3)
    assert mesh.handle(ChildExited(name="decode0", code=0), 100.4) == [Terminate(name="conductor")]


def test_stop_forgets_a_pending_restart() -> None:
    mesh = _up()
    _die(mesh, "gateway0", 99.9)
    assert mesh.handle(StopAsked(), 100.0) == [Terminate(name="prefill0"), Terminate(name="decode0")]
    assert mesh.handle(TimePassed(), 100.2) == []


def test_second_stop_kills_all() -> None:
    mesh = _up()
    mesh.handle(StopAsked(), 100.0)
    mesh.handle(ChildExited(name="gateway0", code=0), 100.1)
    assert mesh.handle(StopAsked(), 100.2) == [
        Kill(name=name) for name in ("conductor", "messenger0", "prefill0", "decode0")
    ]


def test_stop_with_nothing_running_is_the_end() -> None:
    mesh = Supervision({"conductor": StopStage.CONDUCTOR})
    mesh.handle(UpAsked(), 0.0)
    _die(mesh, "conductor", 1.0)
    assert mesh.handle(StopAsked(), 1.1) == [Exit(code=0)]


def test_readiness_during_a_stop_is_not_announced() -> None:
    mesh = _up(ready=False)
    mesh.handle(StopAsked(), 1.0)
    assert mesh.handle(MeshBecameReady(), 1.1) == []
