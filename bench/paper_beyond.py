"""Group B, capacity: the ratio of prefill to decode nodes, and decode nodes that compute prompts too.

Each against the ratios around it, and against the strong baseline.
"""

from dataclasses import replace
from typing import Final

from bench.nodes import NODES
from bench.paper_runs import Bench, Measured, mesh
from bench.simulator import MeshSetup
from bench.simulator_coupled import CoupledSetup, baseline
from bench.traces import TraceRequest
from mooncake_mesh.config_scheduling import HybridDecodeKind
from mooncake_mesh.policy.sizing import TrafficMoments, decode_instances

_NODES: Final = 16
_FULL: Final = 0.9
"""How full of KV a decode node is taken to run: that gives its step time."""

_NEAR: Final = {
    "conversation": {8: 2.1, 6: 2.6, 4: 3.2, 3: 3.5, 2: 2.6, 1: 1.2},
    "tool-agent": {8: 2.5, 6: 3.2, 4: 3.9, 3: 3.7, 2: 2.5, 1: 1.3},
    "synthetic": {8: 2.0, 6: 2.6, 4: 3.4, 3: 3.7, 2: 4.1, 1: 3.5},
}
"""About where capacities lie, by workload and number of decode nodes (the six ratios that are swept): searches start
there."""

_HYBRID_NEAR: Final = {"conversation": 3.2, "tool-agent": 3.9, "synthetic": 3.5}
_S2_NEAR: Final = {"conversation": 2.5, "tool-agent": 3.0, "synthetic": 2.8}
_S2_SWEEP: Final = ((0.80, 1024), (0.80, 2048), (0.88, 2048), (0.88, 4096), (0.97, 2048), (0.97, 4096))
"""(share of the TBT objective that a mixed step may take, most tokens of a chunk)."""

_PROTOTYPE: Final = {
    "conversation": ("3 of 16", "1.68", "1.38", "1.57", "1.30"),
    "tool-agent": ("4 of 16", "1.54", "1.27", "1.54", "1.27"),
    "synthetic": ("2 of 16", "2.0", "1.45", "1.88", "1.33"),
}
"""Sized decode nodes, sized / 8P8D, best static / best s2, hybrid / 8P8D, hybrid / best s2."""


def b1_b2_sizing(bench: Bench) -> None:
    """Capacity of 16 nodes by ratio of prefill to decode, sized from the traffic or swept, and of the best s2."""
    for one in bench.each(lambda name: _sized(bench, name), list(_PROTOTYPE)):
        name, decode, capacity, best, strong_name, strong = one
        sized, prototype = ratio_name(decode), _PROTOTYPE[name]
        for label, found in capacity.items():
            bench.told_capacity("B1", name, label, _static(label), found)
        bench.row("B1", f"{name}: decode nodes of {_NODES} by the sizing rule", Measured([float(decode)]), "nodes",
                  prototype=prototype[0])  # fmt: skip
        bench.row("B1", f"{name}: sized ({sized}) / best of six ratios ({best})", capacity[sized].over(capacity[best]),
                  "ratio", least=0.95, prototype="1.0")  # fmt: skip
        bench.row("B1", f"{name}: sized ({sized}) / 8P8D", capacity[sized].over(capacity["8P8D"]), "ratio",
                  least=1.8 if name == "synthetic" else 1.5, prototype=prototype[1])  # fmt: skip
        bench.row("B1", f"{name}: sized ({sized}) / best s2", capacity[sized].over(strong), "ratio")
        bench.told_capacity("B2", name, f"{best}, best of six ratios", _static(best), capacity[best])
        bench.told_capacity("B2", name, f"{strong_name}, best of six settings", S2_SWEEP[strong_name], strong)
        bench.row("B2", f"{name}: best ratio ({best}) / best s2 ({strong_name})", capacity[best].over(strong), "ratio",
                  least=1.2, prototype=prototype[2])  # fmt: skip


