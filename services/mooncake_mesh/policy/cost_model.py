"""How long work takes, as far as a scheduler can know."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Final, Protocol

from mooncake_mesh.policy.views import InstanceView


class StepCost(Protocol):
    """Predictions of decode steps. Pure: equal arguments give equal answers, all of them ≥ 0."""

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """One iteration of *batch* sequences that have *context_tokens* tokens of KV in all."""


class PromptAndStepCost(StepCost, Protocol):
    """Predictions of what an instance computes."""

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """To compute *uncached_tokens* behind a prefix of *cached_tokens* that is in local memory."""


class CostModel(PromptAndStepCost, Protocol):
    """Predictions for one kind of instance. Pure, as those of steps are."""

    def transfer_s(self, n_bytes: int) -> float:
        """To copy *n_bytes* of KV from one node to another."""

    def ssd_read_s(self, n_bytes: int) -> float:
        """To read *n_bytes* of KV from a node's SSD into its memory, where nothing was measured on that node."""

    def mixed_step_s(self, batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
        """A step of *batch* sequences, and *chunk_tokens* of a prompt behind *chunk_start* others, on one instance.

        Without a batch the chunk alone.
        """


def one_after_the_other_s(
    cost: "PromptAndStepCost", batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int
) -> float:
    """The ``mixed_step_s`` of an engine that computes the chunk first and then the step."""
    chunk_s = cost.prefill_s(chunk_tokens, chunk_start)
    return chunk_s + cost.decode_step_s(batch, context_tokens) if batch else chunk_s


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

    def mixed_step_s(self, batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
        return one_after_the_other_s(self, batch, context_tokens, chunk_tokens, chunk_start)


@dataclass(frozen=True, slots=True)
class CopyCorrected:
    """A cost model whose copies between nodes take *factor* times as long."""

    cost: CostModel
    factor: float

    def prefill_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        return self.cost.prefill_s(uncached_tokens, cached_tokens)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        return self.cost.decode_step_s(batch, context_tokens)

    def transfer_s(self, n_bytes: int) -> float:
        return self.factor * self.cost.transfer_s(n_bytes)

    def ssd_read_s(self, n_bytes: int) -> float:
        return self.cost.ssd_read_s(n_bytes)

    def mixed_step_s(self, batch: int, context_tokens: int, chunk_tokens: int, chunk_start: int) -> float:
        return self.cost.mixed_step_s(batch, context_tokens, chunk_tokens, chunk_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFactors:
    """By how much a kind of instance is slower than the cost model says, before anything was observed of one."""

    prefill: float = 1.0
    step: float = 1.0


def kind_factors(kind: CostModel, base: CostModel) -> KindFactors:
    """Where the mesh is priced by *base*: geometric means over short and long work."""
    return KindFactors(
        prefill=_ratio([(kind.prefill_s(n, p), base.prefill_s(n, p)) for n, p in _PROMPTS]),
        step=_ratio([(kind.decode_step_s(b, t), base.decode_step_s(b, t)) for b, t in _BATCHES]),
    )


_PROMPTS: Final = ((256, 0), (2048, 0), (8192, 0), (512, 4096))
_BATCHES: Final = ((1, 1024), (8, 8192), (32, 65536))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    known = [log(ours / theirs) for ours, theirs in pairs if ours > 0 and theirs > 0]
    return exp(sum(known) / len(known)) if known else 1.0


def instance_step_s(instance: InstanceView, cost: CostModel, added_tokens: int) -> float:
    """Time of a decode step of *instance* once all that wait and a sequence with *added_tokens* of KV have joined."""
    return instance.factor * cost.decode_step_s(
        instance.running_jobs + instance.waiting_jobs + 1,
        instance.running_tokens + instance.waiting_tokens + added_tokens,
    )
