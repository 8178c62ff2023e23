"""Settings of what a decode instance does with sequences that make room for others."""

from dataclasses import dataclass
from typing import Annotated, Final

from mooncake_mesh.config_checks import above_zero, at_least

MiB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapConfig:
    """KV that leaves the arena lies in the instance's memory. What finds no room there, or waits too long, is placed
    again."""

    most_bytes: Annotated[int, "memory for the KV of sequences that make room for others"] = 256 * MiB
    patience_s: Annotated[float, "longest time that one of them waits for room to come back"] = 10.0

    def __post_init__(self) -> None:
        at_least(self, 0, "most_bytes")
        above_zero(self, "patience_s")
