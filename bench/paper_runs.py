"""What the experiments on the papers' results share: systems by name, seeds, scale, and the search for a capacity."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.paper_cache import RunCache
from bench.report import Report
from bench.simulator import MeshSetup, simulate
from bench.simulator_coupled import CoupledSetup, simulate_coupled
from bench.simulator_results import GiveUp, RunResult
from bench.traces import TraceRequest
from bench.workloads import named, replayed
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, PlacementKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.hybrid import longest_step_s
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives

TTFT_SLO_S = 30.0
TBT_SLO_S = 0.1

_CAPACITY_STEP = 1.03
_WIDE = 1.25
_MOST = 30.0
"""Times the estimate at which a search ends: so few requests have no capacity."""

System = MeshSetup | CoupledSetup
Score = Callable[[RunResult], float]


def run(requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None = None) -> RunResult:
    """One run, made now."""
    if isinstance(system, MeshSetup):
        return simulate(requests, system, give_up=give_up)
    return simulate_coupled(requests, system, give_up=give_up)


def mesh(
    prefill: int,
    decode: int,
    *,
    placement: PlacementKind = PlacementKind.KVCACHE_CENTRIC,
    admission: AdmissionKind | None = None,
    ttft_s: float = TTFT_SLO_S,
    tbt_s: float = TBT_SLO_S,
    hybrid: HybridDecodeKind = HybridDecodeKind.OFF,
) -> MeshSetup:
    """A mesh; without *admission* everything is let in and waits for room. The KV of *hybrid* decode nodes can be found
    by others, as in the live system."""
    return MeshSetup(
        prefill=prefill,
        decode=decode,
        objectives=Objectives() if admission is None else Objectives(ttft_s=ttft_s, tbt_s=tbt_s),
        decode_shares=hybrid is HybridDecodeKind.AUTO,
        scheduling=Scheduling(
            placement=placement,
            admission=Admission(kind=AdmissionKind.BASELINE if admission is None else admission),
            hybrid_decode=hybrid,
            hybrid_step_s=longest_step_s(Objectives(tbt_s=tbt_s)),
        ),
    )


def greatest(holds: Callable[[float], bool], near: float, step: float) -> float:
    """To 3 %, the greatest value for which *holds*, which is true below some value and false above.

    Looks from *near* on in strides of *step*, then bisects. Ends at a multiple of *near* if it holds there still.
    """
    low = high = near
    while not holds(low):
        low, high = low / step, low
    if low == near:
        high = near * step
        while high < near * _MOST and holds(high):
            low, high = high, high * step
    while high / low > _CAPACITY_STEP * 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(slots=True)
class Bench:
    """One run of the benchmark. ``requests`` limits each workload to its first so many; 0 takes all."""

    report: Report
    seeds: Sequence[int]
    requests: int
    say: Callable[[str], None]
    cache: RunCache = field(default_factory=lambda: RunCache(folder=None))
    workloads: dict[str, list[TraceRequest]] = field(default_factory=dict)

    def workload(self, name: str, *, speed: float = 1.0, seed: int = 0) -> list[TraceRequest]:
        """A named workload at *speed*. Published traces are jittered by *seed* (0: not), the generated
        one is made from it."""
        key = f"{name}/{seed}" if name == "tool-agent" else name
        if key not in self.workloads:
            self.workloads[key] = named(name, seed=seed)
        whole = self.workloads[key][: self.requests or None]
        return replayed(whole, speed=speed, jitter_seed=None if name == "tool-agent" else seed or None)

    def measured(self, read: Callable[..., float]) -> "Measured":
        """*read* for every seed, its one argument that has no default."""
        return Measured([read(seed) for seed in self.seeds])

    def run(self, requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None = None) -> RunResult:
        """As :func:`run`, or what the cache has of it."""
        path = self.cache.path(requests, (system, give_up))
        known = self.cache.read(path)
        if known is None:
            known = run(requests, system, give_up)
            self.cache.write(path, known)
        return known

    def capacity(self, name: str, system: System, *, near: float) -> "Measured":
        """The greatest replay speed at which 90 % of the requests are effective, to 3 %, for each seed.

        *near* is about where it is thought to lie. The first seed brackets and bisects; the others start from its
        result, from which they hardly differ.
        """
        found: list[float] = []
        for seed in self.seeds:

            def holds(speed: float, seed: int = seed) -> bool:
                return self.holds(name, system, speed, seed)

            found.append(greatest(holds, found[0], _CAPACITY_STEP) if found else greatest(holds, near, _WIDE))
        return Measured(found)

    def holds(self, name: str, system: System, speed: float, seed: int) -> bool:
        """Whether 90 % of the requests of a workload are effective at *speed*."""
        return self.at(name, system, speed, seed).share(TTFT_SLO_S, TBT_SLO_S) >= 0.9

    def at(self, name: str, system: System, speed: float, seed: int) -> RunResult:
        """The run of a workload at *speed*, given up once 90 % of the requests cannot be effective any more."""
        give_up = GiveUp(ttft_s=TTFT_SLO_S, tbt_s=TBT_SLO_S)
        return self.run(self.workload(name, speed=speed, seed=seed), system, give_up)

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

    def minus(self, other: "Measured") -> "Measured":
        """Difference, seed by seed."""
        return Measured([a - b for a, b in zip(self.values, other.values, strict=True)])

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
