"""What the supervisor of ``mooncake up`` decides. Pure: events in, commands out; :mod:`mooncake_mesh.cli.up` acts.

A child that dies is started again on the same endpoints, soon the first time and then ever later. Before the mesh
has been ready once, a child that refuses its configuration (exit code 2), or dies again and again, ends the whole mesh.
Stopping goes stage by stage: who takes requests first, who everybody needs last.
"""

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REFUSED_EXIT_CODE: Final = 2
FIRST_DELAY_S: Final = 0.2
LONGEST_DELAY_S: Final = 5.0
STABLE_AFTER_S: Final = 30.0
START_ATTEMPTS: Final = 5
STOP_GRACE_S: Final = 10.0


class StopStage(enum.IntEnum):
    """The order of an orderly stop."""

    GATEWAY = 0
    WORKERS = 1
    STAGES = 2
    MESSENGERS = 3
    CONDUCTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class UpAsked:
    """Start everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExited:
    """``code`` as subprocess has it: minus the signal's number for a death by signal."""

    name: str
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshBecameReady:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """The second one does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """``wake_at`` has come."""


Event = UpAsked | ChildExited | MeshBecameReady | StopAsked | TimePassed


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """The mesh answers for the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Nothing runs any more. ``culprit`` is the child whose failure ended the mesh, if one did."""

    code: int
    culprit: str | None = None


Command = Start | Terminate | Kill | Announce | Exit


@dataclass(slots=True)
class _Child:
    stage: StopStage
    running: bool = False
    started_at: float = 0.0
    failures: int = 0
    start_due: float | None = None


class Supervision:
    """Children by name, each with the stage it stops in. Mutated only by :meth:`handle`."""

    def __init__(self, children: dict[str, StopStage]) -> None:
        self._children = {name: _Child(stage) for name, stage in children.items()}
        self._been_ready = False
        self._stop: _Stop | None = None

    def wake_at(self) -> float | None:
        """When TimePassed is due."""
        if self._stop is not None:
            return self._stop.kill_due
        return min((child.start_due for child in self._children.values() if child.start_due is not None), default=None)

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case UpAsked():
                return [self._start(name, now) for name in self._children]
            case ChildExited(name=name, code=code):
                self._children[name].running = False
                return self._lost(name, code, now) if self._stop is None else self._went(name, code, now)
            case MeshBecameReady():
                first, self._been_ready = not self._been_ready, True
                return [Announce()] if first and self._stop is None else []
            case StopAsked():
                return self._begin_stop(0, None, now) if self._stop is None else self._kill_all()
            case TimePassed():
                return self._start_due(now) if self._stop is None else self._overdue(now)

    def _start(self, name: str, now: float) -> Command:
        child = self._children[name]
        child.running, child.started_at, child.start_due = True, now, None
        return Start(name=name)

    def _start_due(self, now: float) -> list[Command]:
        due = [name for name, child in self._children.items() if child.start_due is not None and child.start_due <= now]
        return [self._start(name, now) for name in due]

    def _lost(self, name: str, code: int, now: float) -> list[Command]:
        """A child died while the mesh should run."""
        child = self._children[name]
        child.failures = 1 if now - child.started_at >= STABLE_AFTER_S else child.failures + 1
        if not self._been_ready and code == REFUSED_EXIT_CODE:
            return self._begin_stop(REFUSED_EXIT_CODE, name, now)
        if not self._been_ready and child.failures >= START_ATTEMPTS:
            return self._begin_stop(1, name, now)
        child.start_due = now + min(FIRST_DELAY_S * 2 ** (child.failures - 1), LONGEST_DELAY_S)
        return []

    def _begin_stop(self, code: int, culprit: str | None, now: float) -> list[Command]:
        for child in self._children.values():
            child.start_due = None
        self._stop = _Stop(code=code, culprit=culprit)
        return self._next_stage(now)

    def _next_stage(self, now: float) -> list[Command]:
        """Ask the first stage that still runs to stop, or say that all is over."""
        assert self._stop is not None
        stage = min((child.stage for child in self._children.values() if child.running), default=None)
        if stage is None:
            return [Exit(code=self._stop.code, culprit=self._stop.culprit)]
        self._stop.stage, self._stop.kill_due = stage, now + STOP_GRACE_S
        return [Terminate(name=name) for name in self._running(stage)]

    def _went(self, name: str, code: int, now: float) -> list[Command]:
        """A child ended while the mesh stops. One that did not end cleanly makes the stop a failed one."""
        assert self._stop is not None
        if code not in (0, -signal.SIGTERM) and self._stop.code == 0:
            self._stop.code, self._stop.culprit = 1, name
        if not self._running(self._stop.stage):
            return self._next_stage(now)
        return []

    def _overdue(self, now: float) -> list[Command]:
        assert self._stop is not None
        if self._stop.kill_due is None or self._stop.kill_due > now:
            return []
        self._stop.kill_due = None
        return [Kill(name=name) for name in self._running(self._stop.stage)]

    def _kill_all(self) -> list[Command]:
        return [Kill(name=name) for name, child in self._children.items() if child.running]

    def _running(self, stage: StopStage) -> Sequence[str]:
        return [name for name, child in self._children.items() if child.running and child.stage is stage]


@dataclass(slots=True)
class _Stop:
    """A stop in progress: which stage was asked to end, and when its patience ends."""

    code: int
    culprit: str | None
    stage: StopStage = StopStage.GATEWAY
    kill_due: float | None = None
