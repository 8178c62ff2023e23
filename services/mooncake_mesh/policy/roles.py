"""When instances change between prefilling and decoding: which ones, and how many at once. Pure.

What both pools are asked for is measured in instances, as :mod:`~mooncake_mesh.policy.sizing` counts it, so that what
stationary traffic leads to is what sizing says of it: prompts by the prefill time that comes in a second, and by what
is queued for longer than half of the TTFT objective; decoding by the KV in progress against what an instance runs at a
time within the TBT objective, as much of it as there would be if instances ran full, and by the KV that waits. What is
refused for want of one pool is asked of it all the same: an overloaded pool shows no other sign of how much it lacks.

A wish must last before anything is ordered, and no instance goes back the way others came for a while. A large
imbalance moves several at once, up to a share of the mesh: who switches serves nobody until it has drained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Final

from mooncake_mesh.policy.cost_model import StepCost
from mooncake_mesh.policy.decisions import Refused
from mooncake_mesh.policy.sizing import HEADROOM, TrafficMoments, decode_instances, decode_share
from mooncake_mesh.policy.views import InstanceView
from mooncake_proto.control import Role
from mooncake_proto.ids import InstanceId

_UNIT: Final = 1_000_000
"""KV that one instance runs at a time, where demand is counted in instances already."""

_LATELY: Final = 0.2
"""Of the memory: how long KV that is there now is taken to say where it goes."""

_FOR_WANT_OF_DECODING: Final = ("tbt_objective", "tbt_objective_predicted", "kv_in_progress")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRules:
    """Hysteresis. Of load, what was seen ``memory_s`` ago counts for a third. Sizing must be missed by the share
    ``margin`` of all instances for ``sustained_s``, and by twice that for one to leave decoding, which takes as long as
    the longest answer; after a switch none goes the other way for ``rest_s``. Nobody switches to a pool that is asked
    for less than ``least_load`` of what it can do. Up to ``in_flight_share`` of all instances, at least one, are on
    their way at a time."""

    memory_s: float = 30.0
    sustained_s: float = 10.0
    rest_s: float = 60.0
    margin: float = 0.025
    least_load: float = 0.6
    in_flight_share: float = 0.25

    @classmethod
    def lasting(cls, sustained_s: float) -> "RoleRules":
        """With all times in proportion to *sustained_s*."""
        usual = cls()
        factor = sustained_s / usual.sustained_s
        return replace(usual, memory_s=factor * usual.memory_s, sustained_s=sustained_s, rest_s=factor * usual.rest_s)

    @property
    def look_s(self) -> float:
        """How often the pools should be seen."""
        return self.sustained_s / 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked of each pool, in instances that are busy with it."""

    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """What requests asked for, a second: prefill time, refused or not; and KV for which decoding had no place."""

    prefill_s: float
    refused_kv_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An instance that serves in ``role`` and can take the other one, with what it would have to finish first."""

    instance_id: InstanceId
    role: Role
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The mesh at ``now_s``. ``prefill`` and ``decode`` instances serve; those that switch are to come to a pool, and
    count there only. ``demand`` is as it is now, not smoothed, without what decoding was asked for and ``refused``, in
    instances too."""

    now_s: float
    prefill: int
    decode: int
    to_prefill: int
    to_decode: int
    candidates: Sequence[Candidate]
    demand: Demand
    refused: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """``instance_id`` is to drain and take ``role``. ``demand`` against ``prefill`` and ``decode`` instances, those to
    come among them, is why; ``wanted_decode`` of all should decode."""

    instance_id: InstanceId
    role: Role
    demand: Demand
    prefill: int
    decode: int
    wanted_decode: int


