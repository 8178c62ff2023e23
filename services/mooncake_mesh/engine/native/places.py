"""Where kernels find the contexts of a decode step."""

from collections.abc import Sequence

import torch


class Places:
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
