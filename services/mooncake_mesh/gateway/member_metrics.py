"""The members of a mesh as Prometheus metrics: their queues and batches, and the pool of each node by tier."""

from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mooncake_mesh.gateway.metrics import PREFIX
from mooncake_proto.control import MemberState, Role

_WORKERS: Final = (Role.PREFILL, Role.DECODE)
_LABELS: Final = ("role", "instance", "node")


def member_metrics(members: Sequence[MemberState]) -> Iterator[Metric]:
    """Those of the conductor's last report."""
    takes_work = _gauge("instance_takes_work", "1 while the conductor would place a request here")
    queued = _gauge("instance_queued_jobs", "Prefill: prompts that wait; decode: requests whose KV is still to come")
    running = _gauge("instance_running_jobs", "Prompts being computed or sent, sequences being decoded")
    queued_tokens = _gauge("instance_queued_tokens", "Prefill: tokens still to be computed; decode: of the queued jobs")
    swapped = _gauge(
        "instance_swapped_jobs", "Decode: sequences that have left the pool and wait for room to come back"
    )
    preempted = CounterMetricFamily(
        f"{PREFIX}_instance_preemptions", "Decode: how often a sequence made room for another one", labels=_LABELS
    )
    for member in members:
        if member.member.role in _WORKERS:
            who, load = _who(member), member.load
            takes_work.add_metric(who, float(member.takes_work))
            queued.add_metric(who, load.queued_jobs)
            running.add_metric(who, load.running_jobs)
            queued_tokens.add_metric(who, load.queued_tokens)
        if member.member.role is Role.DECODE:
            swapped.add_metric(_who(member), member.load.swapped_jobs)
            preempted.add_metric(_who(member), member.load.preemptions)
    yield from (takes_work, queued, running, queued_tokens, swapped, preempted)
    yield from _pool([member for member in members if member.member.role is Role.MESSENGER])


def _pool(messengers: Sequence[MemberState]) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(f"{PREFIX}_pool_blocks", "Blocks of a node's arena by state", labels=["node", "state"])
    ssd = GaugeMetricFamily(
        f"{PREFIX}_pool_ssd_blocks", "Slots of a node's SSD file by state", labels=["node", "state"]
    )
    sent = CounterMetricFamily(f"{PREFIX}_transferred_bytes", "KV that a node has sent to others", labels=["node"])
    for messenger in messengers:
        node, load = messenger.member.node_id, messenger.load
        blocks.add_metric([node, "free"], load.blocks_free)
        blocks.add_metric([node, "cached"], load.blocks_cached)
        blocks.add_metric([node, "total"], load.blocks_total)
        ssd.add_metric([node, "used"], load.ssd_blocks)
        ssd.add_metric([node, "total"], load.ssd_slots)
        sent.add_metric([node], load.transferred_bytes)
    yield from (blocks, ssd, sent)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=_LABELS)


def _who(state: MemberState) -> list[str]:
    return [state.member.role.value, state.member.instance_id, state.member.node_id]
