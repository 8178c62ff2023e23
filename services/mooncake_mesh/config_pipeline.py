"""Settings of a prefill instance of several stages: which stage a process is, and where the others are.

Stage 0 is the instance's head: it has the queue, the sockets to gateways and decode workers, and the first layers. The
further stages are processes of the same command with ``stage`` above 0.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mooncake_mesh.config_checks import at_least, connected_each
from mooncake_mesh.config_kinds import TransportKind
from mooncake_mesh.config_run_dir import default_run_dir
from mooncake_mesh.kv.layers import StagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """One process of a prefill instance whose layers are spread over ``stages`` processes."""

    stage: Annotated[int, "which stage this process is; 0 is the instance's head"] = 0
    stages: Annotated[int, "stages of the instance, each a process with some of the layers"] = 1
    split: Annotated[str, "layers of each stage, such as 16,14; evenly otherwise"] = ""
    endpoints: Annotated[str, "of the head: endpoints of the stages 1, 2 …, with commas between"] = ""
    run_dir: Annotated[Path, "folder for the sockets of stages on one machine"] = field(default_factory=default_run_dir)
    kv_bytes: Annotated[
        int,
        "of a stage on another node than its head: memory for its layers' KV; 0: for one prompt of the longest context",
    ] = 0
    transport: Annotated[TransportKind, "between stages: auto (shm on one host, else tcp), shm or tcp"] = (
        TransportKind.AUTO
    )
    data_host: Annotated[str, "address where stages on other machines reach this one's data"] = "127.0.0.1"
    advertise_host: Annotated[str, "what others take for data_host, where that is another (NAT, containers)"] = ""
    tcp_tls: Annotated[bool, "encrypt what goes between machines (TLS 1.3), at all stages; needs the extra tls"] = False

    def __post_init__(self) -> None:
        at_least(self, 0, "stage", "kv_bytes")
        at_least(self, 1, "stages")
        if self.transport is TransportKind.RDMA:
            raise ValueError("transport: stages speak shm or tcp, not rdma")
        if self.stage >= self.stages:
            raise ValueError(f"stage: must be below stages ({self.stages}), got {self.stage}")
        if self.split and len(self.layer_counts) != self.stages:
            raise ValueError(f"split: must count the layers of {self.stages} stages, got {self.split!r}")
        if self.stage == 0 and len(self.stage_endpoints) != self.stages - 1:
            raise ValueError(
                f"endpoints: a head of {self.stages} stages needs {self.stages - 1}, got {self.endpoints!r}"
            )
        connected_each("endpoints", self.stage_endpoints)

    @property
    def part(self) -> StagePart | None:
        """The part of the model that this process loads; None for all of it."""
        if self.stages == 1:
            return None
        return StagePart(stage=self.stage, stages=self.stages, split=self.layer_counts)

    @property
    def layer_counts(self) -> tuple[int, ...]:
        return layer_counts("split", self.split)

    @property
    def stage_endpoints(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.endpoints.split(",") if part.strip())


def layer_counts(name: str, text: str) -> tuple[int, ...]:
    """Numbers with commas between, each at least 1; none for an empty text. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: must be numbers above 0 with commas between, got {text!r}")
    return tuple(int(part) for part in parts)
