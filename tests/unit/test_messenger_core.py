"""Jobs, landings and outbound transfers of one messenger: what is held, what ends with what."""

from collections.abc import Iterator

import pytest

from mooncake_mesh.errors import InvalidRequest, NoFreeBlocks, SliceLost, TransferError
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import BlockState, NoRoom
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.landing import LandingState, SliceSpan
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.transfer import Acquire, Acquired, CloseWrite, OpenWrite, PushBlocks
from tests.unit.messenger_rig import LAYERS, N_BLOCKS, audited_core

WORKER, LIFE = InstanceId("w"), Incarnation("life-1")
A, B, C, D = (BlockKey(name.encode() * 16) for name in "abcd")


@pytest.fixture
def core() -> Iterator[MessengerCore]:
    with audited_core() as made:
        yield made


def want(
    job: str,
    n_blocks: int,
    *keys: BlockKey,
    cached: int = 99,
    landing: str | None = None,
    landing_blocks: int = 99,
    layers: int = LAYERS,
    fetch_blocks: int = 0,
    worker: InstanceId = WORKER,
) -> Acquire:
    return Acquire(
        job_id=JobId(job),
        instance_id=worker,
        incarnation=LIFE,
        keys=join_keys(keys),
        n_blocks=n_blocks,
        max_cached_blocks=cached,
        fetch_blocks=fetch_blocks,
        landing=None if landing is None else TransferId(landing),
        landing_blocks=landing_blocks,
        landing_layers=layers,
    )


def got(core: MessengerCore, request: Acquire) -> Acquired:
    result = core.acquire(request, 0.0)
    assert isinstance(result, Acquired)
    return result


def cache(core: MessengerCore, *keys: BlockKey) -> list[int]:
    """Blocks that hold *keys* and that nobody references."""
    blocks = got(core, want("warm", len(keys), *keys, cached=0)).blocks
    assert core.seal(JobId("warm"), 0, keys) == len(keys)
    core.release(JobId("warm"), "warm")
    return list(blocks)


def land_all(core: MessengerCore, transfer: str) -> None:
    landing = core.landing(TransferId(transfer))
    assert landing is not None
    spans = [SliceSpan(logical=slot.logical, layer=0, n_layers=landing.layers) for slot in landing.slots]
    landing.written(landing.admit(spans, core.pool), core.pool, 1.0)
    core.settle(landing)
    assert landing.state is LandingState.LANDED


# --- acquiring --------------------------------------------------------------------------------------------------------


def test_the_sealed_prefix_is_shared_and_the_rest_is_fresh(core: MessengerCore) -> None:
    warm = cache(core, A, B)
    first = got(core, want("j1", 4, A, B, C))
    assert (first.cached_blocks, list(first.blocks[:2])) == (2, warm)
    second = got(core, want("j2", 3, A, B))
    assert second.blocks[:2] == first.blocks[:2]
    assert not set(second.blocks[2:]) & set(first.blocks)


@pytest.mark.parametrize(("cached", "n_blocks", "expected"), [(0, 3, 0), (1, 3, 1), (2, 3, 2), (99, 1, 1), (99, 3, 2)])
def test_no_more_is_taken_from_the_pool_than_allowed(
    core: MessengerCore, cached: int, n_blocks: int, expected: int
) -> None:
    cache(core, A, B)
    assert got(core, want("j", n_blocks, A, B, C, cached=cached)).cached_blocks == expected


def test_want_of_room_takes_nothing(core: MessengerCore) -> None:
    cache(core, A)
    got(core, want("big", 6))
    assert core.acquire(want("j", 3, A), 0.0) == NoRoom(wanted_blocks=2, available_blocks=1)
    assert (core.n_jobs, core.pool.evictable_blocks) == (1, 1)
    core.release(JobId("big"), "done")
    assert got(core, want("j", 3, A)).cached_blocks == 1


def test_a_cached_prefix_counts_as_room(core: MessengerCore) -> None:
    cache(core, A, B)
    got(core, want("big", 6))
    assert got(core, want("j", 2, A, B)).cached_blocks == 2


def test_bad_requests_are_refused_and_take_nothing(core: MessengerCore) -> None:
    got(core, want("j", 1, landing="t"))
    for request in (
        want("j", 1),
        want("huge", N_BLOCKS + 1),
        want("layers", 1, landing="t2", layers=3),
        want("none", 1, landing="t2", layers=0),
        want("twin", 1, landing="t"),
    ):
        with pytest.raises(InvalidRequest):
            core.acquire(request, 0.0)
    assert (core.all_jobs(), core.pool.free_blocks) == ([JobId("j")], N_BLOCKS - 1)


