"""The block pool, under each eviction policy, against a naive model that recounts everything at each step."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_mesh.errors import InvalidTransition
from mooncake_mesh.kv.block_pool import BlockPool, BlockState, Duplicate, NoRoom, Renewal, Sealed
from mooncake_mesh.kv.eviction import EvictionKind, eviction_policy
from mooncake_mesh.kv.tenants import TenantQuotas
from mooncake_proto.ids import BlockId, BlockKey
from mooncake_proto.kvcache import KvChange

N_BLOCKS = 6
KEYS = [BlockKey(bytes([i]) * 16) for i in range(5)]

HOLDERS = ["job-a", "job-b", "send-c"]
ALL_HOLDERS = [*HOLDERS, "job-d"]
PINNERS = ["ahead-a", "ahead-b"]
QUOTAS = {"small": 2, "large": 4}

holders = st.sampled_from(HOLDERS)
keys = st.sampled_from(KEYS)
blocks = st.integers(0, N_BLOCKS - 1).map(BlockId)
chains = st.lists(keys, max_size=4) | st.integers(0, 5).map(lambda n: KEYS[:n])
leases = st.sampled_from([None, 2.0, 9.0])
tenants = st.sampled_from(["", *QUOTAS])
pinners = st.sampled_from(PINNERS)


@dataclass
class Naive:
    """What a block is, by itself; who holds it is looked up in ``held``, never counted."""

    key: dict[BlockId, BlockKey] = field(default_factory=dict)
    owner: dict[BlockId, str] = field(default_factory=dict)
    writes: dict[BlockId, int] = field(default_factory=dict)
    given_up: dict[BlockId, int] = field(default_factory=dict)
    uses: dict[BlockId, int] = field(default_factory=dict)
    depth: dict[BlockId, int] = field(default_factory=dict)
    held: dict[str, list[BlockId]] = field(default_factory=dict)
    lease: dict[str, float] = field(default_factory=dict)
    generation: dict[BlockId, int] = field(default_factory=dict)
    index: set[BlockKey] = field(default_factory=set)
    tenant: dict[BlockId, str] = field(default_factory=dict)
    released: dict[BlockId, int] = field(default_factory=dict)
    pins: dict[str, list[BlockId]] = field(default_factory=dict)
    pinned_until: dict[str, float] = field(default_factory=dict)
    pinned_at: dict[BlockId, int] = field(default_factory=dict)
    ticks: int = 0

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def usage(self) -> Counter[str]:
        free = self.free()
        return Counter(tenant for block, tenant in self.tenant.items() if block not in free)

    def is_pinned(self, block: BlockId) -> bool:
        return any(block in mine for mine in self.pins.values())

    def referenced(self, block: BlockId) -> bool:
        return any(block in mine for mine in self.held.values())

    def free(self) -> list[BlockId]:
        used = set(self.key) | set(self.owner) | {b for b, n in self.writes.items() if n}
        return [BlockId(b) for b in range(N_BLOCKS) if b not in used]

    def victims(self) -> list[BlockId]:
        """In the order of LRU; soft-pinned ones are not among them."""
        candidates = (b for b in self.key if not self.referenced(b) and not self.is_pinned(b))
        return sorted(candidates, key=lambda b: self.given_up[b])

    def pinned_victims(self) -> list[BlockId]:
        candidates = (b for b in self.key if not self.referenced(b) and self.is_pinned(b))
        return sorted(candidates, key=lambda b: self.pinned_at[b])

    def own_victims(self, tenant: str) -> list[BlockId]:
        """In the order in which a tenant at its quota gives them up."""
        own = [b for b in (*self.victims(), *self.pinned_victims()) if self.tenant[b] == tenant]
        return sorted(own, key=lambda b: (self.is_pinned(b), self.released[b]))

    def pin(self, pinner: str, block: BlockId) -> None:
        if not self.is_pinned(block):
            self.pinned_at[block] = self.tick()
        mine = self.pins.setdefault(pinner, [])
        if block not in mine:
            mine.append(block)

    def unpin(self, pinner: str) -> list[BlockId]:
        """What nobody pins any more."""
        self.pinned_until.pop(pinner, None)
        return [b for b in self.pins.pop(pinner, []) if not self.is_pinned(b)]

    def unpinned(self, blocks: list[BlockId]) -> None:
        for block in reversed([b for b in blocks if not self.referenced(b)]):
            self.given_up[block] = self.tick()

    def evicted(self, block: BlockId) -> None:
        del self.key[block]
        self.generation[block] += 1
        for mine in self.pins.values():
            if block in mine:
                mine.remove(block)

    def hold(self, holder: str, block: BlockId) -> None:
        if block not in self.held.get(holder, []):
            self.held.setdefault(holder, []).append(block)
            self.uses[block] += 1

    def given(self, block: BlockId, giver: str, taker: str) -> None:
        self.owner[block] = taker
        self.generation[block] += 1
        self.held[giver].remove(block)
        self.held.setdefault(taker, []).append(block)
        if not self.held[giver]:
            self.release(giver)

    def release(self, holder: str) -> None:
        self.lease.pop(holder, None)
        for depth, block in reversed(list(enumerate(self.held.pop(holder, [])))):
            self.given_up[block] = self.tick()
            if not self.referenced(block):
                self.released[block] = self.pinned_at[block] = self.ticks
            self.depth[block] = max(depth, self.depth.get(block, 0))
            if block in self.owner:
                del self.owner[block]
                self.generation[block] += 1


class PoolMachine(RuleBasedStateMachine):
    kind = EvictionKind.LRU

    def __init__(self) -> None:
        super().__init__()
        self.eviction = eviction_policy(self.kind)
        self.pool = BlockPool(N_BLOCKS, eviction=self.eviction, quotas=TenantQuotas(blocks=QUOTAS))
        self.model = Naive(generation=dict.fromkeys(map(BlockId, range(N_BLOCKS)), 0))
        self.now_s = 0.0

    def victims(self) -> list[BlockId]:
        """What the policy's words say the order is."""
        model, candidates = self.model, self.model.victims()
        match self.kind:
            case EvictionKind.LRU:
                return candidates
            case EvictionKind.LFU:
                return sorted(candidates, key=lambda b: model.uses[b])
            case EvictionKind.LENGTH_AWARE:
                return sorted(candidates, key=lambda b: (model.uses[b], -model.depth[b]))
            case EvictionKind.REUSE:  # it learns, so that only it can tell; but it must be true to its word
                order = list(self.eviction.order())
                assert sorted(order) == sorted(candidates)
                return order

    # --- legal and illegal moves alike: the model says which it is ----------------------------------------------------

    @rule(holder=holders, n=st.integers(0, N_BLOCKS + 1), lease=leases, tenant=tenants)
    def reserve(self, holder: str, n: int, lease: float | None, tenant: str) -> None:
        model = self.model
        free, victims, own = model.free(), [*self.victims(), *model.pinned_victims()], model.own_victims(tenant)
        room = QUOTAS.get(tenant, N_BLOCKS + 1) - model.usage()[tenant]
        available = min(len(free) + len(victims), room + len(own) if tenant in QUOTAS else N_BLOCKS)
        assert self.pool.available_to(tenant) == available
        got = self.pool.reserve(holder, n, tenant=tenant, lease_until_s=None if lease is None else self.now_s + lease)
        if n > available:
            assert got == NoRoom(wanted_blocks=n, available_blocks=available)
            return
        assert isinstance(got, list)
        assert len(set(got)) == n
        own_first = own[: max(0, n - room)] if tenant in QUOTAS else []
        others = [b for b in victims if b not in own_first]
        evicted = others[: max(0, n - len(free) - len(own_first))]
        assert set(got) <= set(free) | set(own_first) | set(evicted)
        assert got[len(got) - len(evicted) :] == evicted, "victims are taken in the policy's order"
        assert all(model.tenant[b] == tenant for b in own_first)
        for block in (*own_first, *evicted):
            model.evicted(block)
        for block in got:
            model.tenant[block] = tenant
            self.model.owner[block] = holder
            self.model.generation[block] += 1
            self.model.held.setdefault(holder, []).append(block)
        self._lease(holder, lease)

    @rule(holder=holders, wanted=chains, lease=leases)
    def match_and_hold(self, holder: str, wanted: list[BlockKey], lease: float | None) -> None:
        by_key = {key: block for block, key in self.model.key.items()}
        expected = []
        for key in wanted:
            if key not in by_key:
                break
            expected.append(by_key[key])
        matched = self.pool.match(wanted)
        assert matched == expected
        self.pool.hold(holder, matched, lease_until_s=None if lease is None else self.now_s + lease)
        for block in matched:
            self.model.hold(holder, block)
        self._lease(holder, lease)

    @rule(holder=holders, block=blocks)
    def hold_one(self, holder: str, block: BlockId) -> None:
        if block not in self.model.key:
            with pytest.raises(InvalidTransition):
                self.pool.hold(holder, [*self.model.key, block])
            return
        self.pool.hold(holder, [block])
        self.model.hold(holder, block)

    @rule(holder=holders, block=blocks, key=keys)
    def seal(self, holder: str, block: BlockId, key: BlockKey) -> None:
        if self.model.owner.get(block) != holder or self.model.writes.get(block):
            with pytest.raises(InvalidTransition):
                self.pool.seal(holder, block, key)
            return
        outcome = self.pool.seal(holder, block, key)
        other = next((b for b, k in self.model.key.items() if k == key), None)
        if other is not None:
            assert outcome == Duplicate(block=block, other=other)
            return
        assert outcome == Sealed(block=block)
        self.model.key[block] = key
        self.model.uses[block], self.model.depth[block] = 1, 0
        del self.model.owner[block]

    @rule(holder=holders, key=keys)
    def seal_own(self, holder: str, key: BlockKey) -> None:
        """The common case, so that chains really form."""
        mine = [b for b, owner in self.model.owner.items() if owner == holder and not self.model.writes.get(b)]
        if mine:
            self.seal(holder, mine[0], key)

    @rule(holder=holders, block=blocks, pick=st.integers(0, N_BLOCKS))
    def exchange(self, holder: str, block: BlockId, pick: int) -> None:
        """Its own block, if it has one, for any other."""
        mine = [b for b, owner in self.model.owner.items() if owner == holder]
        own = mine[pick % len(mine)] if mine and pick else block
        sealed = sorted(self.model.key)
        twin = sealed[pick % len(sealed)] if sealed else block
        held = self.model.held.get(holder, [])
        if not self._is_quiet_of(holder, own) or twin not in self.model.key or twin in held:
            with pytest.raises(InvalidTransition):
                self.pool.exchange(holder, {own: twin})
            return
        self.pool.exchange(holder, {own: twin})
        held[held.index(own)] = twin
        self.model.uses[twin] += 1
        self.model.given_up[own] = self.model.tick()
        del self.model.owner[own]
        self.model.generation[own] += 1

    @rule(giver=holders, taker=holders, block=blocks, n=st.integers(0, N_BLOCKS), any_block=st.booleans())
    def give(self, giver: str, taker: str, block: BlockId, n: int, any_block: bool) -> None:
        """The first of what somebody has, for the most part: what a prompt's job leaves to the one that decodes."""
        model = self.model
        held, mine = model.held.get(giver, []), model.held.get(taker, [])
        wanted = [block] if any_block else held[:n]
        if not all(b in held and b not in mine and (b in model.key or self._is_quiet_of(giver, b)) for b in wanted):
            with pytest.raises(InvalidTransition):
                self.pool.give(giver, taker, wanted)
            return
        self.pool.give(giver, taker, wanted)
        for one in list(wanted):
            if one in model.key:
                model.hold(taker, one)
            else:
                model.given(one, giver, taker)

    def _is_quiet_of(self, holder: str, block: BlockId) -> bool:
        return self.model.owner.get(block) == holder and not self.model.writes.get(block)

    @rule(first=st.integers(0, len(KEYS) - 1), n=st.integers(1, 3), tenant=tenants)
    def run_job(self, first: int, n: int, tenant: str) -> None:
        """A whole job, which leaves blocks that can be evicted."""
        new = [key for key in KEYS[first : first + n] if key not in self.model.key.values()]
        if len(new) <= self.pool.available_to(tenant):
            self.reserve("job-d", len(new), None, tenant)
            for key in new:
                self.seal_own("job-d", key)
            self.release("job-d")

    @rule(holder=holders)
    def release(self, holder: str) -> None:
        self.pool.release(holder)
        self.model.release(holder)

    @rule(holder=holders, lease=st.sampled_from([2.0, 9.0]))
    def renew(self, holder: str, lease: float) -> None:
        outcome = self.pool.renew(holder, self.now_s + lease)
        assert outcome is (Renewal.RENEWED if holder in self.model.held else Renewal.LAPSED)
        self._lease(holder, lease)

    @rule(pinner=pinners, block=blocks, for_s=st.sampled_from([2.0, 9.0]))
    def pin(self, pinner: str, block: BlockId, for_s: float) -> None:
        if block not in self.model.key:
            with pytest.raises(InvalidTransition):
                self.pool.pin(pinner, [block], self.now_s + for_s)
            return
        self.pool.pin(pinner, [block, block], self.now_s + for_s)
        self.model.pin(pinner, block)
        self.model.pinned_until[pinner] = self.now_s + for_s

    @rule(pinner=pinners, pick=st.integers(0, N_BLOCKS), for_s=st.sampled_from([2.0, 9.0]))
    def pin_sealed(self, pinner: str, pick: int, for_s: float) -> None:
        """The common case."""
        if self.model.key:
            self.pin(pinner, sorted(self.model.key)[pick % len(self.model.key)], for_s)

    @rule(pinner=pinners)
    def unpin(self, pinner: str) -> None:
        self.pool.unpin(pinner)
        self.model.unpinned(self.model.unpin(pinner))

    @rule(passed_s=st.sampled_from([0.0, 3.0]))
    def expire(self, passed_s: float) -> None:
        self.now_s += passed_s
        due = sorted((until_s, p) for p, until_s in self.model.pinned_until.items() if until_s <= self.now_s)
        self.model.unpinned([block for _, pinner in due for block in self.model.unpin(pinner)])
        over = sorted((until_s, h) for h, until_s in self.model.lease.items() if until_s <= self.now_s)
        assert self.pool.expire(self.now_s) == [holder for _, holder in over]
        for _, holder in over:
            self.model.release(holder)

    @rule(block=blocks)
    def begin_write(self, block: BlockId) -> None:
        if block not in self.model.owner:
            with pytest.raises(InvalidTransition):
                self.pool.begin_write(block)
            return
        self.pool.begin_write(block)
        self.model.writes[block] = self.model.writes.get(block, 0) + 1

    @rule(block=blocks)
    def end_write(self, block: BlockId) -> None:
        if not self.model.writes.get(block):
            with pytest.raises(InvalidTransition):
                self.pool.end_write(block)
            return
        self.pool.end_write(block)
        self.model.writes[block] -= 1

    def _lease(self, holder: str, lease: float | None) -> None:
        if lease is not None and self.model.held.get(holder):
            self.model.lease[holder] = self.now_s + lease

    # --- what always holds --------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.pool.check_invariants()
        assert self.pool.free_blocks == len(self.model.free())
        assert self.pool.sealed_blocks == len(self.model.key)
        assert list(self.eviction.order()) == self.victims(), "in the order of eviction"
        assert self.pool.coldest(N_BLOCKS) == self.victims(), "the soft-pinned ones stay"
        assert self.pool.evictable_blocks == len(self.model.victims()) + len(self.model.pinned_victims())
        usage = self.model.usage()
        assert self.pool.tenant_usage() == usage
        assert all(usage[tenant] <= quota for tenant, quota in QUOTAS.items()), "nobody is over quota"
        assert set(self.pool.keys()) == set(self.model.key.values())
        for holder in ALL_HOLDERS:
            assert self.pool.blocks_of(holder) == self.model.held.get(holder, [])

    @invariant()
    def every_block_is_what_the_model_says(self) -> None:
        free = self.model.free()
        for block, generation in self.model.generation.items():
            state = self.pool.state(block)
            assert self.pool.generation(block) == generation
            assert (state is BlockState.FREE) == (block in free)
            assert (state is BlockState.RESERVED) == (block in self.model.owner)
            assert (state is BlockState.SEALED) == (block in self.model.key)
            assert self.pool.may_write(block, generation) == (block in self.model.owner)
            assert not self.pool.may_write(block, generation - 1)

    @invariant()
    def events_rebuild_the_keys(self) -> None:
        for event in self.pool.drain_events():
            if event.change is KvChange.STORED:
                assert event.key not in self.model.index
                self.model.index.add(event.key)
            else:
                self.model.index.remove(event.key)
        assert self.model.index == set(self.pool.keys())


class LfuMachine(PoolMachine):
    kind = EvictionKind.LFU


class LengthAwareMachine(PoolMachine):
    kind = EvictionKind.LENGTH_AWARE


class ReuseMachine(PoolMachine):
    kind = EvictionKind.REUSE


TestPoolMachine = PoolMachine.TestCase
TestLfuMachine = LfuMachine.TestCase
TestLengthAwareMachine = LengthAwareMachine.TestCase
TestReuseMachine = ReuseMachine.TestCase
TestPoolMachine.settings = settings(deadline=None)
for case in (TestLfuMachine, TestLengthAwareMachine, TestReuseMachine):
    case.settings = settings(deadline=None, max_examples=30)  # the pool itself has been tried above
