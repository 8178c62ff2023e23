"""Which device, which of its ports and which of that port's addresses to use; pure.

The mistakes that this prevents are well known: a port that is down, a link-local GID that no router knows, an empty
entry of the GID table, RoCE v1 where the fabric routes v2. What the user names is used or refused, never replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports.rdma.devices import Device, Gid, GidKind, LinkLayer, Port


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A device with the port and address that transfers use."""

    name: str
    port: int
    link_layer: LinkLayer
    gid: Gid
    pkey_index: int
    numa_node: int | None


class NoUsableNic(TransferError):
    """No RDMA device can be used as configured; the message says for each one why."""

    code = "no_usable_nic"
    retryable = False


def choose_nics(devices: Sequence[Device], config: RdmaConfig) -> tuple[Nic, ...]:
    """NICs for *config*, in the order of the devices. Raises NoUsableNic.

    A device that the user named must be usable; of those nobody named, the ones that are not are passed over.
    """
    wanted = config.device_names
    unknown = sorted(set(wanted) - {device.name for device in devices})
    if unknown:
        there = ", ".join(device.name for device in devices) or "none"
        raise NoUsableNic(f"no RDMA device {', '.join(unknown)}; this machine has {there}")
    nics, refusals = [], []
    for device in devices:
        if wanted and device.name not in wanted:
            continue
        try:
            nics.append(choose_nic(device, config))
        except NoUsableNic as refused:
            if wanted:
                raise
            refusals.append(str(refused))
    if not nics:
        raise NoUsableNic("; ".join(refusals) or "this machine has no RDMA device")
    return tuple(nics)


def choose_nic(device: Device, config: RdmaConfig) -> Nic:
    """Port and address of one device. Raises NoUsableNic."""
    port = _choose_port(device, config.port)
    if config.pkey_index >= max(port.n_pkeys, 1):
        raise NoUsableNic(
            f"{device.name}: port {port.number} has {port.n_pkeys} partition keys, pkey_index is {config.pkey_index}"
        )
    return Nic(
        name=device.name,
        port=port.number,
        link_layer=port.link_layer,
        gid=_choose_gid(device, port, config.gid_index),
        pkey_index=config.pkey_index,
        numa_node=device.numa_node,
    )


def _choose_port(device: Device, number: int | None) -> Port:
    states = ", ".join(f"port {port.number} is {port.state}" for port in device.ports) or "it has no port"
    candidates = [port for port in device.ports if number is None or port.number == number]
    if not candidates:
        raise NoUsableNic(f"{device.name}: no port {number}: {states}")
    active = [port for port in candidates if port.is_active]
    if not active:
        raise NoUsableNic(f"{device.name}: {states}")
    return active[0]


def _choose_gid(device: Device, port: Port, index: int | None) -> Gid:
    if index is not None:
        return _named_gid(device, port, index)
    usable = [gid for gid in port.gids if not gid.is_null and _is_routed(port, gid)]
    if not usable:
        found = ", ".join(f"{gid.index}: {gid.text} ({gid.kind.value})" for gid in port.gids) or "none"
        raise NoUsableNic(
            f"{device.name}: port {port.number} has no address that is routed (GIDs: {found}); "
            "give its network interface an IP address, or name an entry with gid_index"
        )
    return min(usable, key=lambda gid: (_rank(gid), gid.index))


def _named_gid(device: Device, port: Port, index: int) -> Gid:
    """The entry that the user asked for. A link-local one is the user's choice, an empty one can be nobody's."""
    gid = next((gid for gid in port.gids if gid.index == index), None)
    if gid is None or gid.is_null:
        raise NoUsableNic(f"{device.name}: entry {index} of the GID table of port {port.number} is empty")
    return gid


def _is_routed(port: Port, gid: Gid) -> bool:
    """InfiniBand routes by LID: there the link-local prefix is the default one and harmless."""
    return port.link_layer is LinkLayer.INFINIBAND or not gid.is_link_local


def _rank(gid: Gid) -> int:
    """RoCE v2 before v1 (it is routed by IP), and an IPv4 address first (it is what fabrics are set up for)."""
    return 2 * (gid.kind is not GidKind.ROCE_V2) + (not gid.is_ipv4)
