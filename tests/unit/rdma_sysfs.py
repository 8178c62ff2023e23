"""Made-up sysfs trees of RDMA devices, with the odd corners that real ones have."""

from collections.abc import Mapping
from pathlib import Path

NULL = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe2b:0001"
V1, V2 = "IB/RoCE v1", "RoCE v2"


def mapped(address: str) -> str:
    """An IPv4 address as it stands in a GID table."""
    a, b, c, d = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def add_device(
    sysfs: Path,
    name: str,
    gids: Mapping[int, tuple[str, str]],
    *,
    state: str = "4: ACTIVE",
    layer: str = "Ethernet",
    numa_node: int | None = 0,
    ports: tuple[int, ...] = (1,),
    n_pkeys: int = 1,
) -> None:
    """One device; *gids*: index → (address, kind). Entries in between are empty, as is one after the last."""
    device = sysfs / "class/infiniband" / name
    for number in ports:
        port = device / "ports" / str(number)
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "pkeys"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
        for index in range(max(gids, default=0) + 2):
            address, kind = gids.get(index, (NULL, ""))
            (port / f"gids/{index}").write_text(f"{address}\n")
            if kind:  # reading the attributes of an empty entry fails
                (port / f"gid_attrs/types/{index}").write_text(f"{kind}\n")
                (port / f"gid_attrs/ndevs/{index}").write_text("eth0\n")
        for index in range(n_pkeys):
            (port / f"pkeys/{index}").write_text("0xffff\n")
    if numa_node is not None:
        (device / "device").mkdir()
        (device / "device/numa_node").write_text(f"{numa_node}\n")


def add_numa_node(sysfs: Path, number: int, cpus: str) -> None:
    folder = sysfs / f"devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
