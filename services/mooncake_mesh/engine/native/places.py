"""Where layers that attend by themselves find the contexts of a forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class TokenPlaces:
    """Where the next position of each of several sequences goes: contexts (layers, 2, kv_heads, capacity, head_dim)."""

    def __init__(self, contexts: Sequence[torch.Tensor], positions: Sequence[int]) -> None:
        self._contexts = contexts
        self._positions = positions
        self.addresses = torch.tensor([context.data_ptr() for context in contexts])
        self.capacities = torch.tensor([context.shape[3] for context in contexts])
        self.positions = torch.tensor(positions)

    def newest(self) -> torch.Tensor:
        """What was written to the places: (sequences, layers, 2, kv_heads, head_dim)."""
        pairs = zip(self._contexts, self._positions, strict=True)
        return torch.stack([context[:, :, :, position] for context, position in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """Where positions ``start`` onwards of one sequence go: ``context`` (layers, 2, kv_heads, capacity, head_dim) is
    that of the next layers, one or some. It has all before. *wrote* is to be called when theirs are there.
    """

    context: torch.Tensor
    start: int
    wrote: Callable[[], None]


Places = TokenPlaces | ChunkPlace