def test_missing_prefix_is_what_lies_beyond_the_local_one(core: MessengerCore) -> None:
    cache(core, A)
    assert core.missing_prefix(want("j", 4, A, B, C, D, fetch_blocks=3)) == [B, C]
    assert core.missing_prefix(want("j", 4, A, B, C, D, fetch_blocks=3, cached=2)) == [B]
    assert core.missing_prefix(want("j", 4, A, fetch_blocks=1)) == []


# --- growing, sealing, releasing --------------------------------------------------------------------------------------


def test_growth_gives_what_there_is(core: MessengerCore) -> None:
    got(core, want("j", 5))
    assert len(core.grow(JobId("j"), 2)) == 2
    assert len(core.grow(JobId("j"), 4)) == 1
    assert core.grow(JobId("j"), 1) == []
    assert core.grow(JobId("gone"), 1) == []


def test_grown_blocks_can_be_sealed_by_their_place(core: MessengerCore) -> None:
    blocks = got(core, want("j", 1)).blocks
    grown = core.grow(JobId("j"), 1)
    assert core.seal(JobId("j"), 0, [A, B]) == 2
    assert core.pool.match([A, B]) == [*blocks, *grown]


def test_a_twin_stays_private_and_is_free_after_the_release(core: MessengerCore) -> None:
    got(core, want("j1", 2, cached=0))
    got(core, want("j2", 2, cached=0))
    assert core.seal(JobId("j1"), 0, [A, B]) == 2
    assert core.seal(JobId("j2"), 0, [A, C]) == 1
    core.release(JobId("j2"), "done")
    assert (core.pool.sealed_blocks, core.pool.free_blocks, core.pool.evictable_blocks) == (3, 5, 1)


def test_sealing_outside_the_job_is_refused_and_of_a_job_that_is_gone_means_nothing(core: MessengerCore) -> None:
    got(core, want("j", 2))
    with pytest.raises(InvalidRequest):
        core.seal(JobId("j"), 1, [A, B])
    with pytest.raises(InvalidRequest):
        core.seal(JobId("j"), -1, [A])
    assert core.seal(JobId("gone"), 0, [A]) == 0
    assert core.pool.sealed_blocks == 0


def test_a_release_ends_the_transfers_of_its_job_and_may_come_twice(core: MessengerCore) -> None:
    got(core, want("j", 2, landing="in"))
    got(core, want("other", 1, landing="stays"))
    core.start_send(TransferId("out"), JobId("j"), 2, LAYERS)
    landing = core.landing(TransferId("in"))
    assert landing is not None
    assert core.release(JobId("j"), "cancelled") == [TransferId("out"), TransferId("in")]
    assert (landing.state, landing.failure) == (LandingState.FAILED, "cancelled")
    assert (core.landing(TransferId("in")), core.outbound(TransferId("out"))) == (None, None)
    assert core.release(JobId("j"), "again") == []
    assert core.landing(TransferId("stays")) is not None


def test_jobs_belong_to_one_life_of_one_worker(core: MessengerCore) -> None:
    got(core, want("j1", 1))
    got(core, want("j2", 1, worker=InstanceId("v")))
    core.open_fetch(TransferId("fetch"), want("j1", 1), [A], 0.0)
    assert core.jobs_of(WORKER, LIFE) == [JobId("j1"), JobId("fetch")]
    assert core.jobs_of(WORKER, Incarnation("life-2")) == []


# --- landings ---------------------------------------------------------------------------------------------------------


def test_only_fresh_blocks_below_the_limit_are_opened(core: MessengerCore) -> None:
    cache(core, A)
    acquired = got(core, want("j", 4, A, B, landing="t", landing_blocks=3))
    landing = core.landing(TransferId("t"))
    assert landing is not None
    assert [slot.logical for slot in landing.slots] == [1, 2]
    assert [slot.block for slot in landing.slots] == list(acquired.blocks[1:3])


def test_a_landing_whose_prompt_is_cached_has_landed(core: MessengerCore) -> None:
    cache(core, A, B)
    got(core, want("j", 3, A, B, landing="t", landing_blocks=2))
    landing = core.landing(TransferId("t"))
    assert landing is not None
    assert landing.state is LandingState.LANDED


