"""How long work takes, as far as a scheduler can know."""

from dataclasses import dataclass
from typing import Protocol

from mooncake_mesh.policy.views import InstanceView


class CostModel(Protocol):
    """Predictions for one kind of instance. Pure: equal arguments give equal answers, all of them ≥ 0."""

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """To compute *uncached_tokens* behind a prefix of *cached_tokens* that is in local memory."""

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One iteration of *batch* sequences that have *context_tokens* tokens of KV in all."""

    def transfer_s(self, n_bytes: int) -> float:
        """To copy *n_bytes* of KV from one node to another."""


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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.transfer_bytes_per_s == 0:
            raise ValueError("transfer_bytes_per_s: must be positive")

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        return self.prefill_base_s + uncached_tokens * self.prefill_token_s + cached_tokens * self.cached_token_s

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.step_base_s + batch * self.step_sequence_s + context_tokens * self.step_context_token_s

    def transfer_s(self, n_bytes: int) -> float:
        return self.transfer_base_s + n_bytes / self.transfer_bytes_per_s


def instance_prefill_s(instance: InstanceView, cost: CostModel, uncached_tokens: int, cached_tokens: int) -> float:
    """Prefill time on *instance*: by the speed it measured itself where it has, else by the model."""
    if instance.prefill_tokens_per_s > 0:
        return uncached_tokens / instance.prefill_tokens_per_s
    return cost.prefill_s(uncached_tokens, cached_tokens)


def instance_queue_s(instance: InstanceView, cost: CostModel) -> float:
    """Time until *instance* has computed all the prompts it has accepted."""
    if instance.queued_tokens == 0:
        return 0.0
    return instance_prefill_s(instance, cost, instance.queued_tokens, 0)


def instance_step_s(instance: InstanceView, cost: CostModel, added_tokens: int) -> float:
    """Time of a decode step of *instance* once a sequence with *added_tokens* of KV has joined.

    A measured step is scaled by how much the model says the newcomer adds, so a machine that is slower than the model
    looks slower; an idle instance has no step to measure.
    """
    with_it = cost.decode_step_s(instance.running_jobs + 1, instance.running_tokens + added_tokens)
    without = cost.decode_step_s(instance.running_jobs, instance.running_tokens)
    if instance.step_s > 0 and instance.running_jobs > 0 and without > 0:
        return instance.step_s * with_it / without
    return with_it
