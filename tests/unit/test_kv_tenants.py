"""Quotas: what a configuration says, and who pays for a tenant that wants more than its share."""

import pytest

from mooncake_mesh.config import MessengerConfig
from mooncake_mesh.config_tenants import tenant_quotas
from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import BlockPool, NoRoom, Sealed
from mooncake_mesh.kv.tenants import TenantQuotas
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId
from mooncake_proto.transfer import Acquire, Acquired


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(16, b"."))


def share(pool: BlockPool, tenant: str, *names: str) -> None:
    """A job of *tenant* that leaves one cached block for each name."""
    blocks = pool.reserve("job", len(names), tenant=tenant)
    assert isinstance(blocks, list)
    for block, name in zip(blocks, names, strict=True):
        assert isinstance(pool.seal("job", block, key(name)), Sealed)
    pool.release("job")


def cached(pool: BlockPool, *names: str) -> list[str]:
    return [name for name in names if pool.match([key(name)])]


@pytest.mark.parametrize(
    ("text", "tenant", "blocks"),
    [
        ("", "acme", None),
        ("acme=25", "acme", 50),
        ("acme=25", "beta", None),
        (" acme = 12.5 , *=10 ", "acme", 25),
        ("acme=25, *=10", "beta", 20),
        ("a=b=50", "a=b", 100),
        ("acme=0.001", "acme", 1),
    ],
)
def test_shares_become_blocks(text: str, tenant: str, blocks: int | None) -> None:
    assert tenant_quotas(text, 200).of(tenant) == blocks


@pytest.mark.parametrize("text", ["acme", "=5", "acme=", "acme=0", "acme=101", "acme=nan", "acme=x", "a=1,a=2"])
def test_a_configuration_refuses_other_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r"^tenant_quotas: "):
        MessengerConfig(tenant_quotas=text)


def test_a_quota_holds_a_block_at_least() -> None:
    with pytest.raises(ValueError, match="quota of acme"):
        TenantQuotas(blocks={"acme": 0})


def test_a_tenant_at_its_quota_gives_up_its_own_coldest_blocks() -> None:
    pool = BlockPool(8, quotas=TenantQuotas(blocks={"acme": 3}))
    share(pool, "beta", "b")
    share(pool, "acme", "x", "y")
    share(pool, "acme", "z")
    share(pool, "acme", "w")
    assert cached(pool, "b", "x", "y", "z", "w") == ["b", "x", "z", "w"], "y was the coldest: the leaf of the older job"
    assert pool.free_blocks == 4, "free room is not for it any more"
    assert pool.tenant_usage() == {"beta": 1, "acme": 3}
    pool.check_invariants()


def test_a_tenant_at_its_quota_waits_while_its_own_jobs_use_it() -> None:
    pool = BlockPool(8, quotas=TenantQuotas(default_blocks=3))
    share(pool, "beta", "b")
    assert isinstance(pool.reserve("running", 2, tenant="acme"), list)
    assert pool.reserve("next", 2, tenant="acme") == NoRoom(wanted_blocks=2, available_blocks=1)
    assert cached(pool, "b") == ["b"]
    pool.release("running")
    assert isinstance(pool.reserve("next", 3, tenant="acme"), list)


def test_below_its_quota_a_tenant_takes_the_coldest_of_all() -> None:
    pool = BlockPool(3, quotas=TenantQuotas(blocks={"acme": 3}))
    share(pool, "beta", "b")
    share(pool, "acme", "x")
    share(pool, "beta", "c")
    share(pool, "acme", "y")
    assert cached(pool, "b", "x", "c", "y") == ["x", "c", "y"]


def test_a_block_that_drains_still_counts() -> None:
    pool = BlockPool(4, quotas=TenantQuotas(blocks={"acme": 1}))
    blocks = pool.reserve("job", 1, tenant="acme")
    assert isinstance(blocks, list)
    pool.begin_write(blocks[0])
    pool.release("job")
    assert isinstance(pool.reserve("next", 1, tenant="acme"), NoRoom)
    pool.end_write(blocks[0])
    assert pool.tenant_usage() == {}
    assert pool.reserve("next", 1, tenant="acme") == blocks


def test_jobs_of_the_messenger_count_for_their_tenant() -> None:
    core = MessengerCore(n_blocks=8, block_bytes=8, quotas=TenantQuotas(blocks={"acme": 3}))

    def want(name: str, n: int) -> Acquire:
        return Acquire(
            job_id=JobId(name),
            instance_id=InstanceId("p"),
            incarnation=Incarnation("i"),
            keys=join_keys([]),
            n_blocks=n,
            max_cached_blocks=0,
            tenant="acme",
        )

    assert isinstance(core.acquire(want("one", 2), 0.0), Acquired)
    assert len(core.grow(JobId("one"), 4)) == 1, "growth ends at the quota"
    assert isinstance(core.acquire(want("two", 1), 0.0), NoRoom)
    with pytest.raises(InvalidRequest, match="exceed the tenant's quota of 3"):
        core.acquire(want("three", 4), 0.0)
    core.release(JobId("one"), "over")
    assert isinstance(core.acquire(want("two", 1), 0.0), Acquired)
    assert core.pool.tenant_usage() == {"acme": 1}
