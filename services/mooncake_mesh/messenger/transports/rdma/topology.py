"""Which NICs are near which memory; pure.

Memory locations are written cpu:N (NUMA node N) or cuda:N. For each one the matrix has preferred NICs, near it, and
secondary ones for when those fail. It comes from the NUMA nodes of the devices or from the user's own file::

    {"cpu:0": [["mlx5_0", "mlx5_1"], ["mlx5_2", "mlx5_3"]]}
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports.rdma.selection import Nic

ANYWHERE: Final = "*"


class BadTopology(TransferError):
    """The user's topology file cannot be used."""

    code = "bad_topology"
    retryable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """Names of NICs for one memory location, each list in the order of use."""

    preferred: tuple[str, ...]
    secondary: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Memory location → NICs. What it does not know is as near to every NIC as to any other."""

    rows: Mapping[str, Affinity]
    nics: tuple[str, ...]

    def near(self, location: str) -> Affinity:
        return self.rows.get(location) or self.rows.get(ANYWHERE) or Affinity(preferred=self.nics)


def from_numa(nics: Sequence[Nic]) -> Topology:
    """Preferred are the NICs of the memory's own NUMA node; a NIC of no node is near everything."""
    names = tuple(nic.name for nic in nics)
    rows = {}
    for node in {nic.numa_node for nic in nics if nic.numa_node is not None}:
        near = tuple(nic.name for nic in nics if nic.numa_node in (node, None))
        rows[f"cpu:{node}"] = Affinity(preferred=near, secondary=tuple(name for name in names if name not in near))
    return Topology(rows=rows, nics=names)


def from_file(path: Path, nics: Sequence[Nic]) -> Topology:
    """The user's matrix. Raises BadTopology when it is none, or names NICs that are not used here."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadTopology(f"topology {path}: {error}") from error
    if not isinstance(document, dict) or not document:
        raise BadTopology(f"topology {path}: expected an object of memory locations")
    names = tuple(nic.name for nic in nics)
    rows = {location: _row(path, location, row, names) for location, row in document.items()}
    return Topology(rows=rows, nics=names)


def _row(path: Path, location: str, row: Any, known: Collection[str]) -> Affinity:
    is_row = (
        isinstance(row, list)
        and 1 <= len(row) <= 2
        and all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in row)
    )
    if not is_row or not any(row):
        raise BadTopology(f"topology {path}: {location}: expected [[preferred ...], [secondary ...]], got {row!r}")
    unknown = sorted({name for part in row for name in part} - set(known))
    if unknown:
        raise BadTopology(
            f"topology {path}: {location}: {', '.join(unknown)} is not used; there are {', '.join(known)}"
        )
    return Affinity(preferred=tuple(row[0]), secondary=tuple(row[1]) if len(row) > 1 else ())


def location_of(cpus: Collection[int], sysfs: Path) -> str:
    """Where memory lies that a process on *cpus* touches first: their NUMA node, or anywhere when they have several."""
    nodes = {
        entry.name.removeprefix("node")
        for entry in (sysfs / "devices/system/node").glob("node[0-9]*")
        if not _cpu_list((entry / "cpulist").read_text()).isdisjoint(cpus)
    }
    return f"cpu:{nodes.pop()}" if len(nodes) == 1 else ANYWHERE


def _cpu_list(text: str) -> set[int]:
    """The kernel's list format: 0-3,8."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