def test_what_has_landed_is_shared_once_whole_blocks_only(core: MessengerCore) -> None:
    acquired = got(core, want("j", 3, A, B, landing="t"))
    landing = core.landing(TransferId("t"))
    assert landing is not None
    core.settle(landing)
    assert core.pool.match([A]) == [], "nothing of an open landing"
    land_all(core, "t")
    assert core.pool.match([A, B]) == list(acquired.blocks[:2])
    core.settle(landing)
    assert core.pool.sealed_blocks == 2
    assert core.pool.state(BlockId(acquired.blocks[2])) is BlockState.RESERVED


def test_what_two_landings_share_is_stored_once(core: MessengerCore) -> None:
    first = got(core, want("one", 3, A, B, landing="t"))
    second = got(core, want("two", 3, A, B, C, landing="u"))
    assert core.pool.free_blocks == N_BLOCKS - 6
    land_all(core, "t")
    land_all(core, "u")
    assert core.blocks_of(JobId("one")) == first.blocks
    assert core.blocks_of(JobId("two")) == (*first.blocks[:2], second.blocks[2])
    assert core.pool.free_blocks == N_BLOCKS - 4
    landing = core.landing(TransferId("u"))
    assert landing is not None
    core.settle(landing)
    core.release(JobId("one"), "over")
    assert [core.pool.state(BlockId(block)) for block in first.blocks[:2]] == [BlockState.SEALED] * 2
    assert core.pool.evictable_blocks == 0, "the other one has them still"
    assert core.grow(JobId("two"), 1), "and grows behind them"
    assert core.blocks_of(JobId("two"))[:2] == first.blocks[:2]


def test_settling_a_landing_whose_job_is_gone_means_nothing(core: MessengerCore) -> None:
    got(core, want("j", 1, A, landing="t"))
    landing = core.landing(TransferId("t"))
    assert landing is not None
    places = landing.admit([SliceSpan(logical=0, layer=0, n_layers=LAYERS)], core.pool)
    core.release(JobId("j"), "gone")
    assert core.pool.state(places[0].block) is BlockState.DRAINING
    landing.written(places, core.pool, 1.0)
    core.settle(landing)
    assert (core.pool.sealed_blocks, core.pool.free_blocks) == (0, N_BLOCKS)


# --- fetching and pushing a prefix ------------------------------------------------------------------------------------


def test_a_fetch_lands_whole_blocks_that_the_job_then_finds(core: MessengerCore) -> None:
    landing = core.open_fetch(TransferId("f"), want("j", 4, A, B, C), [A, B], 0.0)
    assert (landing.layers, [slot.logical for slot in landing.slots]) == (1, [0, 1])
    land_all(core, "f")
    assert core.release(JobId("f"), "over") == [TransferId("f")]
    assert got(core, want("j", 4, A, B, C)).cached_blocks == 2


def test_a_holder_with_less_shortens_the_fetch(core: MessengerCore) -> None:
    landing = core.open_fetch(TransferId("f"), want("j", 4), [A, B, C], 0.0)
    [place] = landing.admit([SliceSpan(logical=0, layer=0, n_layers=1)], core.pool)
    landing.written([place], core.pool, 1.0)
    assert landing.state is LandingState.OPEN
    landing.shorten(1)
    core.settle(landing)
    assert (landing.state, len(core.pool.match([A, B]))) == (LandingState.LANDED, 1)
    core.settle(landing)  # the driver settles after the last slice and after the holder's answer, in either order
    with pytest.raises(SliceLost):
        landing.admit([SliceSpan(logical=1, layer=0, n_layers=1)], core.pool)


def test_a_fetch_waits_for_no_room(core: MessengerCore) -> None:
    got(core, want("j", 7))
    with pytest.raises(NoFreeBlocks):
        core.open_fetch(TransferId("f"), want("k", 1), [A, B], 0.0)
    assert core.landing(TransferId("f")) is None


def push(transfer: str, *keys: BlockKey) -> PushBlocks:
    return PushBlocks(transfer_id=TransferId(transfer), target="ipc://m", keys=join_keys(keys), deadline_s=1.0)


def test_a_push_holds_what_it_sends(core: MessengerCore) -> None:
    cache(core, A, B)
    outbound = core.start_push(push("t", A, B, C), WORKER, LIFE)
    assert outbound.n_blocks == 2
    got(core, want("j", 6))
    assert isinstance(core.acquire(want("k", 1), 0.0), NoRoom), "pushed blocks are not evicted"
    with pytest.raises(TransferError):
        core.start_push(push("t", A), WORKER, LIFE)
    assert core.release(outbound.job_id, "over") == [TransferId("t")]
    assert core.pool.evictable_blocks == 2


