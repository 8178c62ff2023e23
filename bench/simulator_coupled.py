"""Clusters of coupled engines behind a router: what a disaggregated mesh is compared with."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Final

from bench.nodes import NODES, NodeKind
from bench.simulator_clock import VirtualClock
from bench.simulator_engine import Batching, CoupledEngine, EngineSetup, PrefixCache
from bench.simulator_results import GiveUp, RequestRecord, RunResult
from bench.traces import BLOCK_TOKENS, TraceRequest

_ARRIVALS_PER_LOOK: Final = 256


class Router(enum.Enum):
    """ROUND_ROBIN knows nothing; LEAST_OUTSTANDING counts requests; CACHE_AWARE takes the least predicted TTFT."""

    ROUND_ROBIN = "round_robin"
    LEAST_OUTSTANDING = "least_outstanding"
    CACHE_AWARE = "cache_aware"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledSetup:
    """``ttft_limit_s``: a request that is expected to have its first token later is refused; 0 admits everything."""

    instances: int
    engine: EngineSetup
    router: Router = Router.ROUND_ROBIN
    ttft_limit_s: float = 0.0


def baseline(name: str, instances: int, kind: NodeKind = NODES["8xa800"], *, tbt_slo_s: float = 0.1) -> CoupledSetup:
    """The named baselines. ``s2`` is the strong one: chunks by objective, host-memory cache, cache-aware routing."""
    engine = EngineSetup(kind=kind)
    chunked = replace(engine, batching=Batching.CHUNKED)
    adaptive = replace(chunked, chunk_tokens=2048, chunk_step_s=0.88 * tbt_slo_s)
    engines: Final = {
        "vllm": (engine, Router.ROUND_ROBIN),
        "vllm+prefix": (replace(engine, cache=PrefixCache.HBM), Router.ROUND_ROBIN),
        "vllm-chunked": (chunked, Router.ROUND_ROBIN),
        "vllm-chunked+prefix": (replace(chunked, cache=PrefixCache.HBM), Router.ROUND_ROBIN),
        "s1": (replace(chunked, cache=PrefixCache.HBM), Router.CACHE_AWARE),
        "s2": (replace(adaptive, cache=PrefixCache.DRAM), Router.CACHE_AWARE),
        "one-at-a-time": (replace(engine, batching=Batching.ONE_AT_A_TIME), Router.LEAST_OUTSTANDING),
    }
    if name not in engines:
        raise ValueError(f"no baseline {name!r}; there are {', '.join(engines)}")
    setup, router = engines[name]
    return CoupledSetup(instances=instances, engine=setup, router=router)


def simulate_coupled(
    requests: Sequence[TraceRequest],
    setup: CoupledSetup,
    *,
    name: str = "",
    progress: Callable[[int], None] | None = None,
    give_up: GiveUp | None = None,
) -> RunResult:
    """Run *requests*, in order of arrival, to the last token. Deterministic, as :func:`bench.simulator.simulate`."""
    started_s = perf_counter()
    clock = VirtualClock()
    engines = [CoupledEngine(f"vllm{i:03d}", setup.engine, clock) for i in range(setup.instances)]
    records = [
        RequestRecord(
            index=i,
            arrival_s=request.arrival_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            input_blocks=-(-request.input_tokens // BLOCK_TOKENS),
        )
        for i, request in enumerate(requests)
    ]

    def arrive(i: int) -> None:
        if i + 1 < len(requests):
            clock.at(requests[i + 1].arrival_s, lambda: arrive(i + 1))
        if progress is not None:
            progress(i + 1)
        if give_up is not None and i % _ARRIVALS_PER_LOOK == 0 and give_up.is_hopeless(records, i, clock.now_s):
            clock.stop()
            return
        engine, ttft_s = _route(engines, setup.router, i, requests[i])
        records[i].ttft_est_s = ttft_s
        if setup.ttft_limit_s and not engine.surely_within(ttft_s, setup.ttft_limit_s):
            records[i].refused = "ttft_objective"
        else:
            engine.submit(requests[i], records[i])

    if requests:
        clock.at(requests[0].arrival_s, lambda: arrive(0))
    clock.run()
    return RunResult(
        name=name or f"{setup.instances}M", records=records, events=clock.events, wall_s=perf_counter() - started_s
    )


def _route(
    engines: Sequence[CoupledEngine], router: Router, turn: int, request: TraceRequest
) -> tuple[CoupledEngine, float]:
    """The engine for *request*, and when its first token is expected there."""
    match router:
        case Router.ROUND_ROBIN:
            chosen = engines[turn % len(engines)]
        case Router.LEAST_OUTSTANDING:
            chosen = min(engines, key=lambda engine: (engine.outstanding, engine.name))
        case Router.CACHE_AWARE:
            ttft_s, _, best = min(
                (engine.predicted_ttft_s(request), engine.outstanding, i) for i, engine in enumerate(engines)
            )
            return engines[best], ttft_s
    return chosen, chosen.predicted_ttft_s(request)