class _Memory:
    """A mean of what was seen, in which the age of *memory_s* counts for a third."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self._mean = 0.0
        self._weight = 0.0

    def with_seen(self, value: float, elapsed_s: float) -> float:
        """The mean, with *value* that held for *elapsed_s*."""
        left = exp(-elapsed_s / self._memory_s)
        self._weight = left * self._weight + (1 - left)
        if self._weight:  # at first, all that was seen; later, as the memory has it
            self._mean += (1 - left) / self._weight * (value - self._mean)
        return self._mean


class RoleBalance:
    """Sees the pools every now and then; mutated by that only. Equal sights give equal switches."""

    def __init__(self, rules: RoleRules) -> None:
        self._rules = rules
        self._demand = Demand(prefill=0.0, decode=0.0)
        self._prompts, self._refused, self._kv = (_Memory(rules.memory_s) for _ in range(3))
        self._kv_lately = _Memory(rules.memory_s * _LATELY)
        self._seen_s: float | None = None
        self._wish: Role | None = None
        self._wished_s = 0.0
        self._last: Role | None = None
        self._last_s = 0.0

    @property
    def demand(self) -> Demand:
        """Of late."""
        return self._demand

    def seen(self, pools: Pools) -> list[Switch]:
        """The switches to order now; they count as ordered."""
        self._remember(pools)
        n_prefill, n_decode = pools.prefill + pools.to_prefill, pools.decode + pools.to_decode
        if n_prefill + n_decode < 2:
            return []
        wanted = wanted_decode(self._demand, n_prefill + n_decode)
        role = self._wished(n_prefill, n_decode)
        if role is not self._wish:
            self._wish, self._wished_s = role, pools.now_s
        if role is None or pools.now_s - self._wished_s < self._rules.sustained_s:
            return []
        if self._last not in (None, role) and pools.now_s - self._last_s < self._rules.rest_s:
            return []
        chosen = self._chosen(role, abs(wanted - n_decode), pools)
        if chosen:
            self._last, self._last_s = role, pools.now_s
        return [
            Switch(
                instance_id=candidate.instance_id,
                role=role,
                demand=self._demand,
                prefill=n_prefill,
                decode=n_decode,
                wanted_decode=wanted,
            )
            for candidate in chosen
        ]

    def _remember(self, pools: Pools) -> None:
        """Prompts and refusals come in bursts, so what they ask for is a mean. KV is a sum over time, and says where it
        goes: while it grows, what it will come to counts, as instances take a while to be there."""
        elapsed_s = 0.0 if self._seen_s is None else pools.now_s - self._seen_s
        self._seen_s = pools.now_s
        prefill = self._prompts.with_seen(pools.demand.prefill, elapsed_s)
        kv = self._kv.with_seen(pools.demand.decode, elapsed_s)
        lately = self._kv_lately.with_seen(pools.demand.decode, elapsed_s)
        refused = self._refused.with_seen(pools.refused, elapsed_s)
        self._demand = Demand(prefill=prefill, decode=lately + max(0.0, lately - kv) + refused)

    def _wished(self, n_prefill: int, n_decode: int) -> Role | None:
        """The pool that has too few, if that is beyond the margin and it needs them."""
        demand, rules = self._demand, self._rules
        n_all = n_prefill + n_decode
        exact, margin = _exact_decode(demand, n_all), rules.margin * n_all
        if exact > n_decode + margin and demand.decode >= rules.least_load * n_decode:
            return Role.DECODE if n_prefill > 1 else None
        if exact <= n_decode - 1 - 2 * margin and demand.prefill >= rules.least_load * n_prefill:
            return Role.PREFILL if n_decode > 1 else None
        return None

    def _chosen(self, role: Role, missing: int, pools: Pools) -> list[Candidate]:
        """Who has least to finish first; one stays."""
        serving = pools.prefill if role is Role.DECODE else pools.decode
        n_all = pools.prefill + pools.decode + pools.to_prefill + pools.to_decode
        free = max(1, int(self._rules.in_flight_share * n_all)) - pools.to_prefill - pools.to_decode
        able = sorted((c for c in pools.candidates if c.role is not role), key=lambda c: (c.work, c.instance_id))
        return able[: max(0, min(missing, free, serving - 1))]


def wanted_decode(demand: Demand, instances: int) -> int:
    """How many of *instances*, at least 2, should decode. Its headroom is taken from what is idle."""
    return decode_instances(
        _moments(demand), instances=instances, kv_capacity_tokens=_UNIT, headroom=_headroom(demand, instances)
    )


def refused_demand(refused: Refused) -> Role | None:
    """Which pool had no place for a request; None where more instances would not have helped."""
    if refused.unavailable:
        return None
    if refused.reason == "ttft_objective":
        return Role.PREFILL
    return Role.DECODE if refused.reason in _FOR_WANT_OF_DECODING else None


def prompt_demand(came: Came, prefill: Sequence[InstanceView], now_s: float, ttft_s: float) -> float:
    """Prefill instances that prompts keep busy: with what comes, and what is queued for longer than half of *ttft_s* if
    that is to be done within it."""
    queued_s = [instance.busy_until_s - now_s for instance in prefill if instance.queue]
    return came.prefill_s + sum(max(0.0, each_s - ttft_s / 2) for each_s in queued_s) / ttft_s


def kv_demand(
    decode: Sequence[InstanceView], prefill: Sequence[InstanceView], cost: StepCost, block_tokens: int
) -> float:
    """Decode instances that KV keeps busy. Prompts that are not computed yet do not count: they are asked of
    *prefill*; what waits at decoding beyond them does."""
    running = sum(_running(instance, cost, block_tokens) for instance in decode)
    queued_tokens = sum(prompt.tokens for instance in prefill for prompt in instance.queue)
    held_tokens = max(0, sum(instance.waiting_tokens for instance in decode) - queued_tokens)
    return running + _instances(held_tokens, decode, block_tokens)


def refused_kv_demand(came: Came, decode: Sequence[InstanceView], block_tokens: int, decode_s: float) -> float:
    """Decode instances that KV would keep busy for *decode_s* for which there was no place."""
    return _instances(came.refused_kv_tokens * decode_s, decode, block_tokens)


def _instances(tokens: float, decode: Sequence[InstanceView], block_tokens: int) -> float:
    """How many of *decode* that much KV fills."""
    capacity = sum(_limit_tokens(instance, block_tokens) for instance in decode)
    return tokens * len(decode) / capacity if capacity else 0.0


def _running(instance: InstanceView, cost: StepCost, block_tokens: int) -> float:
    """Of one instance, what its batch would fill if it ran full: steps would take longer then, and KV stay longer."""
    limit = _limit_tokens(instance, block_tokens)
    tokens, jobs = instance.running_tokens, instance.running_jobs
    if not tokens or not jobs:
        return 0.0
    share = tokens / limit
    if share >= 1.0:
        return share
    full_s, now_s = cost.decode_step_s(round(jobs / share), limit), cost.decode_step_s(jobs, tokens)
    return share * full_s / now_s if now_s > 0 else share


def _limit_tokens(instance: InstanceView, block_tokens: int) -> int:
    return max(1, instance.kv_limit_tokens or instance.blocks_total * block_tokens)


def _moments(demand: Demand) -> TrafficMoments:
    return TrafficMoments(prefill_s=demand.prefill, kv_token_s=demand.decode * _UNIT)


def _headroom(demand: Demand, instances: int) -> float:
    total = demand.prefill + demand.decode
    return min(HEADROOM, max(1.0, instances / total)) if total > 0 else HEADROOM


def _exact_decode(demand: Demand, instances: int) -> float:
    """What :func:`wanted_decode` rounds up."""
    return instances * decode_share(_moments(demand), _UNIT) * _headroom(demand, instances)
