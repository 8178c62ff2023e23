"""KV that goes from one job to another of the same arena: the blocks change hands, and every end of it is told."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mooncake_mesh.errors import SliceLost
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import BlockState
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.landing import Landing, LandingState
from mooncake_mesh.messenger.sending import Outbound
from mooncake_proto.ids import BlockId, BlockKey, JobId
from mooncake_proto.transfer import Acquire, Acquired, FinishSend, SliceReady, StartSend
from tests.unit.mesh_doubles import until
from tests.unit.messenger_rig import BLOCK_BYTES, HERE, LAYERS, N_BLOCKS, WORKER, Rig, T, run

A, B = (BlockKey(name.encode() * 16) for name in "ab")
PREFILL, DECODE = JobId("prefill"), JobId("decode")
WHOLE = SliceReady(transfer_id=T, layer=0, n_layers=LAYERS, first_block=0, n_blocks=3)
START = StartSend(job_id=PREFILL, transfer_id=T, target=HERE, n_blocks=3, layers=LAYERS, deadline_s=30.0)


def _want(job_id: JobId, n_blocks: int, *, lands: bool = False, cached: int = 0) -> Acquire:
    return Acquire(
        job_id=job_id,
        instance_id=WORKER.instance_id,
        incarnation=WORKER.incarnation,
        keys=join_keys([A, B]),
        n_blocks=n_blocks,
        max_cached_blocks=cached,
        landing=T if lands else None,
        landing_blocks=3 if lands else 0,
        landing_layers=LAYERS if lands else 0,
    )


# --- the blocks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Iterator[MessengerCore]:
    made = MessengerCore(n_blocks=N_BLOCKS, block_bytes=BLOCK_BYTES)
    yield made
    made.pool.check_invariants()
    for job_id in made.all_jobs():
        made.release(job_id, "the test is over")
    made.pool.check_invariants()
    assert made.pool.available_blocks == N_BLOCKS, "nothing stays held"


def _got(core: MessengerCore, request: Acquire) -> list[BlockId]:
    result = core.acquire(request, 0.0)
    assert isinstance(result, Acquired)
    return [BlockId(block) for block in result.blocks]


def _landing(core: MessengerCore) -> Landing:
    landing = core.landing(T)
    assert landing is not None
    return landing


def _written(core: MessengerCore) -> Outbound:
    """A prompt of two whole blocks and a third, computed."""
    outbound = core.start_send(T, PREFILL, 3, LAYERS)
    outbound.ready(WHOLE)
    return outbound


@pytest.mark.parametrize("n_sealed", [0, 1, 2])
def test_the_receiver_gets_the_blocks_that_the_sender_wrote(core: MessengerCore, n_sealed: int) -> None:
    written = _got(core, _want(PREFILL, 3))
    fresh = _got(core, _want(DECODE, 4, lands=True))
    outbound, landing = _written(core), _landing(core)
    core.seal(PREFILL, 0, [A, B][:n_sealed])
    core.hand_over(outbound, landing, 7.0)
    assert core.blocks_of(DECODE) == (*written, fresh[3])
    assert (landing.state, landing.received_bytes, landing.last_slice_s) == (LandingState.LANDED, 0, 7.0)
    assert core.pool.match([A, B]) == written[:2], "whole blocks are shared"
    assert core.pool.free_blocks == N_BLOCKS - 4
    core.release(PREFILL, "sent")
    assert core.pool.state(written[2]) is BlockState.RESERVED
    assert core.pool.may_write(written[2], core.pool.generation(written[2])), "decoding goes on in it"


def test_what_was_cached_for_the_receiver_stays_and_the_rest_follows(core: MessengerCore) -> None:
    written = _got(core, _want(PREFILL, 3))
    core.seal(PREFILL, 0, [A])
    _got(core, _want(DECODE, 3, lands=True, cached=2))
    core.hand_over(_written(core), _landing(core), 0.0)
    assert core.blocks_of(DECODE) == tuple(written)


def test_a_twin_of_what_another_job_has_shared_is_stored_once(core: MessengerCore) -> None:
    written = _got(core, _want(PREFILL, 3))
    first = _got(core, _want(JobId("first"), 2))
    core.seal(JobId("first"), 0, [A, B])
    assert core.seal(PREFILL, 0, [A, B]) == 0
    core.release(JobId("first"), "over")
    _got(core, _want(DECODE, 3, lands=True))
    core.hand_over(_written(core), _landing(core), 0.0)
    assert core.blocks_of(DECODE) == (*first, written[2])
    core.release(PREFILL, "sent")
    assert core.pool.free_blocks == N_BLOCKS - 3


def test_the_sender_may_write_nothing_of_it_any_more(core: MessengerCore) -> None:
    written = _got(core, _want(PREFILL, 3))
    rights = [(block, core.pool.generation(block)) for block in written]
    _got(core, _want(DECODE, 3, lands=True))
    core.hand_over(_written(core), _landing(core), 0.0)
    assert not any(core.pool.may_write(block, generation) for block, generation in rights)


def test_half_written_blocks_are_not_handed_over(core: MessengerCore) -> None:
    _got(core, _want(PREFILL, 3))
    fresh = _got(core, _want(DECODE, 3, lands=True))
    outbound = core.start_send(T, PREFILL, 3, LAYERS)
    for layers in (range(LAYERS - 1), range(LAYERS - 2, LAYERS - 1)):
        outbound.ready(SliceReady(transfer_id=T, layer=layers[0], n_layers=len(layers), first_block=0, n_blocks=3))
        with pytest.raises(SliceLost, match="not all slices were written"):
            core.hand_over(outbound, _landing(core), 0.0)
    assert core.blocks_of(DECODE) == tuple(fresh)
    outbound.ready(SliceReady(transfer_id=T, layer=LAYERS - 1, n_layers=1, first_block=0, n_blocks=3))
    core.hand_over(outbound, _landing(core), 0.0)


def test_a_landing_that_has_failed_gets_nothing(core: MessengerCore) -> None:
    _got(core, _want(PREFILL, 3))
    fresh = _got(core, _want(DECODE, 3, lands=True))
    core.give_up(T, "enough")
    with pytest.raises(SliceLost, match="has ended: enough"):
        core.hand_over(_written(core), _landing(core), 0.0)
    assert core.blocks_of(DECODE) == tuple(fresh)


# --- both ends, on the loop -------------------------------------------------------------------------------------------


def _landing_job(rig: Rig, tasks: asyncio.TaskGroup) -> "asyncio.Task[Acquired | SliceLost]":
    async def wait() -> Acquired | SliceLost:
        try:
            return await rig.cut.acquire(_want(DECODE, 4, lands=True))
        except SliceLost as error:
            return error

    return tasks.create_task(wait())


async def _begin(rig: Rig) -> Acquired:
    acquired = await rig.cut.acquire(_want(PREFILL, 3))
    rig.cut.start_send(START)
    return acquired


@pytest.mark.parametrize("receiver_first", [True, False])
def test_the_jobs_of_one_node_meet_whoever_comes_first(receiver_first: bool) -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        written = await _begin(rig)
        rig.cut.announce(WHOLE)
        if receiver_first:
            landing = _landing_job(rig, tasks)
            await until(lambda: rig.core.landing(T) is not None)
            report = await rig.cut.finish_send(FinishSend(transfer_id=T))
        else:
            sending = tasks.create_task(rig.cut.finish_send(FinishSend(transfer_id=T)))
            await asyncio.sleep(0)
            assert not sending.done()
            landing = _landing_job(rig, tasks)
            report = await sending
        assert (report.transport, report.sent_bytes, report.skipped_blocks) == ("arena", 0, 0)
        landed = await landing
        assert isinstance(landed, Acquired)
        assert landed.blocks[:3] == written.blocks
        assert landed.landed is not None
        assert rig.core.all_jobs() == [DECODE], "sending ends its job"
        assert rig.cut.load().transports == "arena"
        assert rig.peer.told == [], "nobody was called"
        assert T not in rig.cut.hand_overs

    run(scenario)


def test_a_receiver_that_had_everything_and_is_over_needs_nothing() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        rig.core.seal(PREFILL, 0, [A, B])
        await rig.cut.acquire(
            Acquire(
                job_id=DECODE,
                instance_id=WORKER.instance_id,
                incarnation=WORKER.incarnation,
                keys=join_keys([A, B]),
                n_blocks=2,
                max_cached_blocks=2,
                landing=T,
                landing_blocks=2,
                landing_layers=LAYERS,
            )
        )
        rig.cut.release(DECODE)
        report = await rig.cut.finish_send(FinishSend(transfer_id=T))
        assert report.skipped_blocks == 3

    run(scenario)


def test_a_landing_whose_sender_dies_has_failed() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        landing = _landing_job(rig, tasks)
        await until(lambda: rig.core.landing(T) is not None)
        rig.cut.release(PREFILL)
        failure = await landing
        assert isinstance(failure, SliceLost)
        assert "the job was released" in str(failure)
        assert T not in rig.cut.hand_overs

    run(scenario)


def test_a_landing_that_comes_after_its_sender_died_fails_too() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)

        async def finish() -> None:
            with pytest.raises(SliceLost, match="the sender's job was released"):
                await rig.cut.finish_send(FinishSend(transfer_id=T))

        sending = tasks.create_task(finish())
        await asyncio.sleep(0)
        rig.cut.worker_gone(WORKER)
        await sending
        rig.cut.came(WORKER.incarnation)
        assert isinstance(await _landing_job(rig, tasks), SliceLost)

    run(scenario)


def test_a_receiver_that_is_gone_fails_the_sender_at_its_end() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        rig.cut.announce(WHOLE)
        landing = _landing_job(rig, tasks)
        await until(lambda: rig.core.landing(T) is not None)
        rig.cut.release(DECODE)
        with pytest.raises(SliceLost, match="the job was released"):
            await rig.cut.finish_send(FinishSend(transfer_id=T))
        assert isinstance(await landing, SliceLost)
        assert rig.core.n_jobs == 0

    run(scenario)


def test_a_receiver_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        await rig.cut.acquire(_want(PREFILL, 3))
        rig.cut.start_send(replace(START, deadline_s=0.01))
        rig.cut.announce(WHOLE)
        with pytest.raises(SliceLost, match=r"took over 0\.01 s"):
            await rig.cut.finish_send(FinishSend(transfer_id=T))
        assert (rig.core.n_jobs, T in rig.cut.hand_overs) == (0, False)

    run(scenario)


def test_slices_outside_the_blocks_are_refused_and_those_of_nobody_mean_nothing() -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        await _begin(rig)
        with pytest.raises(SliceLost, match="no slices"):
            rig.cut.announce(SliceReady(transfer_id=T, layer=0, n_layers=LAYERS, first_block=0, n_blocks=4))
        rig.cut.release(PREFILL)
        rig.cut.announce(WHOLE)
        assert rig.core.n_jobs == 0

    run(scenario)
