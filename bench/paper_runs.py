"""What the experiments on the papers' results share: systems by name, seeds, scale, and the search for a capacity."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from types import MappingProxyType
from typing import Final, TypeVar

from bench.paper_cache import RunCache
from bench.paper_jobs import Jobs, System, run
from bench.paper_report import Measured, PaperReport, Quantity, SystemRow
from bench.simulator import MeshSetup
from bench.simulator_results import GiveUp, RunResult, quantile
from bench.traces import TraceRequest
from bench.workloads import named, replayed
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, PlacementKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.hybrid import longest_step_s
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives

__all__ = ["Bench", "Measured", "System", "greatest", "mesh"]

TTFT_SLO_S: Final = 30.0
TBT_SLO_S: Final = 0.1

CAPACITY_STEP: Final = 1.03
"""Capacities are looked for on the powers of this: where a search begins does not change what it finds."""

_WIDE: Final = 4
_COARSE: Final = 4
_FARTHEST: Final = 120
"""Strides of a search, and how far it goes, in steps: so few requests have no capacity."""

_T = TypeVar("_T")
_R = TypeVar("_R")


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


def greatest(holds: Callable[[float], bool], near: float, *, stride: int = _WIDE, width: int = 1) -> float:
    """The greatest power of CAPACITY_STEP for which *holds*, which is true below some value and false above.

    Looks from *near* on in growing strides, then bisects until *width* steps are left: with 1 it is that power, with
    more one that holds and is less than *width* steps below it. Ends far from *near* if it must.
    """

    def at(step: int) -> float:
        return CAPACITY_STEP**step

    start = low = high = width * round(math.log(near) / math.log(CAPACITY_STEP) / width)
    if holds(at(start)):
        while high == low or (high - start < _FARTHEST and holds(at(high))):
            low, high, stride = high, high + stride, stride * (1 if high == low else 2)
    else:
        while low == high or (start - low < _FARTHEST and not holds(at(low))):
            low, high, stride = low - stride, low, stride * (1 if high == low else 2)
    while high - low > width:
        middle = low + width * ((high - low) // (2 * width))
        low, high = (middle, high) if holds(at(middle)) else (low, middle)
    return at(low)


@dataclass(slots=True)
class Bench:
    """One run of the benchmark. ``requests`` limits each workload to its first so many; 0 takes all.

    Experiments run on threads of their own and wait for ``jobs``; without any, runs are made where they are asked for.
    """

    report: PaperReport
    seeds: Sequence[int]
    requests: int
    say: Callable[[str], None]
    cache: RunCache = field(default_factory=lambda: RunCache(folder=None))
    jobs: Jobs | None = None
    workloads: dict[str, list[TraceRequest]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    # --- workloads and runs -------------------------------------------------------------------------------------------

    def workload(self, name: str, *, speed: float = 1.0, seed: int = 0) -> list[TraceRequest]:
        """A named workload at *speed*. Published traces are jittered by *seed* (0: not), the generated
        one is made from it."""
        key = f"{name}/{seed}" if name == "tool-agent" else name
        with self.lock:
            if key not in self.workloads:
                self.workloads[key] = named(name, seed=seed)
        whole = self.workloads[key][: self.requests or None]
        return replayed(whole, speed=speed, jitter_seed=None if name == "tool-agent" else seed or None)

    def measured(self, read: Callable[..., float]) -> Measured:
        """*read* for every seed, its one argument that has no default."""
        return Measured(self.each(read, self.seeds))

    def run(self, requests: Sequence[TraceRequest], system: System, give_up: GiveUp | None = None) -> RunResult:
        """The run of *system* over *requests*, or what the cache has of it."""
        path = self.cache.path(requests, (system, give_up))
        known = self.cache.read(path)
        if known is not None:
            return known
        if self.jobs is None or path is None:
            made = run(requests, system, give_up)
            self.cache.write(path, made)
            return made
        self.jobs.run(requests, system, give_up, path)
        known = self.cache.read(path)
        assert known is not None, "the worker has kept it there"
        return known

    def each(self, function: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
        """*function* of each of *items*, at once where there are workers. Rows belong to whoever asks, not in here."""
        if self.jobs is None or len(items) < 2:
            return [function(item) for item in items]
        with ThreadPoolExecutor(len(items)) as threads:
            return list(threads.map(function, items))

    def runs(
        self, systems: Mapping[str, System], work: Callable[[int], Sequence[TraceRequest]]
    ) -> dict[str, list[RunResult]]:
        """Each of *systems* over *work* of every seed."""
        asked = [(name, seed) for name in systems for seed in self.seeds]
        made = self.each(lambda one: self.run(work(one[1]), systems[one[0]]), asked)
        found: dict[str, list[RunResult]] = {name: [] for name in systems}
        for (name, _), result in zip(asked, made, strict=True):
            found[name].append(result)
        return found

    # --- capacities ---------------------------------------------------------------------------------------------------

    def capacity(self, name: str, system: System, *, near: float) -> Measured:
        """The greatest replay speed at which 90 % of the requests are effective, to 3 %, for each seed.

        *near* is about where it is thought to lie. The seeds after the first start from its result, from which they
        hardly differ.
        """
        first = greatest(lambda speed: self.holds(name, system, speed, self.seeds[0]), near)

        def other(seed: int) -> float:
            return greatest(lambda speed: self.holds(name, system, speed, seed), first, stride=1)

        return Measured([first, *self.each(other, self.seeds[1:])])

    def best_capacity(
        self, name: str, systems: Mapping[str, System], near: Mapping[str, float]
    ) -> tuple[str, Measured]:
        """Which of *systems* has the greatest capacity, and that.

        At the first seed, all are compared to 12 %, then those that may be the best one to 3 %; the best one runs at
        all seeds.
        """
        first = replace(self, seeds=self.seeds[:1])

        def coarse(one: str) -> float:
            return greatest(
                lambda speed: self.holds(name, systems[one], speed, self.seeds[0]), near[one], stride=_COARSE,
                width=_COARSE,
            )  # fmt: skip

        names = list(systems)
        roughly = dict(zip(names, self.each(coarse, names), strict=True))
        finalists = [one for one in names if roughly[one] == max(roughly.values())]
        finely = self.each(lambda one: first.capacity(name, systems[one], near=roughly[one]).mean, finalists)
        best = finalists[finely.index(max(finely))]
        return best, self.capacity(name, systems[best], near=max(finely))

    def holds(self, name: str, system: System, speed: float, seed: int) -> bool:
        """Whether 90 % of the requests of a workload are effective at *speed*."""
        return self.at(name, system, speed, seed).share(TTFT_SLO_S, TBT_SLO_S) >= 0.9

    def at(self, name: str, system: System, speed: float, seed: int) -> RunResult:
        """The run of a workload at *speed*, given up once 90 % of the requests cannot be effective any more."""
        give_up = GiveUp(ttft_s=TTFT_SLO_S, tbt_s=TBT_SLO_S)
        return self.run(self.workload(name, speed=speed, seed=seed), system, give_up)

    # --- what is told -------------------------------------------------------------------------------------------------

    def row(
        self, id_: str, text: str, value: Measured, unit: str, *, least: float = -math.inf, most: float = math.inf,
        prototype: str = "-", paper: str = "-", baseline: Measured | None = None, why: str = "",
    ) -> None:  # fmt: skip
        """One measured quantity; its aim is met when the mean lies within *least* and *most*. Said at once."""
        made = Quantity(
            text=text, value=value, unit=unit, least=least, most=most, prototype=prototype, paper=paper,
            baseline=baseline, why=why,
        )  # fmt: skip
        self.report.section(id_).quantities.append(made)
        verdict = f", {made.verdict.strip('*')}" if made.has_aim else ""
        self.say(f"{id_} {text}: {value.mean:.4g} {unit}{verdict}")

    def told(
        self, id_: str, case: str, system: str, results: Sequence[RunResult], *, admission: str = "none",
        ttft_s: float = TTFT_SLO_S, tbt_s: float = TBT_SLO_S, more: Mapping[str, Measured] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """What became of the requests of one system: a line of the experiment's table. *case* names workload and load,
        *admission* what was let in; *more* are columns of this experiment's own. Refusals never stand alone."""
        figures = {
            "good requests": Measured([r.share(ttft_s, tbt_s) for r in results]),
            "good tokens": Measured([r.token_share(ttft_s, tbt_s) for r in results]),
            "refused": Measured([r.rejected / max(1, len(r.records)) for r in results]),
            "mean TTFT, s": Measured([r.mean_ttft_s() for r in results]),
            "P90 TTFT, s": Measured([quantile(r.ttfts(), 0.9) for r in results]),
            "P90 TBT, ms": Measured([quantile(r.tbts(), 0.9) * 1e3 for r in results]),
            "block hits": Measured([r.block_hit() for r in results]),
            "prefill, s": Measured([r.mean_prefill_s() for r in results]),
            "wasted, Mtok": Measured([r.wasted_tokens(ttft_s, tbt_s) / 1e6 for r in results]),
        }
        row = SystemRow(case=case, system=system, admission=admission, figures={**figures, **more})
        self.report.section(id_).systems.append(row)

    def told_capacity(self, id_: str, name: str, label: str, system: System, capacity: Measured) -> None:
        """A line of the experiment's table: a capacity, and what the run there was like."""
        ends = self.each(lambda at: self.at(name, system, *at), list(zip(capacity.values, self.seeds, strict=True)))
        figures = {
            "capacity, x": capacity,
            "good requests there": Measured([end.share(TTFT_SLO_S, TBT_SLO_S) for end in ends]),
            "good tokens there": Measured([end.token_share(TTFT_SLO_S, TBT_SLO_S) for end in ends]),
            "mean TTFT, s": Measured([end.mean_ttft_s() for end in ends]),
            "P90 TBT, ms": Measured([quantile(end.tbts(), 0.9) * 1e3 for end in ends]),
        }
        row = SystemRow(case=f"{name}, TBT 100 ms", system=label, admission="none", figures=figures)
        self.report.section(id_).systems.append(row)
