"""The conductor's report under vLLM's metric names: the pool as the KV cache of an engine, and preemptions: pure."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mooncake_mesh.gateway.vllm_metrics import ENGINE, LABELS, PREFIX
from mooncake_proto.control import Health, Load, MemberState, ModelCard, Role


def vllm_mesh_metrics(members: Sequence[MemberState]) -> Iterator[Metric]:
    """Of the members of the conductor's last report. Without workers no model is known, and nothing is told of one."""
    there = [state for state in members if state.health is not Health.DEAD]
    cards = {state.member.model.name: state.member.model for state in there if state.member.model is not None}
    pool = [state.load for state in there if state.member.role is Role.MESSENGER]
    yield from _cache(list(cards.values()), pool)
    yield _preemptions(there)


def _cache(cards: Sequence[ModelCard], pool: Sequence[Load]) -> Iterator[Metric]:
    """Cached blocks that nobody uses are free, as with vLLM: they make room for others."""
    usage = GaugeMetricFamily(
        f"{PREFIX}:kv_cache_usage_perc", "Part of the pool's blocks that are in use, from 0 to 1", labels=LABELS
    )
    config = GaugeMetricFamily(
        f"{PREFIX}:cache_config_info",
        "The blocks of the pool, wherever they lie",
        labels=[*LABELS, "block_size", "num_gpu_blocks"],
    )
    total = sum(load.blocks_total for load in pool)
    available = sum(load.blocks_free + load.blocks_evictable for load in pool)
    for card in cards if total else ():
        usage.add_metric([card.name, ENGINE], 1 - available / total)
        config.add_metric([card.name, ENGINE, str(card.block_tokens), str(total)], 1)
    yield from (usage, config)


def _preemptions(members: Sequence[MemberState]) -> Metric:
    """One series for each decode worker: its count starts again with it, which a sum would hide from ``rate``."""
    preempted = CounterMetricFamily(
        f"{PREFIX}:num_preemptions", "How often a sequence made room for another one", labels=LABELS
    )
    for state in members:
        if state.member.role is Role.DECODE and state.member.model is not None:
            preempted.add_metric([state.member.model.name, state.member.instance_id], state.load.preemptions)
    return preempted
