"""Group B: results beyond the papers' (experiments B1 to B7), as far as the scheduler can do them."""

from typing import Final

from bench.nodes import NODES
from bench.paper_runs import TBT_SLO_S, TTFT_SLO_S, Bench, Measured, mesh, run
from bench.simulator_coupled import baseline
from bench.simulator_results import RunResult
from bench.traces import TraceRequest
from mooncake_mesh.config_scheduling import AdmissionKind

_NODES: Final = 16
_HEADROOM: Final = 1.15
_FULL: Final = 0.9
"""How full of KV a decode node is taken to run: that gives its step time."""

NOT_RUN: Final = (
    "B3 hybrid decode nodes, B4 slack-preserving queue and B7 dynamic roles are not run: the cores have none of them "
    "yet. A8 and B5 run `hold` as the cores have it."
)


def b1_sizing(bench: Bench) -> None:
    """The ratio of prefill to decode nodes from the traffic's moments, against the ratios around it."""
    for name, prototype in (("conversation", "3 of 16"), ("tool-agent", "4 of 16"), ("synthetic", "2 of 16")):
        work = bench.workload(name)
        measured = run(work, mesh(8, 8))
        decode = sized_decode_nodes(work, measured.mean_prefill_s())
        bench.row("B1", f"{name}: decode nodes of {_NODES} by the sizing rule", Measured([float(decode)]), "nodes",
                  prototype=prototype)  # fmt: skip
        capacity = {
            n: bench.measured(
                lambda seed, t=name, d=n: bench.capacity(t, mesh(_NODES - d, d), low=1.0, high=5.5, seed=seed)
            )
            for n in sorted({8, decode, max(1, decode - 1), decode + 1})
        }
        for n, found in capacity.items():
            bench.row("B1", f"{name}: capacity, {_NODES - n}P{n}D", found, "x", prototype="-")
        strong = bench.measured(
            lambda seed, t=name: bench.capacity(t, baseline("s2", _NODES), low=1.5, high=4.5, seed=seed)
        )
        best = max(capacity.values(), key=lambda found: found.mean)
        bench.row("B1", f"{name}: sized / best of these", capacity[decode].over(best), "ratio", least=0.95,
                  prototype="1.0")  # fmt: skip
        bench.row("B1", f"{name}: sized / 8P8D", capacity[decode].over(capacity[8]), "ratio",
                  least=1.8 if name == "synthetic" else 1.5, prototype="1.68, 1.54, 2.0")  # fmt: skip
        bench.row("B2", f"{name}: best of these / s2 (one setting)", best.over(strong), "ratio", least=1.2,
                  prototype="1.38, 1.27, 1.45")  # fmt: skip


def sized_decode_nodes(work: list[TraceRequest], prefill_s: float, *, nodes: int = _NODES) -> int:
    """Decode nodes of *nodes*, from the mean prefill time and the mean KV residence of *work*, with headroom."""
    kind = NODES["8xa800"]
    running = int(kind.vram_kv_tokens * _FULL)
    step_s = kind.decode_step_s(int(running * len(work) / sum(r.input_tokens for r in work)), running)
    residence = sum((r.input_tokens + r.output_tokens / 2) * (r.output_tokens - 1) * step_s for r in work) / len(work)
    share = residence / (residence + prefill_s * kind.vram_kv_tokens)
    return min(nodes - 1, max(1, -int(-nodes * share * _HEADROOM // 1)))


def b5_hold(bench: Bench) -> None:
    """The strategies in meshes whose decode nodes are the bottleneck."""
    for name, speed, prefill, decode, tbt_s, least, prototype in (
        ("conversation", 4.0, 13, 3, 0.05, 1.40, "1.60"),
        ("tool-agent", 4.2, 14, 2, TBT_SLO_S, 1.10, "1.14 … 1.16"),
    ):
        runs: dict[AdmissionKind, list[RunResult]] = {
            kind: [
                run(bench.workload(name, speed=speed, seed=seed), mesh(prefill, decode, admission=kind, tbt_s=tbt_s))
                for seed in bench.seeds
            ]
            for kind in AdmissionKind
        }
        case = f"{name} {speed}x {prefill}P{decode}D, TBT {tbt_s * 1e3:.0f} ms"
        for kind, results in runs.items():
            good = Measured([r.share(TTFT_SLO_S, tbt_s) for r in results])
            tokens = Measured([r.token_share(TTFT_SLO_S, tbt_s) for r in results])
            wasted = Measured([r.wasted_tokens(TTFT_SLO_S, tbt_s) / 1e6 for r in results])
            refused = Measured([float(r.rejected) for r in results])
            bench.row("B5", f"{case}: good, {kind.value}", good, "share", prototype="-")
            bench.row("B5", f"{case}: of tokens, {kind.value}", tokens, "share", prototype="-")
            bench.row("B5", f"{case}: wasted prefill, {kind.value}", wasted, "Mtok", prototype="-")
            bench.row("B5", f"{case}: refused, {kind.value}", refused, "requests", prototype="-")
        base, hold = runs[AdmissionKind.BASELINE], runs[AdmissionKind.HOLD]
        bench.row("B5", f"{case}: hold / baseline, good requests", _share(hold, tbt_s).over(_share(base, tbt_s)),
                  "ratio", least=least, prototype=prototype)  # fmt: skip
        change = [
            h.token_share(TTFT_SLO_S, tbt_s) - b.token_share(TTFT_SLO_S, tbt_s) for h, b in zip(hold, base, strict=True)
        ]
        bench.row("B6", f"{case}: hold - baseline, good tokens", Measured(change), "share", least=-0.01,
                  prototype="≥ +0.003")  # fmt: skip


def _share(results: list[RunResult], tbt_s: float) -> Measured:
    return Measured([r.share(TTFT_SLO_S, tbt_s) for r in results])
