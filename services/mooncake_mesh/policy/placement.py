"""Where a request runs: the pair of instances, where its cached prefix comes from, or why it is not let in.

The prefill instance is chosen by one of the policies of :mod:`~mooncake_mesh.policy.prefill_choice`; decoding goes to
the instance with the shortest expected step, or both to one decode instance where
:mod:`~mooncake_mesh.policy.hybrid` says so; :mod:`~mooncake_mesh.policy.admission` has the last word.

Pure functions of snapshots: no clock, no randomness, and nothing depends on the order of a view. Where instances are as
good as each other, one is taken by the request's draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, PlacementKind
from mooncake_mesh.policy.admission import Admission, admission_refusal
from mooncake_mesh.policy.cost_model import CostModel, instance_step_s
from mooncake_mesh.policy.decisions import Placed, Refused, contended, unavailable
from mooncake_mesh.policy.hybrid import inline_choice, longest_step_s
from mooncake_mesh.policy.prefill_choice import PREFILL_POLICIES, Estimates, drawn
from mooncake_mesh.policy.roles import RoleRules
from mooncake_mesh.policy.views import ClusterView, InstanceView, Objectives, RequestShape
from mooncake_proto.ids import InstanceId

GROWTH_TOKENS: Final = 256
"""How many of its new tokens a decode instance must have room for. Most answers end within it; asking for all of
``max_new_tokens`` would refuse work for room that is hardly ever used."""

_AS_GOOD: Final = 1.01
"""Steps that differ by less than a hundredth are as good as each other: batches change by more between two reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduling:
    """Which policies decide. ``threshold`` is the papers' ``kvcache_balancing_threshold``.

    ``replication_share`` is how much of the time of a node's link copies of hot prefixes may take that no request
    waits for; with 0 there are none. ``hybrid_step_s`` is how long a decode instance's step may take while it computes
    a prompt, None: a share of the TBT objective. ``roles`` lets instances that can switch their role do so.
    """

    placement: PlacementKind = PlacementKind.ADAPTIVE
    threshold: float = 2.0
    replication_share: float = 0.0
    admission: Admission = field(default_factory=Admission)
    hybrid_decode: HybridDecodeKind = HybridDecodeKind.OFF
    roles: RoleRules | None = None
    hybrid_step_s: float | None = None


DEFAULT_SCHEDULING: Final = Scheduling()


def place(
    request: RequestShape,
    cluster: ClusterView,
    cost: CostModel,
    objectives: Objectives,
    scheduling: Scheduling = DEFAULT_SCHEDULING,
) -> Placed | Refused:
    """Choose instances for *request*, or say why not."""
    prefill_blocks = request.blocks_for(request.prompt_tokens)
    decode_blocks = _decode_blocks_for(request)
    prefill = _able("prefill", cluster.prefill, prefill_blocks, scheduling.admission.kind)
    if isinstance(prefill, Refused):
        return prefill
    decode = _able("decode", cluster.decode, decode_blocks, scheduling.admission.kind)
    if isinstance(decode, Refused):
        return decode
    choose = PREFILL_POLICIES[scheduling.placement]
    estimates = Estimates(request, cluster, cost)
    first = choose(request, prefill, cluster, estimates, scheduling.threshold)
    tbt_s, decode_id = _quickest(request, decode, cost)
    inline = None
    if scheduling.hybrid_decode is HybridDecodeKind.AUTO:
        limit_s = scheduling.hybrid_step_s or longest_step_s(objectives)
        inline = inline_choice(request, decode, cluster, estimates, cost, limit_s, sooner_than_s=first.ttft_s)
    if inline is not None:
        first, decode_id = inline.prompt, inline.prompt.instance.instance_id
        tbt_s = instance_step_s(inline.prompt.instance, cost, request.prompt_tokens)
    placed = Placed(
        prefill=first.instance.instance_id,
        decode=decode_id,
        local_prefix_blocks=first.local_blocks,
        fetch_node=first.fetch_node,
        fetch_prefix_blocks=first.fetch_blocks,
        ttft_est_s=first.ttft_s,
        tbt_est_s=tbt_s,
        read_node=first.read_node,
        read_blocks=first.read_blocks,
        read_limit_blocks=first.read_limit_blocks,
        inline_step=None if inline is None else inline.step,
    )
    return admission_refusal(request, placed, cluster, cost, objectives, scheduling.admission) or placed


def _quickest(request: RequestShape, decode: Sequence[InstanceView], cost: CostModel) -> tuple[float, InstanceId]:
    """A step that is as good as the shortest, and whose it is: by the request's draw."""
    step_s, added = cost.decode_step_s, request.prompt_tokens
    steps_s = [
        d.pace * step_s(d.running_jobs + d.waiting_jobs + 1, d.running_tokens + d.waiting_tokens + added)
        for d in decode
    ]
    limit_s = _AS_GOOD * min(steps_s)
    as_good = [instance for one_s, instance in zip(steps_s, decode, strict=True) if one_s <= limit_s]
    chosen = drawn(request, as_good)
    return instance_step_s(chosen, cost, added), chosen.instance_id


def _decode_blocks_for(request: RequestShape) -> int:
    """Blocks that decoding takes, as far as a placement counts on them."""
    return request.blocks_for(request.prompt_tokens + min(request.max_new_tokens, GROWTH_TOKENS))


def _able(
    pool: str, instances: Sequence[InstanceView], blocks: int, admission: AdmissionKind
) -> Sequence[InstanceView] | Refused:
    """The instances that can take *blocks*; at least one.

    Those with room now; where nobody has any, all that ever will: the request waits for room at the instance. Only
    EARLY goes by the room there is now.
    """
    if not instances:
        return unavailable(f"no_{pool}_instance")
    with_room = [instance for instance in instances if instance.blocks_available >= blocks]
    if with_room:
        return with_room
    large_enough = [instance for instance in instances if instance.blocks_total >= blocks]
    if not large_enough:
        return unavailable(f"{pool}_pool_too_small")
    return contended(f"{pool}_pool_full") if admission is AdmissionKind.EARLY else large_enough
