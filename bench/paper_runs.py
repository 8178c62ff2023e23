"""What the experiments on the papers' results share: systems by name, seeds, scale, and the search for a capacity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.report import Report
from bench.simulator import MeshSetup, simulate
from bench.simulator_coupled import CoupledSetup, simulate_coupled
from bench.simulator_results import RunResult
from bench.traces import TraceRequest
from bench.workloads import named, replayed
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives

TTFT_SLO_S = 30.0
TBT_SLO_S = 0.1

System = MeshSetup | CoupledSetup
Score = Callable[[RunResult], float]


def run(requests: Sequence[TraceRequest], system: System) -> RunResult:
    return simulate(requests, system) if isinstance(system, MeshSetup) else simulate_coupled(requests, system)


def mesh(
    prefill: int,
    decode: int,
    *,
    placement: PlacementKind = PlacementKind.KVCACHE_CENTRIC,
    admission: AdmissionKind | None = None,
    ttft_s: float = TTFT_SLO_S,
    tbt_s: float = TBT_SLO_S,
) -> MeshSetup:
    """A mesh; without *admission* everything is let in and waits for room."""
    return MeshSetup(
        prefill=prefill,
        decode=decode,
        objectives=Objectives() if admission is None else Objectives(ttft_s=ttft_s, tbt_s=tbt_s),
        scheduling=Scheduling(
            placement=placement,
            admission=Admission(kind=AdmissionKind.BASELINE if admission is None else admission),
        ),
    )


@dataclass(slots=True)
class Bench:
    """One run of the benchmark. ``requests`` limits each workload to its first so many; 0 takes all."""

    report: Report
    seeds: Sequence[int]
    requests: int
    steps: int
    say: Callable[[str], None]
    _workloads: dict[str, list[TraceRequest]] = field(default_factory=dict)

    def workload(self, name: str, *, speed: float = 1.0, seed: int = 0) -> list[TraceRequest]:
        """A named workload at *speed*. The conversation trace is jittered by *seed*, the generated one made from it."""
        key = f"{name}/{seed}" if name == "tool-agent" else name
        if key not in self._workloads:
            self._workloads[key] = named(name, seed=seed)
        whole = self._workloads[key][: self.requests or None]
        return replayed(whole, speed=speed, jitter_seed=seed if name == "conversation" else None)

    def measured(self, read: Callable[..., float]) -> "Measured":
        """*read* for every seed, its one argument that has no default."""
        return Measured([read(seed) for seed in self.seeds])

    def capacity(self, name: str, system: System, *, low: float, high: float, seed: int) -> float:
        """The greatest replay speed at which 90 % of the requests are effective, by geometric bisection."""
        for _ in range(self.steps):
            middle = math.sqrt(low * high)
            share = run(self.workload(name, speed=middle, seed=seed), system).share(TTFT_SLO_S, TBT_SLO_S)
            low, high = (middle, high) if share >= 0.9 else (low, middle)
        return low

    def row(
        self, id_: str, text: str, value: "Measured", unit: str, *, least: float = -math.inf, most: float = math.inf,
        prototype: str, paper: str = "-", baseline: "Measured | None" = None,
    ) -> None:  # fmt: skip
        """One measured quantity; its aim is met when the mean lies within *least* and *most*. Said at once."""
        self.report.row(
            f"{id_} {text}",
            value.mean,
            unit,
            baseline=None if baseline is None else baseline.mean,
            aim=_aim(least, most, prototype, paper),
            met=None if least == -math.inf and most == math.inf else least <= value.mean <= most,
            n=len(value.values),
            spread=(min(value.values), max(value.values)),
        )
        made = self.report.rows[-1]
        verdict = "" if made.met is None else ", met" if made.met else ", MISSED"
        self.say(f"{made.metric}: {made.value:.4g} {unit}{verdict}")


@dataclass(frozen=True, slots=True)
class Measured:
    """One value a seed."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def over(self, other: "Measured") -> "Measured":
        """Ratio, seed by seed."""
        return Measured([a / b if b else math.inf for a, b in zip(self.values, other.values, strict=True)])


def _aim(least: float, most: float, prototype: str, paper: str) -> str:
    """What a value is held against, the aim first."""
    if least == -math.inf and most == math.inf:
        band = ""
    elif most == math.inf:
        band = f"≥ {least:g}"
    else:
        band = f"≤ {most:g}" if least == -math.inf else f"{least:g} … {most:g}"
    others = [f"{name} {value}" for name, value in (("prototype", prototype), ("paper", paper)) if value != "-"]
    return f"{band} ({', '.join(others)})".strip() if others else band