def test_a_push_of_nothing_holds_nothing(core: MessengerCore) -> None:
    outbound = core.start_push(push("t", A), WORKER, LIFE)
    assert outbound.n_blocks == 0
    core.release(outbound.job_id, "nothing to push")
    assert core.n_jobs == 0


def test_a_landing_whose_sender_gave_up_before_fails_as_it_is_opened(core: MessengerCore) -> None:
    """The abort comes from the sender's node, the request for blocks from a worker of this one: either may be first."""
    assert core.give_up(TransferId("t"), "the sender's job was released") is None
    got(core, want("j", 2, A, landing="t"))
    landing = core.landing(TransferId("t"))
    assert landing is not None
    assert (landing.state, landing.failure) == (LandingState.FAILED, "the sender's job was released")
    core.release(JobId("j"), "done")
    got(core, want("k", 2, A, landing="t"))
    again = core.landing(TransferId("t"))
    assert again is not None
    assert again.state is LandingState.OPEN, "an abort counts once"


def test_aborts_that_nobody_waits_for_are_forgotten(core: MessengerCore) -> None:
    for number in range(2000):
        core.give_up(TransferId(f"t{number}"), "why")
    got(core, want("j", 1, landing="t0"))
    got(core, want("k", 1, landing="t1999"))
    states = [core.landing(TransferId(name)).state for name in ("t0", "t1999")]  # type: ignore[union-attr]
    assert states == [LandingState.OPEN, LandingState.FAILED]


# --- sending ----------------------------------------------------------------------------------------------------------


def test_only_a_job_that_is_here_can_send_and_only_what_it_has(core: MessengerCore) -> None:
    got(core, want("j", 2))
    for transfer, job, n_blocks in (("t", "gone", 1), ("t", "j", 3)):
        with pytest.raises(SliceLost):
            core.start_send(TransferId(transfer), JobId(job), n_blocks, LAYERS)
    core.start_send(TransferId("t"), JobId("j"), 2, LAYERS)
    with pytest.raises(SliceLost):
        core.start_send(TransferId("t"), JobId("j"), 2, LAYERS)
    with pytest.raises(InvalidRequest):
        core.start_send(TransferId("u"), JobId("j"), 2, 0)


# --- stages -----------------------------------------------------------------------------------------------------------


def stage_write(job: str, first: int, n: int, life: str = "stage-1") -> OpenWrite:
    return OpenWrite(
        job_id=JobId(job),
        instance_id=InstanceId("s"),
        incarnation=Incarnation(life),
        first_block=first,
        n_blocks=n,
    )


def close_write(job: str, first: int, life: str = "stage-1") -> CloseWrite:
    return CloseWrite(job_id=JobId(job), incarnation=Incarnation(life), first_block=first)


def test_a_stage_keeps_blocks_from_the_next_owner_until_it_has_written(core: MessengerCore) -> None:
    got(core, want("a", 3))
    core.open_write(stage_write("a", 1, 2))
    core.release(JobId("a"), "its head died")
    assert core.pool.free_blocks == N_BLOCKS - 2
    core.close_write(close_write("a", 1))
    assert core.pool.free_blocks == N_BLOCKS
    core.close_write(close_write("a", 1))  # again is fine


def test_what_a_dead_stage_wrote_is_over(core: MessengerCore) -> None:
    got(core, want("a", 3))
    core.open_write(stage_write("a", 0, 1))
    core.open_write(stage_write("a", 1, 1))
    core.open_write(stage_write("a", 0, 1, life="stage-2"))
    core.release(JobId("a"), "its head died")
    core.writer_gone(Incarnation("stage-1"))
    assert core.pool.free_blocks == N_BLOCKS - 1
    core.writer_gone(Incarnation("stage-2"))


def test_a_stage_writes_only_what_its_job_may_write(core: MessengerCore) -> None:
    got(core, want("a", 2, A))
    core.seal(JobId("a"), 0, [A])
    for first, n in ((0, 1), (1, 2), (5, 1)):
        with pytest.raises(InvalidRequest):
            core.open_write(stage_write("a", first, n))
    core.open_write(stage_write("a", 1, 1))
    with pytest.raises(InvalidRequest):  # it writes these already
        core.open_write(stage_write("a", 1, 1))
    core.close_write(close_write("a", 1))
    with pytest.raises(SliceLost):
        core.open_write(stage_write("b", 0, 1))
