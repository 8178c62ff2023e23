"""What a scheduling decision sees: frozen snapshots, taken by whoever asks.

The taker decides who is in a view: dead, suspect, draining and avoided instances are left out. Work that was placed
since an instance last reported belongs into its view too, or a burst between two heartbeats all goes to one instance.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mooncake_proto.ids import InstanceId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance, prefill or decode; fields that do not apply to its role stay 0.

    ``queued_tokens`` are prompt tokens still to be computed, the running job's rest included. ``running_tokens`` are
    the tokens whose KV the running jobs hold. ``blocks_available`` can be had for a new job: free, or cached and
    unreferenced. ``step_s`` and ``prefill_tokens_per_s`` were measured by the instance, 0 when not (yet) known.
    """

    instance_id: InstanceId
    node_id: NodeId
    blocks_total: int
    blocks_available: int
    queued_jobs: int = 0
    queued_tokens: int = 0
    running_jobs: int = 0
    running_tokens: int = 0
    step_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All instances that may take work now, in any order."""

    prefill: tuple[InstanceView, ...]
    decode: tuple[InstanceView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """One request as far as placing it goes.

    ``prefix_blocks`` maps a node to the longest cached prefix it holds; an absent node holds none.
    """

    prompt_tokens: int
    max_new_tokens: int
    block_tokens: int
    block_bytes: int
    prefix_blocks: Mapping[NodeId, int]

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "max_new_tokens", "block_tokens", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")

    @property
    def usable_prefix_blocks(self) -> int:
        """Most cached blocks that help: one prompt token at least is computed, as its logits draw the first token."""
        return (self.prompt_tokens - 1) // self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Latencies that a placement must be expected to meet; None sets no limit."""

    ttft_s: float | None = None
    tbt_s: float | None = None
