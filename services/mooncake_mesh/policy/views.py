"""What a scheduling decision sees: frozen snapshots, taken by whoever asks.

The taker decides who is in a view: dead, suspect, draining and avoided instances are left out. Work that was placed
since an instance last reported belongs into its view too, or a burst between two heartbeats all goes to one instance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from mooncake_proto.ids import InstanceId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedPrompt:
    """A prompt of ``tokens`` that an instance has accepted and will compute in ``prefill_s``.

    Lower ``priority`` is more urgent. A prompt of equal priority that is due before ``due_s`` overtakes it, if it is
    still computed by ``latest_s`` then; None: nobody does.
    """

    tokens: int
    prefill_s: float
    priority: int = 0
    due_s: float | None = None
    latest_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance, prefill or decode; fields that do not apply to its role keep their defaults.

    Prefill: ``queue`` are the accepted prompts that are not computed yet, next one first; all are by ``busy_until_s``.
    ``least_urgent`` is the largest priority among them; ``is_ordered``: a prompt that comes may overtake some of them.
    Decode: running jobs are in the batch, waiting ones have their KV still to come; ``sequences`` are the (tokens,
    decoded tokens) of the running ones, ``step_s`` is how long a step takes of late, and ``kv_limit_tokens`` how much
    KV it can run within the TBT objective, 0 for no limit but its blocks; ``max_batch`` sequences fit a step, 0 if
    that is not known. The prompts that it computes itself are by ``busy_until_s``, its steps not counted.
    ``blocks_available`` can be had for a new job: free, or cached and unreferenced. ``factor`` is by how much the
    instance is slower than the cost model says, as observed, and ``pace`` the same as far as it is known for sure;
    instances are compared by that, and those of prompts, which nothing else is asked of, have it as their factor.
    """

    instance_id: InstanceId
    node_id: NodeId
    blocks_total: int
    blocks_available: int
    busy_until_s: float = 0.0
    queue: Sequence[QueuedPrompt] = ()
    least_urgent: int = 0
    is_ordered: bool = False
    running_jobs: int = 0
    running_tokens: int = 0
    waiting_jobs: int = 0
    waiting_tokens: int = 0
    sequences: tuple[tuple[int, int], ...] = ()
    step_s: float = 0.0
    kv_limit_tokens: int = 0
    max_batch: int = 0
    factor: float = 1.0
    pace: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All instances that may take work at ``now_s``, in any order.

    ``egress_wait_s`` is how long a node's pending copies to others will keep its link busy; an absent node is idle.
    ``disk_wait_s`` is the same for reads from its SSD, ``disk_bytes_per_s`` how fast that was read of late.
    ``ttft_s`` and ``decode_s`` are the mean times of late from arrival to first token and from there to the last; 0
    when not (yet) known.
    """

    prefill: Sequence[InstanceView]
    decode: Sequence[InstanceView]
    now_s: float = 0.0
    egress_wait_s: Mapping[NodeId, float] = field(default_factory=dict)
    disk_wait_s: Mapping[NodeId, float] = field(default_factory=dict)
    disk_bytes_per_s: Mapping[NodeId, float] = field(default_factory=dict)
    ttft_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """One request as far as placing it goes.

    ``prefix_blocks`` maps a node to the longest cached prefix it holds; an absent node holds none. Where ``ssd_starts``
    has the node, only so many blocks of it can be used at once, and the others are read from its SSD. ``draw`` is a
    number from the caller's seeded generator, for what is left to chance.
    """

    prompt_tokens: int
    max_new_tokens: int
    block_tokens: int
    block_bytes: int
    prefix_blocks: Mapping[NodeId, int]
    ssd_starts: Mapping[NodeId, int] = field(default_factory=dict)
    draw: int = 0
    priority: int = 0

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
