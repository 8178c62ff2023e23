"""What a mesh counts of its requests, out of the metrics of a gateway: pure."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_ENDED: Final = "mooncake_slo_requests_total"
_NAMES: Final = {
    "good": "mooncake_slo_good_requests_total",
    "wasted_prefill_tokens": "mooncake_wasted_prefill_tokens_total",
    "placed": "mooncake_placements_total",
    "transferred_bytes": "mooncake_transferred_bytes_total",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshCounters:
    """Sums over classes of requests and nodes, of the whole mesh, by its own objectives."""

    ended: int
    good: int
    wasted_prefill_tokens: int
    placed: int
    transferred_bytes: int

    def __sub__(self, before: "MeshCounters") -> "MeshCounters":
        return MeshCounters(
            **{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        )


def read_counters(text: str) -> MeshCounters | None:
    """None when these are not the metrics of a mesh, or its conductor is silent. Raises ValueError for no metrics."""
    samples = [(s.name, s.value) for family in text_string_to_metric_families(text) for s in family.samples]
    if _NAMES["placed"] not in {name for name, _ in samples}:
        return None
    counts = {field: _sum(samples, name) for field, name in _NAMES.items()}
    return MeshCounters(ended=_sum(samples, _ENDED), **counts)


def _sum(samples: Iterable[tuple[str, float]], wanted: str) -> int:
    return int(sum(value for name, value in samples if name == wanted))
