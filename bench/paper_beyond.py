"""Group B, capacity: the ratio of prefill to decode nodes, and decode nodes that compute prompts too.

Each against the ratios around it, and against the strong baseline.
"""

from dataclasses import replace
from typing import Final

from bench.nodes import NODES
from bench.paper_runs import TBT_SLO_S, TTFT_SLO_S, Bench, Measured, mesh
from bench.simulator_coupled import CoupledSetup, baseline
from bench.simulator_results import quantile
from bench.traces import TraceRequest
from mooncake_mesh.config_scheduling import HybridDecodeKind
from mooncake_mesh.policy.sizing import TrafficMoments, decode_instances

_NODES: Final = 16
_FULL: Final = 0.9
"""How full of KV a decode node is taken to run: that gives its step time."""

NOT_RUN: Final = "B7 (dynamic roles) is not run yet: the simulated nodes keep their role."
_NEAR: Final = {
    "conversation": {8: 2.1, 2: 2.6, 3: 3.5, 4: 3.2, 5: 3.0},
    "tool-agent": {8: 2.5, 3: 3.7, 4: 3.9, 5: 3.6, 2: 2.5},
    "synthetic": {8: 2.0, 1: 3.5, 2: 4.1, 3: 3.8, 4: 3.4},
}
"""About where capacities lie, by workload and number of decode nodes: searches start there."""

_HYBRID_NEAR: Final = {"conversation": 3.2, "tool-agent": 3.8, "synthetic": 3.6}
_S2_NEAR: Final = {"conversation": 2.5, "tool-agent": 3.0, "synthetic": 2.8}
_S2_SWEEP: Final = ((0.80, 1024), (0.88, 2048), (0.97, 4096))
"""(share of the TBT objective that a mixed step may take, most tokens of a chunk)."""


def b1_b2_sizing(bench: Bench) -> None:
    """Nodes sized from the traffic's moments; the best static ratio beside the best setting of s2."""
    for name, prototype in (("conversation", "3 of 16"), ("tool-agent", "4 of 16"), ("synthetic", "2 of 16")):
        work = bench.workload(name, seed=bench.seeds[0])
        decode = sized_decode_nodes(work, bench.run(work, mesh(8, 8)).mean_prefill_s())
        bench.row("B1", f"{name}: decode nodes of {_NODES} by the sizing rule", Measured([float(decode)]), "nodes",
                  prototype=prototype)  # fmt: skip
        capacity = {n: static_capacity(bench, name, n) for n in sorted({8, decode, max(1, decode - 1), decode + 1})}
        for n, found in capacity.items():
            bench.row("B1", f"{name}: capacity, {_NODES - n}P{n}D", found, "x", prototype="-")
        best = max(capacity.values(), key=lambda found: found.mean)
        bench.row("B1", f"{name}: sized / best of these", capacity[decode].over(best), "ratio", least=0.95,
                  prototype="1.0")  # fmt: skip
        bench.row("B1", f"{name}: sized / 8P8D", capacity[decode].over(capacity[8]), "ratio",
                  least=1.8 if name == "synthetic" else 1.5, prototype="1.68, 1.54, 2.0")  # fmt: skip
        strong = best_s2_capacity(bench, name)
        bench.row("B2", f"{name}: capacity, best s2 of {len(_S2_SWEEP)} settings", strong, "x", prototype="-")
        bench.row("B2", f"{name}: best static ratio / best s2", best.over(strong), "ratio", least=1.2,
                  prototype="1.38, 1.27, 1.45")  # fmt: skip


def b3_hybrid_decode(bench: Bench) -> None:
    """An untuned ratio whose decode nodes compute prompts between their steps, against the same without, and s2."""
    system = mesh(8, 8, hybrid=HybridDecodeKind.AUTO)
    for name, prototype in (("conversation", "1.57"), ("tool-agent", "1.54"), ("synthetic", "1.88")):
        plain, hybrid = static_capacity(bench, name, 8), bench.capacity(name, system, near=_HYBRID_NEAR[name])
        ends = [bench.at(name, system, speed, seed) for speed, seed in zip(hybrid.values, bench.seeds, strict=True)]
        bench.row("B3", f"{name}: capacity, 8P8D", plain, "x", prototype="-")
        bench.row("B3", f"{name}: capacity, 8P8D with hybrid decode nodes", hybrid, "x", prototype="-", baseline=plain)
        bench.row("B3", f"{name}: hybrid / plain 8P8D", hybrid.over(plain), "ratio", least=1.4, prototype=prototype)
        bench.row("B3", f"{name}: good token share there", Measured([end.token_share(TTFT_SLO_S, TBT_SLO_S)
                  for end in ends]), "", prototype="-")  # fmt: skip
        bench.row("B3", f"{name}: TBT P90 there", Measured([quantile(end.tbts(), 0.9) * 1e3 for end in ends]), "ms",
                  prototype="82 (conversation at 3x)")  # fmt: skip
        strong = best_s2_capacity(bench, name)
        bench.row("B3", f"{name}: hybrid / best s2", hybrid.over(strong), "ratio", prototype="1.30, 1.27, 1.33")


def static_capacity(bench: Bench, name: str, decode: int) -> Measured:
    """Of 16 nodes, *decode* of which decode."""
    return bench.capacity(name, mesh(_NODES - decode, decode), near=_NEAR[name].get(decode, 3.0))


def best_s2_capacity(bench: Bench, name: str) -> Measured:
    """The settings are compared at the first seed; the best one runs at all."""
    first = replace(bench, seeds=bench.seeds[:1])
    best = max(
        (_s2(share, tokens) for share, tokens in _S2_SWEEP),
        key=lambda system: first.capacity(name, system, near=_S2_NEAR[name]).mean,
    )
    return bench.capacity(name, best, near=_S2_NEAR[name])


def _s2(step_share: float, chunk_tokens: int) -> CoupledSetup:
    setup = baseline("s2", _NODES)
    engine = replace(setup.engine, chunk_tokens=chunk_tokens, chunk_step_s=step_share * 0.1)
    return replace(setup, engine=engine)


def sized_decode_nodes(work: list[TraceRequest], prefill_s: float, *, nodes: int = _NODES) -> int:
    """Decode nodes of *nodes*, from the mean prefill time and the mean KV residence of *work*."""
    kind = NODES["8xa800"]
    running = int(kind.vram_kv_tokens * _FULL)
    step_s = kind.decode_step_s(int(running * len(work) / sum(r.input_tokens for r in work)), running)
    residence = sum((r.input_tokens + r.output_tokens / 2) * (r.output_tokens - 1) * step_s for r in work) / len(work)
    moments = TrafficMoments(prefill_s=prefill_s, kv_token_s=residence)
    return decode_instances(moments, instances=nodes, kv_capacity_tokens=kind.vram_kv_tokens)
