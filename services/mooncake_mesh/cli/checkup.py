"""What a machine's facts mean for a messenger on it, and the command that mends what is wrong; pure."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.config import TransportKind
from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.messenger.transports.rdma.devices import Device
from mooncake_mesh.messenger.transports.rdma.selection import NoUsableNic, choose_nic, choose_nics

MiB: Final = 1 << 20


class Verdict(enum.Enum):
    """HINT: works, could be better. PROBLEM: what was asked for will not work."""

    GOOD = "good"
    HINT = "hint"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report; ``remedy`` is a command, or what to do, where something can be done."""

    subject: str
    verdict: Verdict
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found out about a machine. ``memlock_bytes`` None: no limit; ``huge_pages``: the kernel's policy."""

    available_bytes: int
    shm_bytes: int
    huge_pages: str | None
    memlock_bytes: int | None
    numa_nodes: int
    devices: tuple[Device, ...]
    verbs_error: str | None


def examine(facts: Facts, *, transport: TransportKind, arena_bytes: int, rdma: RdmaConfig) -> list[Finding]:
    """The report, in order of reading. A lack that concerns RDMA is a problem only where *transport* is rdma."""
    grave = Verdict.PROBLEM if transport is TransportKind.RDMA else Verdict.HINT
    return [
        _memory(facts, arena_bytes),
        _shared_memory(facts),
        _huge_pages(facts),
        _numa(facts),
        _memlock(facts, arena_bytes, grave),
        _verbs(facts, grave),
        *_devices(facts.devices, rdma, grave),
    ]


def _memory(facts: Facts, arena_bytes: int) -> Finding:
    text = f"{_mib(facts.available_bytes)} available, the arena takes {_mib(arena_bytes)}"
    if facts.available_bytes >= arena_bytes:
        return Finding(subject="memory", verdict=Verdict.GOOD, text=text)
    remedy = f"--arena-bytes={facts.available_bytes // 2 // MiB}MiB"
    return Finding(subject="memory", verdict=Verdict.PROBLEM, text=text, remedy=remedy)


def _shared_memory(facts: Facts) -> Finding:
    """The arena is a memory file without a name: it counts as memory and needs no room in /dev/shm."""
    text = f"/dev/shm has {_mib(facts.shm_bytes)}; the arena needs none of it"
    return Finding(subject="shared memory", verdict=Verdict.GOOD, text=text)


def _huge_pages(facts: Facts) -> Finding:
    policy = facts.huge_pages
    if policy is None:
        text = "this kernel has none for shared memory; copies are slower"
        return Finding(subject="huge pages", verdict=Verdict.HINT, text=text)
    if policy in ("advise", "always", "within_size", "force"):
        return Finding(subject="huge pages", verdict=Verdict.GOOD, text=f"shared memory gets them ({policy})")
    return Finding(
        subject="huge pages",
        verdict=Verdict.HINT,
        text=f"shared memory gets none ({policy}); copies are slower",
        remedy="echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _numa(facts: Facts) -> Finding:
    if facts.numa_nodes <= 1:
        return Finding(subject="NUMA", verdict=Verdict.GOOD, text="one node")
    return Finding(
        subject="NUMA",
        verdict=Verdict.HINT,
        text=f"{facts.numa_nodes} nodes; an arena lies where its messenger runs, so tie that to one",
        remedy="numactl --cpunodebind=0 --membind=0 mooncake messenger ...",
    )


def _memlock(facts: Facts, arena_bytes: int, grave: Verdict) -> Finding:
    limit = facts.memlock_bytes
    if limit is None or limit >= arena_bytes:
        text = "no limit" if limit is None else f"{_mib(limit)}, enough to register the arena"
        return Finding(subject="locked memory", verdict=Verdict.GOOD, text=text)
    return Finding(
        subject="locked memory",
        verdict=grave,
        text=f"at most {_mib(limit)}; RDMA has to lock the arena of {_mib(arena_bytes)}",
        remedy="ulimit -l unlimited (lasting: memlock in /etc/security/limits.conf, LimitMEMLOCK= of a systemd unit)",
    )


def _verbs(facts: Facts, grave: Verdict) -> Finding:
    if facts.verbs_error is None:
        return Finding(subject="pyverbs", verdict=Verdict.GOOD, text="can be imported")
    return Finding(
        subject="pyverbs",
        verdict=grave,
        text=facts.verbs_error,
        remedy="sudo apt-get install python3-pyverbs ibverbs-providers (for the system's Python; see docs/rdma.md)",
    )


def _devices(devices: Sequence[Device], rdma: RdmaConfig, grave: Verdict) -> Iterator[Finding]:
    if not devices:
        yield Finding(
            subject="RDMA devices",
            verdict=grave,
            text="none",
            remedy="sudo rdma link add rxe0 type rxe netdev eth0 (software, where the kernel has rdma_rxe)",
        )
        return
    for device in devices:
        try:
            nic = choose_nic(device, rdma)
        except NoUsableNic as refused:
            yield Finding(subject=device.name, verdict=Verdict.HINT, text=f"not usable: {refused}")
            continue
        near = "no NUMA node" if nic.numa_node is None else f"NUMA node {nic.numa_node}"
        text = f"port {nic.port} ({nic.link_layer.value}), GID {nic.gid.index}: {nic.gid.text}, {near}"
        yield Finding(subject=device.name, verdict=Verdict.GOOD, text=text)
    try:
        choose_nics(devices, rdma)
    except NoUsableNic as refused:
        yield Finding(subject="RDMA devices", verdict=grave, text=str(refused), remedy="rdma link; ip address")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes // MiB} MiB"
