"""Paths between two nodes: a NIC here and a NIC there. Which to use first, and which failed lately; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_mesh.messenger.transports.rdma.topology import Affinity


class Path(NamedTuple):
    """``peer`` is the engine at the other end, the NICs are those of either end."""

    peer: str
    local_nic: str
    remote_nic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """All paths between two memories, in groups: a slice takes one of a later group only where the earlier ones fail.

    The first group uses every preferred NIC of both ends once, or as few times as their numbers allow: a transfer
    that is spread over it loads all of them and needs no more queue pairs than that.
    """

    groups: tuple[tuple[Path, ...], ...]


def tiers(peer: str, local: Affinity, remote: Affinity) -> Tiers:
    """Paths from memory that is near *local* NICs to memory that is near *remote* ones."""
    spread = _diagonal(peer, local.preferred, remote.preferred)
    near = _all_pairs(peer, local.preferred, remote.preferred)
    far = _all_pairs(peer, (*local.preferred, *local.secondary), (*remote.preferred, *remote.secondary))
    groups: list[tuple[Path, ...]] = []
    known: set[Path] = set()
    for candidates in (spread, near, far):
        fresh = tuple(path for path in dict.fromkeys(candidates) if path not in known)
        known.update(fresh)
        if fresh:
            groups.append(fresh)
    return Tiers(groups=tuple(groups))


def _diagonal(peer: str, local: Sequence[str], remote: Sequence[str]) -> list[Path]:
    if not local or not remote:
        return []
    n = max(len(local), len(remote))
    return [Path(peer, local[i % len(local)], remote[i % len(remote)]) for i in range(n)]


def _all_pairs(peer: str, local: Sequence[str], remote: Sequence[str]) -> list[Path]:
    return [Path(peer, here, there) for here in local for there in remote]


class PathHealth:
    """Which paths failed lately, for all transfers of an engine.

    A path that failed rests: others are taken as long as there are any. When its rest is over it is tried again, and
    one success makes it as good as new.
    """

    def __init__(self, rest_s: float) -> None:
        self._rest_s = rest_s
        self._rests_until: dict[Path, float] = {}

    def failed(self, path: Path, now_s: float) -> None:
        over = [other for other, until_s in self._rests_until.items() if until_s <= now_s]
        for other in over:  # so that paths to peers that are gone are not kept for ever
            del self._rests_until[other]
        self._rests_until[path] = now_s + self._rest_s

    def worked(self, path: Path) -> None:
        self._rests_until.pop(path, None)

    def is_resting(self, path: Path, now_s: float) -> bool:
        return self._rests_until.get(path, now_s) > now_s

    def usable(self, paths: Tiers, avoid: frozenset[Path], now_s: float) -> tuple[Path, ...]:
        """The group to spread over now, in order of preference; never empty while *paths* has any.

        Avoided are resting paths and those in *avoid* (this slice failed there already). Where that leaves none, the
        path outside *avoid* whose rest ends first, else simply the one whose rest ends first: trying it is better than
        giving up.
        """
        for group in paths.groups:
            rested = tuple(path for path in group if path not in avoid and not self.is_resting(path, now_s))
            if rested:
                return rested
        every = [path for group in paths.groups for path in group]
        others = [path for path in every if path not in avoid] or every
        return (min(others, key=lambda path: self._rests_until.get(path, 0.0)),) if others else ()
