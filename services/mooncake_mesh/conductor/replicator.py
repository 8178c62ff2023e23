"""Which hot prefix is copied now: the policy's rule over what the conductor has seen. Pure."""

from mooncake_mesh.policy.cost_model import CostModel
from mooncake_mesh.policy.decisions import Placed
from mooncake_mesh.policy.replication import HotPrefixes, Replica, longest_prefix, replica, rest_s
from mooncake_mesh.policy.views import ClusterView, RequestShape
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey, NodeId


class Replicator:
    """Hears of every placement. *share* is how much of a link's time copies may take, above 0."""

    def __init__(self, cost: CostModel, share: float) -> None:
        self._cost = cost
        self._share = share
        self._hot = HotPrefixes()
        self._resting_until_s: dict[NodeId, float] = {}

    def placed(self, shape: RequestShape, keys: bytes, placed: Placed, cluster: ClusterView) -> Replica | None:
        """The copy to make now that a request with *keys* was placed; it counts as made."""
        blocks = longest_prefix(shape)
        if not blocks:
            return None
        last = BlockKey(keys[(blocks - 1) * BLOCK_KEY_BYTES : blocks * BLOCK_KEY_BYTES])
        cached_tokens = max(placed.local_prefix_blocks, placed.fetch_prefix_blocks) * shape.block_tokens
        work_s = self._cost.prefill_s(shape.prompt_tokens - cached_tokens, cached_tokens)
        heat = self._hot.hit(last, work_s, cluster.now_s)
        copy = replica(shape, placed.prefill, heat, cluster, self._cost, self._resting_until_s)
        if copy is not None:
            copy_s = self._cost.transfer_s(copy.blocks * shape.block_bytes)
            self._resting_until_s[copy.source] = cluster.now_s + copy_s + rest_s(copy_s, self._share)
        return copy
