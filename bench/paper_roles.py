"""Group B, instances that change their role: where the mix of the traffic shifts, and where it stays (experiment B7).

All runs refuse what is not expected to have its first token in time (Algorithm 1).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from bench.paper_jobs import System
from bench.paper_report import Measured
from bench.paper_runs import TBT_SLO_S, TTFT_SLO_S, Bench, mesh
from bench.simulator import MeshSetup
from bench.simulator_coupled import baseline
from bench.traces import TraceRequest
from bench.workloads import with_outputs
from mooncake_mesh.config_scheduling import AdmissionKind
from mooncake_mesh.policy.roles import RoleRules

_NODES: Final = 16
_SHIFT_SPEED: Final = 2.2
_LONGER: Final = 6
_CONSTANT_SPEED: Final = 2.5
_DECODE_SHIFT: Final = (8, 6, 4, 3)
_DECODE_CONSTANT: Final = (8, 4, 3)
_DYNAMIC: Final = "dynamic, 8P8D at first"

_Work = Callable[[int], list[TraceRequest]]


def b7_dynamic_roles(bench: Bench) -> None:
    """Instances that change their role, against static ratios, under a mix that shifts and one that does not."""
    shift = f"conversation {_SHIFT_SPEED}x, outputs ×{_LONGER} in the middle third"
    constant = f"conversation {_CONSTANT_SPEED}x"

    def constant_work(seed: int) -> list[TraceRequest]:
        return bench.workload("conversation", speed=_CONSTANT_SPEED, seed=seed)

    gain = _gain(bench, shift, lambda seed: _shifted(bench, seed), _DECODE_SHIFT)
    bench.row("B7", f"{shift}: good tokens, dynamic - best static", gain, "share", least=0.02, prototype=".026")
    gain = _gain(bench, constant, constant_work, _DECODE_CONSTANT)
    bench.row("B7", f"{constant}: good tokens, dynamic - best static", gain, "share")


def dynamic_mesh() -> MeshSetup:
    """8P8D at first; every node can take either role."""
    setup = _static(_NODES // 2)
    return replace(setup, scheduling=replace(setup.scheduling, roles=RoleRules()))


def _gain(bench: Bench, case: str, work: _Work, decode: tuple[int, ...]) -> Measured:
    """Tell of all systems; token share of the dynamic mesh over that of the best static ratio."""
    static: dict[str, System] = {f"{_NODES - n}P{n}D": _static(n) for n in decode}
    strong = replace(baseline("s2", _NODES), ttft_limit_s=TTFT_SLO_S)
    found = bench.runs({**static, _DYNAMIC: dynamic_mesh(), "s2": strong}, work)
    for name, results in found.items():
        bench.told("B7", case, name, results, admission="TTFT")
    tokens = {
        name: Measured([r.token_share(TTFT_SLO_S, TBT_SLO_S) for r in results]) for name, results in found.items()
    }
    switched = Measured([float(result.switched) for result in found[_DYNAMIC]])
    bench.row("B7", f"{case}: changes of role", switched, "instances")
    return tokens[_DYNAMIC].minus(max((tokens[name] for name in static), key=lambda one: one.mean))


def _static(decode: int) -> MeshSetup:
    return mesh(_NODES - decode, decode, admission=AdmissionKind.BASELINE)


def _shifted(bench: Bench, seed: int) -> list[TraceRequest]:
    work = bench.workload("conversation", speed=_SHIFT_SPEED, seed=seed)
    third = len(work) // 3

    def output_tokens(i: int, request: TraceRequest) -> int:
        return request.output_tokens * (_LONGER if third <= i < 2 * third else 1)

    return with_outputs(work, output_tokens)
