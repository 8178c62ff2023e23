"""How long work takes, as far as a scheduler can know."""

from dataclasses import dataclass
from typing import Protocol

from mooncake_mesh.policy.views import InstanceView


class StepCost(Protocol):
    """Predictions of decode steps. Pure: equal arguments give equal answers, all of them ≥ 0."""

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One iteration of *batch* sequences that have *context_tokens* tokens of KV in all."""


class CostModel(StepCost, Protocol):
    """Predictions for one kind of instance. Pure, as those of steps are."""

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """To compute *uncached_tokens* behind a prefix of *cached_tokens* that is in local memory."""

    def transfer_s(self, n_bytes: int) -> float:
        """To copy *n_bytes* of KV from one node to another."""

    def ssd_read_s(self, n_bytes: int) -> float:
        """To read *n_bytes* of KV from a node's SSD into its memory, where nothing was measured on that node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Each prediction is a constant and one term per quantity."""

    prefill_base_s: float
    prefill_token_s: float
    cached_token_s: float
    step_base_s: float
    step_sequence_s: float
    step_context_token_s: float
    transfer_base_s: float
    transfer_bytes_per_s: float
    ssd_base_s: float = 0.0005
    ssd_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
        for name in ("transfer_bytes_per_s", "ssd_bytes_per_s"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}: must be positive")

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        return self.prefill_base_s + uncached_tokens * self.prefill_token_s + cached_tokens * self.cached_token_s

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_base_s + batch * self.step_sequence_s + context_tokens * self.step_context_token_s

    def transfer_s(self, n_bytes: int) -> float:
        return self.transfer_base_s + n_bytes / self.transfer_bytes_per_s

    def ssd_read_s(self, n_bytes: int) -> float:
        return self.ssd_base_s + n_bytes / self.ssd_bytes_per_s


def instance_step_s(instance: InstanceView, cost: CostModel, added_tokens: int) -> float:
    """Time of a decode step of *instance* once all that wait and a sequence with *added_tokens* of KV have joined."""
    return instance.factor * cost.decode_step_s(
        instance.running_jobs + instance.waiting_jobs + 1,
        instance.running_tokens + instance.waiting_tokens + added_tokens,
    )