def _sized(bench: Bench, name: str) -> tuple[str, int, dict[str, Measured], str, str, Measured]:
    """Of a workload: decode nodes by the rule, capacities of the sized, best and even ratio, the best ratio, and the
    best s2 with its capacity."""
    work = bench.workload(name, seed=bench.seeds[0])
    decode = sized_decode_nodes(work, bench.run(work, mesh(8, 8)).mean_prefill_s())
    sweep = {ratio_name(n): near for n, near in _NEAR[name].items()}
    (best, best_found), (strong_name, strong) = bench.each(
        lambda kind: (
            bench.best_capacity(name, {label: _static(label) for label in sweep}, sweep)
            if kind == "static"
            else best_s2(bench, name)
        ),
        ("static", "s2"),
    )
    wanted = sorted({ratio_name(decode), "8P8D"} - {best})
    near = {ratio_name(n): _NEAR[name].get(n, 3.0) for n in (8, decode)}
    others = bench.each(lambda label: bench.capacity(name, _static(label), near=near[label]), wanted)
    capacity = {best: best_found, **dict(zip(wanted, others, strict=True))}
    return name, decode, capacity, best, strong_name, strong


def b3_hybrid_decode(bench: Bench) -> None:
    """An untuned ratio whose decode nodes compute prompts between their steps, against the same without, and s2."""
    system = mesh(8, 8, hybrid=HybridDecodeKind.AUTO)

    def measured(name: str) -> tuple[Measured, Measured, str, Measured]:
        plain, hybrid = bench.each(
            lambda one: bench.capacity(name, one[0], near=one[1]),
            ((mesh(8, 8), _NEAR[name][8]), (system, _HYBRID_NEAR[name])),
        )
        return plain, hybrid, *best_s2(bench, name)

    names = list(_PROTOTYPE)
    for name, (plain, hybrid, strong_name, strong) in zip(names, bench.each(measured, names), strict=True):
        bench.told_capacity("B3", name, "8P8D", mesh(8, 8), plain)
        bench.told_capacity("B3", name, "8P8D, hybrid decode nodes", system, hybrid)
        bench.told_capacity("B3", name, strong_name, S2_SWEEP[strong_name], strong)
        bench.row("B3", f"{name}: hybrid / plain 8P8D", hybrid.over(plain), "ratio", least=1.4,
                  prototype=_PROTOTYPE[name][3])  # fmt: skip
        bench.row("B3", f"{name}: hybrid 8P8D / best s2", hybrid.over(strong), "ratio", prototype=_PROTOTYPE[name][4])


def ratio_name(decode: int) -> str:
    return f"{_NODES - decode}P{decode}D"


def _static(label: str) -> MeshSetup:
    prefill, decode = label.removesuffix("D").split("P")
    return mesh(int(prefill), int(decode))


def best_s2(bench: Bench, name: str) -> tuple[str, Measured]:
    """The best of six settings of s2, which are swept as ratios are, and its capacity."""
    return bench.best_capacity(name, S2_SWEEP, dict.fromkeys(S2_SWEEP, _S2_NEAR[name]))


def _s2(step_share: float, chunk_tokens: int) -> CoupledSetup:
    setup = baseline("s2", _NODES)
    engine = replace(setup.engine, chunk_tokens=chunk_tokens, chunk_step_s=step_share * 0.1)
    return replace(setup, engine=engine)


S2_SWEEP: Final = {f"s2 ({share:g}, {tokens})": _s2(share, tokens) for share, tokens in _S2_SWEEP}


def sized_decode_nodes(work: list[TraceRequest], prefill_s: float, *, nodes: int = _NODES) -> int:
    """Decode nodes of *nodes*, from the mean prefill time and the mean KV residence of *work*."""
    kind = NODES["8xa800"]
    running = int(kind.vram_kv_tokens * _FULL)
    step_s = kind.decode_step_s(int(running * len(work) / sum(r.input_tokens for r in work)), running)
    residence = sum((r.input_tokens + r.output_tokens / 2) * (r.output_tokens - 1) * step_s for r in work) / len(work)
    moments = TrafficMoments(prefill_s=prefill_s, kv_token_s=residence)
    return decode_instances(moments, instances=nodes, kv_capacity_tokens=kind.vram_kv_tokens)
