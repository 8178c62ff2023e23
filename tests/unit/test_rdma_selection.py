"""Devices, ports and addresses from made-up sysfs trees: the right one, or a reason, never one by accident."""

from pathlib import Path

import pytest

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.messenger.transports.rdma.devices import GidKind, LinkLayer, read_devices
from mooncake_mesh.messenger.transports.rdma.selection import NoUsableNic, choose_nics
from tests.unit.rdma_sysfs import LINK_LOCAL, V1, V2, add_device, mapped

GLOBAL_V6 = "2001:0db8:0000:0000:0000:0000:0000:0001"
ROUTED = {0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2), 2: (mapped("10.0.0.1"), V1), 3: (mapped("10.0.0.1"), V2)}


def chosen(sysfs: Path, config: RdmaConfig | None = None) -> dict[str, tuple[int, int]]:
    """Device → port and GID index."""
    nics = choose_nics(read_devices(sysfs), config or RdmaConfig())
    return {nic.name: (nic.port, nic.gid.index) for nic in nics}


def refusal(sysfs: Path, config: RdmaConfig | None = None) -> str:
    with pytest.raises(NoUsableNic) as refused:
        choose_nics(read_devices(sysfs), config or RdmaConfig())
    assert not refused.value.retryable
    return str(refused.value)


def test_a_machine_without_rdma_has_no_devices(tmp_path: Path) -> None:
    assert read_devices(tmp_path) == ()
    assert refusal(tmp_path) == "this machine has no RDMA device"


def test_what_sysfs_says_is_read(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED, numa_node=1, n_pkeys=2)
    (device,) = read_devices(tmp_path)
    (port,) = device.ports
    assert (device.name, device.numa_node) == ("mlx5_0", 1)
    assert (port.number, port.is_active, port.link_layer, port.n_pkeys) == (1, True, LinkLayer.ETHERNET, 2)
    assert [(gid.index, gid.kind, gid.is_link_local, gid.is_ipv4) for gid in port.gids] == [
        (0, GidKind.INFINIBAND_OR_ROCE_V1, True, False),
        (1, GidKind.ROCE_V2, True, False),
        (2, GidKind.INFINIBAND_OR_ROCE_V1, False, True),
        (3, GidKind.ROCE_V2, False, True),
    ]


def test_a_software_device_belongs_to_no_numa_node(tmp_path: Path) -> None:
    add_device(tmp_path, "rxe0", ROUTED, numa_node=None)
    add_device(tmp_path, "rxe1", ROUTED, numa_node=-1)
    assert [device.numa_node for device in read_devices(tmp_path)] == [None, None]


def test_roce_v2_over_ipv4_is_preferred(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED | {5: (GLOBAL_V6, V2)})
    assert chosen(tmp_path) == {"mlx5_0": (1, 3)}


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ({0: (LINK_LOCAL, V2), 4: (GLOBAL_V6, V2), 5: (mapped("10.0.0.1"), V1)}, 4),
        ({0: (LINK_LOCAL, V2), 3: (GLOBAL_V6, V1), 5: (mapped("10.0.0.1"), V1)}, 5),
        ({0: (mapped("169.254.1.1"), V2), 7: (GLOBAL_V6, V1)}, 7),
    ],
)
def test_the_next_best_address(tmp_path: Path, gids: dict[int, tuple[str, str]], index: int) -> None:
    add_device(tmp_path, "mlx5_0", gids)
    assert chosen(tmp_path) == {"mlx5_0": (1, index)}


def test_a_link_local_address_is_never_taken_by_accident(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", {0: (LINK_LOCAL, V1), 1: (LINK_LOCAL, V2)})
    message = refusal(tmp_path)
    assert "no address that is routed" in message
    assert "gid_index" in message
    assert chosen(tmp_path, RdmaConfig(gid_index=1)) == {"mlx5_0": (1, 1)}  # but on demand it is


def test_an_empty_entry_is_never_taken(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", {3: (mapped("10.0.0.1"), V2), 5: ("fe80:0000:0000:0000:0000:0000:0000:0000", V2)})
    for index in (1, 4, 5, 99):
        assert f"entry {index}" in refusal(tmp_path, RdmaConfig(gid_index=index))


def test_infiniband_is_routed_by_lid_so_its_default_prefix_will_do(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", {0: (LINK_LOCAL, V1)}, layer="InfiniBand")
    assert chosen(tmp_path) == {"mlx5_0": (1, 0)}


def test_devices_that_are_down_are_passed_over_unless_named(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED, state="1: DOWN")
    add_device(tmp_path, "mlx5_1", ROUTED)
    assert chosen(tmp_path) == {"mlx5_1": (1, 3)}
    assert refusal(tmp_path, RdmaConfig(devices="mlx5_0,mlx5_1")) == "mlx5_0: port 1 is DOWN"


def test_a_device_that_is_not_there_is_not_replaced(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED)
    assert refusal(tmp_path, RdmaConfig(devices="mlx5_0,mlx5_7")) == "no RDMA device mlx5_7; this machine has mlx5_0"


def test_the_port_can_be_named(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED, ports=(1, 2))
    assert chosen(tmp_path, RdmaConfig(port=2)) == {"mlx5_0": (2, 3)}
    assert "no port 3" in refusal(tmp_path, RdmaConfig(port=3))


def test_the_partition_key_must_be_there(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED, n_pkeys=2)
    assert chosen(tmp_path, RdmaConfig(pkey_index=1)) == {"mlx5_0": (1, 3)}
    assert "pkey_index is 2" in refusal(tmp_path, RdmaConfig(pkey_index=2))


def test_every_reason_is_told_when_nothing_is_usable(tmp_path: Path) -> None:
    add_device(tmp_path, "mlx5_0", ROUTED, state="1: DOWN")
    add_device(tmp_path, "mlx5_1", {})
    message = refusal(tmp_path)
    assert "mlx5_0: port 1 is DOWN" in message
    assert "mlx5_1: port 1 has no address" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("mtu", 1500), ("retries", 7), ("ack_timeout", 32), ("window", 0), ("attempts", 0), ("slice_bytes", 100)],
)
def test_settings_are_checked(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        RdmaConfig(**{field: value})  # type: ignore[arg-type]
