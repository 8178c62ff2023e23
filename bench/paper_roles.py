"""Group B, instances that change their role: where the mix of the traffic shifts, and where it stays (experiment B7).

All runs refuse what is not expected to have its first token in time (Algorithm 1). The dynamic mesh begins as 8P8D.
"""

from dataclasses import replace
from typing import Final

from bench.paper_runs import TBT_SLO_S, TTFT_SLO_S, Bench, Measured, System, mesh
from bench.simulator import MeshSetup
from bench.simulator_coupled import baseline
from bench.simulator_results import RunResult
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


def b7_dynamic_roles(bench: Bench) -> None:
    """Static ratios, roles that change, and s2, under a mix that shifts and under one that does not."""
    case = f"conversation {_SHIFT_SPEED}x, outputs ×{_LONGER} in the middle third"
    work = [_shifted(bench, seed) for seed in bench.seeds]
    best, dynamic = _compared(bench, case, work, _DECODE_SHIFT, prototype=".965 dynamic, .939 8P8D")
    bench.row("B7", f"{case}: tokens, dynamic - best static", dynamic.minus(best), "share", least=0.02,
              prototype=".026")  # fmt: skip
    case = f"conversation {_CONSTANT_SPEED}x"
    work = [bench.workload("conversation", speed=_CONSTANT_SPEED, seed=seed) for seed in bench.seeds]
    best, dynamic = _compared(bench, case, work, _DECODE_CONSTANT, prototype="-")
    bench.row("B7", f"{case}: tokens, dynamic - best static", dynamic.minus(best), "share", prototype="-")


def _compared(
    bench: Bench, case: str, work: list[list[TraceRequest]], decode: tuple[int, ...], *, prototype: str
) -> tuple[Measured, Measured]:
    """Token shares of the best static ratio and of the dynamic mesh; all are told."""
    static = [_told(bench, case, f"{_NODES - n}P{n}D", work, _static(n), prototype) for n in decode]
    dynamic = _told(bench, case, "dynamic", work, dynamic_mesh(), prototype)
    strong = replace(baseline("s2", _NODES), ttft_limit_s=TTFT_SLO_S)
    _told(bench, case, "s2", work, strong, prototype="-")
    return max(static, key=lambda found: found.mean), dynamic


def _told(
    bench: Bench, case: str, name: str, work: list[list[TraceRequest]], system: System, prototype: str
) -> Measured:
    results: list[RunResult] = [bench.run(requests, system) for requests in work]
    good = Measured([result.share(TTFT_SLO_S, TBT_SLO_S) for result in results])
    tokens = Measured([result.token_share(TTFT_SLO_S, TBT_SLO_S) for result in results])
    bench.row("B7", f"{case}, {name}: good", good, "share", prototype="-")
    bench.row("B7", f"{case}, {name}: of tokens", tokens, "share", prototype=prototype)
    if name == "dynamic":
        switched = Measured([float(result.switched) for result in results])
        bench.row("B7", f"{case}, {name}: changes of role", switched, "instances", prototype="-")
    return tokens


def dynamic_mesh() -> MeshSetup:
    """8P8D at first; every node can take either role."""
    setup = _static(_NODES // 2)
    return replace(setup, scheduling=replace(setup.scheduling, roles=RoleRules()))


def _static(decode: int) -> MeshSetup:
    return mesh(_NODES - decode, decode, admission=AdmissionKind.BASELINE)


def _shifted(bench: Bench, seed: int) -> list[TraceRequest]:
    work = bench.workload("conversation", speed=_SHIFT_SPEED, seed=seed)
    third = len(work) // 3

    def output_tokens(i: int, request: TraceRequest) -> int:
        return request.output_tokens * (_LONGER if third <= i < 2 * third else 1)

    return with_outputs(work, output_tokens)
