"""Settings of layer-wise prefill: when KV is copied between arena and device, and how much of it the device holds."""

import enum
from dataclasses import dataclass
from typing import Annotated

from mooncake_mesh.config_checks import at_least


class Overlap(enum.Enum):
    """Whether KV is copied between arena and device beside the computation, or in turn with it."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseConfig:
    overlap: Annotated[Overlap, "on: load later layers' prefix and store earlier ones' KV while one computes; off"] = (
        Overlap.ON
    )
    least_bytes: Annotated[int, "smallest copy of a layer that is made beside it, on a CPU"] = 1 << 20
    budget: Annotated[int, "layers of a prompt's KV that the device holds at a time; 0 for all"] = 0

    def __post_init__(self) -> None:
        at_least(self, 0, "least_bytes", "budget")
