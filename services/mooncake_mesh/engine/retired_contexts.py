"""Contexts of sequences that are over, under the keys of their blocks.

The next turn of a conversation, or another question to the same document, begins where one of them ends or branches
off. Equal keys mean equal K and V, whoever computed them, so a sequence behind the same prefix may have the context for
its own and overwrite what it does not share.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mooncake_proto.ids import BlockKey


class Sized(Protocol):
    """What is kept: ``n_bytes`` of the device."""

    @property
    def n_bytes(self) -> int: ...


_C = TypeVar("_C", bound=Sized)


@dataclass(frozen=True, slots=True, eq=False)
class _Retired(Generic[_C]):
    keys: Sequence[BlockKey]
    context: _C


class RetiredContexts(Generic[_C]):
    """Oldest first. Its owner bounds it, by :meth:`drop_oldest`."""

    def __init__(self) -> None:
        self._retired: deque[_Retired[_C]] = deque()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._retired)

    def add(self, context: _C, keys: Sequence[BlockKey]) -> None:
        """*context* begins with the blocks *keys*, one at least."""
        self._retired.append(_Retired(keys, context))
        self.n_bytes += context.n_bytes

    def take(self, keys: Sequence[BlockKey]) -> tuple[_C, int] | None:
        """A context that shares most blocks with *keys*, and how many; it is not here any more.

        None where that would throw away more than it saves: a context that shares less than half of what it holds.
        """
        best, best_blocks = None, 0
        for retired in self._retired:
            shared = shared_blocks(retired.keys, keys)
            if shared >= max(1, best_blocks) and 2 * shared >= len(retired.keys):
                best, best_blocks = retired, shared
        if best is None:
            return None
        self._retired.remove(best)
        self.n_bytes -= best.context.n_bytes
        return best.context, best_blocks

    def drop_oldest(self) -> None:
        """Raises IndexError without any."""
        self.n_bytes -= self._retired.popleft().context.n_bytes

    def clear(self) -> None:
        self._retired.clear()
        self.n_bytes = 0


def shared_blocks(keys: Sequence[BlockKey], others: Sequence[BlockKey]) -> int:
    """How many blocks both begin with. A key stands for all before it, so the first difference is the end."""
    return bisect_left(range(min(len(keys), len(others))), True, key=lambda index: keys[index] != others[index])
