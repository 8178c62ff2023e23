"""What a machine's facts mean for a messenger on it, and the command that mends what is wrong; pure."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.config import PagesKind, TransportKind
from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.mesh.arena_memory import THP_POLICY, WILLING, huge_pages_of
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
    """What was found out about a machine.

    ``huge_pages``: the kernel's policy for shared memory; ``free_huge_pages``: reserved ones of 2 MiB;
    ``memlock_bytes`` None: no limit.
    """

    available_bytes: int
    shm_bytes: int
    huge_pages: str | None
    free_huge_pages: int
    memlock_bytes: int | None
    numa_nodes: int
    devices: tuple[Device, ...]
    verbs_error: str | None


def examine(
    facts: Facts, *, transport: TransportKind, arena_bytes: int, pages: PagesKind, rdma: RdmaConfig
) -> list[Finding]:
    """The report, in order of reading. A lack that concerns RDMA is a problem only where *transport* is rdma.

    A lack of 2 MiB pages is one only where *pages* asks for them by name.
    """
    grave = Verdict.PROBLEM if transport is TransportKind.RDMA else Verdict.HINT
    return [
        _memory(facts, arena_bytes),
        _shared_memory(facts),
        _pages(facts, pages, arena_bytes),
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


def _pages(facts: Facts, pages: PagesKind, arena_bytes: int) -> Finding:
    wanted, free = huge_pages_of(arena_bytes), facts.free_huge_pages
    is_willing = facts.huge_pages in WILLING
    reserved = f"{free} reserved ones are free, the arena takes {wanted}"
    transparent = f"the kernel gives shared memory transparent ones: {facts.huge_pages or 'not supported'}"
    reserve, allow = f"sudo sysctl vm.nr_hugepages={wanted}", f"echo advise | sudo tee {THP_POLICY}"
    match pages:
        case PagesKind.SMALL:
            return Finding(subject="2 MiB pages", verdict=Verdict.GOOD, text="not asked for")
        case PagesKind.HUGETLB:
            return _found("2 MiB pages", free >= wanted, Verdict.PROBLEM, reserved, reserve)
        case PagesKind.TRANSPARENT:
            return _found("2 MiB pages", is_willing, Verdict.PROBLEM, transparent, allow)
        case _:
            text = reserved if free >= wanted or not is_willing else transparent
            lack = "" if free >= wanted or is_willing else f"; {transparent}; starting and copies are slower"
            return _found(
                "2 MiB pages", free >= wanted or is_willing, Verdict.HINT, text + lack, f"{reserve}, or {allow}"
            )


def _found(subject: str, is_there: bool, lack: Verdict, text: str, remedy: str) -> Finding:
    """A finding whose *remedy* is needed only where something is lacking."""
    return Finding(
        subject=subject,
        verdict=Verdict.GOOD if is_there else lack,
        text=text,
        remedy="" if is_there else remedy,
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
