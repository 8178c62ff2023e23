"""What RDMA devices a machine has, read from sysfs. Nothing here needs libibverbs; tests point it at a made-up tree."""

import enum
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys")


class LinkLayer(enum.Enum):
    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"


class GidKind(enum.Enum):
    """As sysfs names them. The kernel has one name for both an InfiniBand GID and one of RoCE v1."""

    INFINIBAND_OR_ROCE_V1 = "IB/RoCE v1"
    ROCE_V2 = "RoCE v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid:
    """One entry of a port's GID table; ``netdev`` is the network interface it belongs to, "" where it has none."""

    index: int
    address: ipaddress.IPv6Address
    kind: GidKind
    netdev: str

    @property
    def is_null(self) -> bool:
        """No interface part: nothing was put into this entry yet."""
        return int(self.address) & (2**64 - 1) == 0

    @property
    def is_link_local(self) -> bool:
        """fe80::/10. On Ethernet nothing routes it, and it is there long before the address that was meant."""
        mapped = self.address.ipv4_mapped
        return self.address.is_link_local if mapped is None else mapped.is_link_local

    @property
    def is_ipv4(self) -> bool:
        return self.address.ipv4_mapped is not None

    @property
    def text(self) -> str:
        """The address as people write it."""
        mapped = self.address.ipv4_mapped
        return str(self.address) if mapped is None else f"::ffff:{mapped}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    number: int
    state: str
    link_layer: LinkLayer
    rate: str
    gids: tuple[Gid, ...]
    n_pkeys: int

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """``numa_node`` is None where the device belongs to none (software devices, machines with one node)."""

    name: str
    numa_node: int | None
    ports: tuple[Port, ...]


def read_devices(sysfs: Path = SYSFS) -> tuple[Device, ...]:
    """All RDMA devices, by name. Empty on a machine without any; what cannot be read of one is left out."""
    folder = sysfs / "class/infiniband"
    if not folder.is_dir():
        return ()
    return tuple(_device(path) for path in sorted(folder.iterdir()))


def _device(path: Path) -> Device:
    node = _number(path / "device/numa_node")
    ports = path / "ports"
    numbers = sorted(int(entry.name) for entry in ports.iterdir()) if ports.is_dir() else []
    return Device(
        name=path.name,
        numa_node=None if node is None or node < 0 else node,
        ports=tuple(_port(ports / str(number), number) for number in numbers),
    )


def _port(path: Path, number: int) -> Port:
    layer = _text(path / "link_layer")
    return Port(
        number=number,
        state=(_text(path / "state") or "unknown").rpartition(":")[2].strip(),  # "4: ACTIVE"
        link_layer=LinkLayer.ETHERNET if layer == LinkLayer.ETHERNET.value else LinkLayer.INFINIBAND,
        rate=_text(path / "rate") or "",
        gids=tuple(_gids(path)),
        n_pkeys=sum(1 for _ in (path / "pkeys").iterdir()) if (path / "pkeys").is_dir() else 0,
    )


def _gids(port: Path) -> Iterator[Gid]:
    folder = port / "gids"
    for index in sorted(int(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ():
        address = _text(folder / str(index))
        if address is None or not address.strip("0:"):
            continue
        kind = _text(port / f"gid_attrs/types/{index}")
        yield Gid(
            index=index,
            address=ipaddress.IPv6Address(address),
            kind=GidKind.ROCE_V2 if kind == GidKind.ROCE_V2.value else GidKind.INFINIBAND_OR_ROCE_V1,
            netdev=_text(port / f"gid_attrs/ndevs/{index}") or "",
        )


def _number(path: Path) -> int | None:
    text = _text(path)
    return None if text is None else int(text)


def _text(path: Path) -> str | None:
    """None for a file that is not there or has no value: empty GID entries answer EINVAL."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
