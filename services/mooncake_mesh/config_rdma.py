"""Settings of the RDMA transport: which NICs, which of their ports and addresses, and how transfers use them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from mooncake_mesh.config_checks import above_zero, at_least

KiB: Final = 1 << 10
MiB: Final = 1 << 20
MTUS: Final = (256, 512, 1024, 2048, 4096)
_LONGEST_RETRY: Final = 6
"""Retries of a lost packet. 7 fits the field too, but some drivers (rxe) take it as "for ever"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """RDMA. Read only where ``transport`` is ``rdma``."""

    devices: Annotated[str, "RDMA devices to use, separated by commas; all that are up when empty"] = ""
    port: Annotated[int | None, "port of each device; its first active one otherwise"] = None
    gid_index: Annotated[int | None, "index in the port's GID table; otherwise the best address that is routed"] = None
    pkey_index: Annotated[int, "index in the port's partition key table"] = 0
    mtu: Annotated[int | None, "largest path MTU in bytes; that of the port otherwise"] = None
    topology: Annotated[Path | None, "JSON file: memory location → [preferred devices], [secondary devices]"] = None
    location: Annotated[str | None, "where the arena lies, as in the topology (cpu:0); found out otherwise"] = None
    slice_bytes: Annotated[int, "size of the pieces that a transfer is cut into and spread by"] = 1 * MiB
    window: Annotated[int, "pieces in flight on each path"] = 16
    attempts: Annotated[int, "how often a piece is tried, each time on another path where there is one"] = 3
    path_rest_s: Annotated[float, "how long a path that failed is left alone while there are others"] = 30.0
    max_queue_pairs: Annotated[int, "queue pairs kept for later transfers, in each direction"] = 256
    ack_timeout: Annotated[int, "exponent of the time that a packet's acknowledgement may take: 4.096 us * 2^n"] = 14
    retries: Annotated[int, "how often the NIC sends a packet that is not acknowledged again"] = _LONGEST_RETRY
    traffic_class: Annotated[int, "traffic class of the packets (RoCE: the IP header's)"] = 0

    def __post_init__(self) -> None:
        at_least(self, 4 * KiB, "slice_bytes")
        at_least(self, 1, "window", "attempts", "max_queue_pairs")
        at_least(self, 0, "pkey_index")
        above_zero(self, "path_rest_s")
        for name, most in (("ack_timeout", 31), ("retries", _LONGEST_RETRY), ("traffic_class", 255)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: must lie in 0..{most}, got {getattr(self, name)}")
        if self.mtu is not None and self.mtu not in MTUS:
            raise ValueError(f"mtu: must be one of {', '.join(map(str, MTUS))}, got {self.mtu}")
        if self.port is not None:
            at_least(self, 1, "port")
        if self.gid_index is not None:
            at_least(self, 0, "gid_index")

    @property
    def device_names(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.devices.split(",") if name.strip())


ALIASES: Final = {
    "MC_IB_PORT": "port",
    "MC_GID_INDEX": "gid_index",
    "MC_PKEY_INDEX": "pkey_index",
    "MC_MTU": "mtu",
    "MC_CUSTOM_TOPO_JSON": "topology",
    "MC_SLICE_SIZE": "slice_bytes",
    "MC_RETRY_CNT": "attempts",
    "MC_IB_TC": "traffic_class",
    "MC_MAX_WR": "window",
    "MC_MAX_EP_PER_CTX": "max_queue_pairs",
}
"""Variables of Mooncake's transfer engine that users have set already → field of :class:`RdmaConfig`."""
