"""What a placement takes of the mesh, as far as load goes."""

from dataclasses import dataclass

from mooncake_mesh.policy.decisions import Placed
from mooncake_mesh.policy.views import RequestShape
from mooncake_proto.ids import InstanceId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """One placed request as far as its load goes.

    ``copy_from`` names whose link is taken, for ``copy_bytes``, and ``read_from`` whose disk, for ``read_bytes``.
    """

    prefill: InstanceId
    uncached_tokens: int
    cached_tokens: int
    decode: InstanceId
    decode_blocks: int
    ttft_s: float
    priority: int = 0
    copy_from: NodeId | None = None
    copy_bytes: int = 0
    read_from: NodeId | None = None
    read_bytes: int = 0

    @classmethod
    def of(cls, shape: RequestShape, placed: Placed) -> "PlacedWork":
        cached_blocks = max(placed.local_prefix_blocks, placed.fetch_prefix_blocks)
        copied_blocks = max(0, placed.fetch_prefix_blocks - placed.local_prefix_blocks)
        return cls(
            prefill=placed.prefill,
            uncached_tokens=shape.prompt_tokens - cached_blocks * shape.block_tokens,
            cached_tokens=cached_blocks * shape.block_tokens,
            decode=placed.decode,
            decode_blocks=shape.blocks_for(shape.prompt_tokens),  # what the messenger will report; growth comes later
            ttft_s=placed.ttft_est_s,
            priority=shape.priority,
            copy_from=placed.fetch_node,
            copy_bytes=copied_blocks * shape.block_bytes,
            read_from=placed.read_node,
            read_bytes=placed.read_blocks * shape.block_bytes,
        )
