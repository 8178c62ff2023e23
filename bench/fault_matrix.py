"""Every process of a mesh x every stage of a request x kill -9, SIGSTOP and restart.

Two streams, a greedy and a seeded one, are brought to a stage (fault_stages.py); then the process that serves one of
them is killed and stays dead until all is over, or is stopped for ten seconds, or is killed and at once started again
on the same endpoint. Every request must end with the very output of an undisturbed run and one terminal message; two
seconds after the end free blocks, leases, counters and descriptors must equal the start.

Two processes have no spare, and the table says what a client sees then: whose gateway dies, sees its connection break;
who asks for a place while there is no conductor is refused with 503 once waiting for it was in vain.
"""

import enum
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.fault_mesh import Books, End, fault_mesh, keep_logs
from bench.fault_stages import Scene, Stage, bring
from tests.mesh.harness import Mesh

STALL_S: Final = 10.0
_END_S: Final = 60.0


class Fault(enum.Enum):
    KILL = "kill -9"
    STALL = "SIGSTOP 10 s"
    RESTART = "restart"


class Target(enum.Enum):
    """Whom a fault hits, of those that serve the request that is at its stage."""

    GATEWAY = "gateway"
    CONDUCTOR = "conductor"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_MESSENGER = "messenger of prefill"
    DECODE_MESSENGER = "messenger of decode"

    def name_in(self, scene: Scene) -> str:
        match self:
            case Target.GATEWAY:
                return "gateway0"
            case Target.CONDUCTOR:
                return "conductor"
            case Target.PREFILL:
                return scene.prefill
            case Target.DECODE:
                return scene.decode
            case Target.PREFILL_MESSENGER:
                return scene.node_of(scene.prefill)
            case Target.DECODE_MESSENGER:
                return scene.node_of(scene.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    target: Target
    fault: Fault
    stage: Stage

    @property
    def allowed(self) -> frozenset[str]:
        """How requests may end."""
        if self.target is Target.GATEWAY and self.fault is not Fault.STALL:
            return frozenset({"cut", "finished"})  # whoever was done already
        if self.target is Target.CONDUCTOR and self.fault is Fault.KILL and self.stage is Stage.PLACING:
            return frozenset({"refused"})
        return frozenset({"finished"})

    @property
    def name(self) -> str:
        return f"{self.target.name}-{self.fault.name}-{self.stage.name}".lower()

    def __str__(self) -> str:
        return f"{self.fault.value} of {self.target.value}, {self.stage.value}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one cell."""

    cell: Cell
    ends: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def summary(self) -> str:
        said = " ".join(f"{n} {kind}" for kind, n in sorted(self.ends.items()))
        return said + (" !" if self.violations else "")


def run_cell(mesh: Mesh, books: Books, cell: Cell, nonce: str) -> Outcome:
    """One fault. Leaves the mesh whole and at rest, or raises AssertionError where that is not to be had."""
    outcome = Outcome(cell=cell)
    began_s = time.monotonic()
    scene = bring(mesh, cell.stage, nonce)
    name = cell.target.name_in(scene)
    ends = _hurt(mesh, scene, name, cell.fault)
    over_s = time.monotonic()
    for end in ends:
        outcome.ends[end.kind] += 1
        if end.kind not in cell.allowed:
            outcome.violations.append(f"{cell} ({name}): {end.kind}: {end.detail}")
    if not mesh.is_running(name):
        mesh.start(name)
    outcome.violations += [f"{cell} ({name}): {difference}" for difference in books.differences(over_s)]
    outcome.took_s = time.monotonic() - began_s
    return outcome


def _hurt(mesh: Mesh, scene: Scene, name: str, fault: Fault) -> list[End]:
    """Inject the fault, let all else go on, and wait for the ends of all requests."""
    if fault is Fault.STALL:
        until_s = time.monotonic() + STALL_S
        if name not in scene.held:
            mesh.stop(name)
        scene.go_on(but=name)
        time.sleep(max(0.0, until_s - time.monotonic()))  # the fault itself
        mesh.cont(name)
    else:
        mesh.kill(name)
        scene.go_on(but=name)
        if fault is Fault.RESTART:
            mesh.start(name)
    return [ask.end(timeout_s=_END_S) for ask in scene.asks]


def run_matrix(cells: Sequence[Cell], *, tell: bool = True, logs: Path | None = None) -> list[Outcome]:
    """All *cells*, on a mesh of their own for each target and fault. What was violated leaves its logs in *logs*."""
    outcomes = []
    for target in Target:
        for fault in Fault:
            row = [cell for cell in cells if cell.target is target and cell.fault is fault]
            if row:
                outcomes += _run_row(row, tell=tell, logs=logs)
    return outcomes


def _run_row(row: Sequence[Cell], *, tell: bool, logs: Path | None) -> list[Outcome]:
    outcomes: list[Outcome] = []
    try:
        with fault_mesh() as mesh:
            books = Books(mesh)
            books.open()
            for number, cell in enumerate(row):
                outcomes.append(Outcome(cell=cell, violations=[f"{cell}: did not come to an end"]))
                outcomes[-1] = run_cell(mesh, books, cell, "#" * number)
                if logs is not None and outcomes[-1].violations:
                    keep_logs(mesh, logs / cell.name)
                if tell:
                    print(f"{cell}: {outcomes[-1].summary} ({outcomes[-1].took_s:.1f} s)", flush=True)
                    for violation in outcomes[-1].violations:
                        print(f"    {violation}", flush=True)
            outcomes[-1].violations += [f"{row[0].target.value}, at the end: {found}" for found in books.close()]
    except AssertionError as error:
        outcomes[-1].violations.append(f"the mesh of {row[0].target.value} broke: {error}")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Stages down, a column for each fault, for each target."""
    by_cell = {(o.cell.target, o.cell.fault, o.cell.stage): o for o in outcomes}
    lines = [f"{'process':<22}{'stage of the request':<36}" + "".join(f"{fault.value:<22}" for fault in Fault)]
    for target in Target:
        for stage in Stage:
            found = [by_cell.get((target, fault, stage)) for fault in Fault]
            if any(found):
                summaries = "".join(f"{'' if o is None else o.summary:<22}" for o in found)
                lines.append(f"{target.value:<22}{stage.value:<36}{summaries}")
    return "\n".join(lines)
