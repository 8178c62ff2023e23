"""What a stress run knows: which bytes belong under a key, and what was done, found and broken."""

import hashlib
import struct
from collections import Counter, OrderedDict, deque
from time import monotonic
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

_REMEMBERED_CHAINS: Final = 4_000
_REMEMBERED_LINES: Final = 24
_MOST_VIOLATIONS: Final = 20

Bytes = NDArray[np.uint8]


class Contents:
    """The bytes of a block as a function of its name alone: no two words of any two blocks are equal by intent.

    So a block, slice or page in the wrong place is seen, and :meth:`whose` says where it belongs.
    """

    def __init__(self, seed: str, block_bytes: int) -> None:
        self._seed = seed
        self._words = np.arange(block_bytes // 8, dtype=np.uint64)
        self._named: OrderedDict[int, str] = OrderedDict()

    def key(self, chain: str, index: int) -> BlockKey:
        """The key of a chain's block. Chains have no prefix in common."""
        return BlockKey(hashlib.sha256(f"{self._seed} {chain} {index}".encode()).digest()[:BLOCK_KEY_BYTES])

    def block(self, chain: str, index: int) -> Bytes:
        start, step = struct.unpack("<QQ", hashlib.sha256(self.key(chain, index)).digest()[:16])
        words = (self._words + np.uint64(start)) * np.uint64(step | 1)
        self._named[int(words[0])] = f"{chain}[{index}]"
        if len(self._named) > 64 * _REMEMBERED_CHAINS:
            self._named.popitem(last=False)
        return words.view(np.uint8)

    def difference(self, found: Bytes, expected: Bytes) -> str:
        """Where *found* differs from *expected*, and what it is instead, in words."""
        at = np.flatnonzero(found != expected)
        first = int(found[:8].view(np.uint64)[0])
        whose = self._named.get(first, "all zeros" if not found.any() else "nothing known")
        return f"{len(at)} bytes differ, the first at {at[0]}, the last at {at[-1]}; the block begins as {whose}"


class Ledger:
    """Counts, what happened to each chain of late, and every violation. Nothing in it grows with the run."""

    def __init__(self) -> None:
        self.started_s = monotonic()
        self.counts: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.longest_s: dict[str, float] = {}
        self.verified_blocks = 0
        self.written_blocks = 0
        self.violations: list[str] = []
        self._history: OrderedDict[str, deque[str]] = OrderedDict()
        self.recent: deque[str] = deque(maxlen=_REMEMBERED_LINES)

    def note(self, chain: str, what: str) -> None:
        """Something was done with *chain*."""
        lines = self._history.get(chain)
        if lines is None:
            lines = self._history[chain] = deque(maxlen=_REMEMBERED_LINES)
            if len(self._history) > _REMEMBERED_CHAINS:
                self._history.popitem(last=False)
        self._history.move_to_end(chain)
        lines.append(self._stamped(what))

    def took(self, operation: str, seconds: float) -> None:
        self.longest_s[operation] = max(seconds, self.longest_s.get(operation, 0.0))

    def harmed(self, what: str) -> None:
        """A fault was injected, or is over."""
        self.recent.append(self._stamped(what))

    def violation(self, what: str, chain: str | None = None) -> None:
        """Something that may never happen, with the last that was done to its chain and to the nodes."""
        self.counts["violations"] += 1
        if len(self.violations) < _MOST_VIOLATIONS:
            history = [] if chain is None else [f"of {chain}:", *self._history.get(chain, ())]
            lines = [self._stamped(what), *history, "harm done:", *self.recent]
            self.violations.append("\n    ".join(lines))

    def _stamped(self, what: str) -> str:
        return f"{monotonic() - self.started_s:8.3f} {what}"


def table(title: str, counts: "Counter[str] | dict[str, Any]") -> str:
    """Counts under a title, one a line, by name."""
    return "\n".join([title, *[f"  {name:<58} {counts[name]:>10}" for name in sorted(counts)]])
