"""KV that goes from one job to another of the same arena: the blocks change hands, and every end of it is told."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mooncake_mesh.errors import InvalidRequest, MooncakeError, SliceLost
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.block_pool import BlockState, NoRoom
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.sending import Outbound
from mooncake_proto.ids import BlockId, BlockKey, Incarnation, InstanceId, JobId
from mooncake_proto.transfer import Acquire, Acquired, FinishSend, SendReport, SliceReady, StartSend
from tests.unit.messenger_rig import HERE, LAYERS, N_BLOCKS, WORKER, Rig, T, audited_core, run

A, B = (BlockKey(name.encode() * 16) for name in "ab")
PREFILL, DECODE = JobId("prefill"), JobId("decode")
WHOLE = SliceReady(transfer_id=T, layer=0, n_layers=LAYERS, first_block=0, n_blocks=3)
START = StartSend(job_id=PREFILL, transfer_id=T, target=HERE, n_blocks=3, layers=LAYERS, deadline_s=30.0)


def _prompt(n_blocks: int = 3) -> Acquire:
    """Blocks for a prompt of two whole ones and a third, of which nothing is cached."""
    return Acquire(
        job_id=PREFILL,
        instance_id=WORKER.instance_id,
        incarnation=WORKER.incarnation,
        keys=join_keys([A, B]),
        n_blocks=n_blocks,
        max_cached_blocks=0,
    )


def _rest(n_blocks: int = 3) -> Acquire:
    """The same prompt's, for whoever decodes behind it."""
    return replace(
        _prompt(n_blocks),
        job_id=DECODE,
        landing=T,
        landing_blocks=3,
        landing_layers=LAYERS,
        landing_from=HERE,
    )


# --- the blocks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Iterator[MessengerCore]:
    with audited_core() as made:
        yield made


def _got(core: MessengerCore, request: Acquire) -> list[BlockId]:
    result = core.acquire(request, 0.0)
    assert isinstance(result, Acquired)
    return [BlockId(block) for block in result.blocks]


def _written(core: MessengerCore, n_sealed: int = 0) -> Outbound:
    outbound = core.start_send(T, PREFILL, 3, LAYERS)
    outbound.ready(WHOLE)
    core.seal(PREFILL, 0, [A, B][:n_sealed])
    return outbound


def _taken(core: MessengerCore, outbound: Outbound, n_blocks: int = 3) -> list[BlockId]:
    result = core.take_over(_rest(n_blocks), outbound)
    assert isinstance(result, Acquired)
    assert core.blocks_of(DECODE) == result.blocks
    return [BlockId(block) for block in result.blocks]


@pytest.mark.parametrize("n_sealed", [0, 1, 2])
def test_the_receiver_has_what_the_sender_wrote(core: MessengerCore, n_sealed: int) -> None:
    written = _got(core, _prompt())
    assert _taken(core, _written(core, n_sealed)) == written
    assert core.pool.match([A, B]) == written[:2], "whole blocks are shared"
    core.release(PREFILL, "sent")
    assert core.pool.free_blocks == N_BLOCKS - 3
    assert core.pool.state(written[2]) is BlockState.RESERVED
    assert core.pool.may_write(written[2], core.pool.generation(written[2])), "decoding goes on in it"


def test_a_block_behind_the_prompt_comes_with_it_or_is_a_fresh_one(core: MessengerCore) -> None:
    written = _got(core, _prompt(4))
    blocks = _taken(core, _written(core), 5)
    assert blocks[:4] == written
    assert core.pool.state(blocks[4]) is BlockState.RESERVED
    assert core.pool.free_blocks == N_BLOCKS - 5


def test_without_room_for_a_fresh_one_the_sender_keeps_all(core: MessengerCore) -> None:
    written = _got(core, _prompt())
    _got(core, replace(_prompt(N_BLOCKS - 3), job_id=JobId("other")))
    outbound = _written(core)
    assert isinstance(core.take_over(_rest(4), outbound), NoRoom)
    assert (core.blocks_of(PREFILL), core.has_job(DECODE)) == (tuple(written), False)
    assert _taken(core, outbound) == written


def test_a_twin_of_what_another_job_has_shared_is_stored_once(core: MessengerCore) -> None:
    written = _got(core, _prompt())
    first = _got(core, replace(_prompt(2), job_id=JobId("first")))
    core.seal(JobId("first"), 0, [A, B])
    core.release(JobId("first"), "over")
    assert _taken(core, _written(core, n_sealed=2)) == [*first, written[2]]
    core.release(PREFILL, "sent")
    assert core.pool.free_blocks == N_BLOCKS - 3


def test_the_sender_may_write_nothing_of_it_any_more(core: MessengerCore) -> None:
    rights = [(block, core.pool.generation(block)) for block in _got(core, _prompt())]
    _taken(core, _written(core))
    assert not any(core.pool.may_write(block, generation) for block, generation in rights)


def test_half_written_blocks_are_not_taken(core: MessengerCore) -> None:
    written = _got(core, _prompt())
    outbound = core.start_send(T, PREFILL, 3, LAYERS)
    for layers in (range(LAYERS - 1), range(LAYERS - 2, LAYERS - 1)):
        outbound.ready(replace(WHOLE, layer=layers[0], n_layers=len(layers)))
        with pytest.raises(SliceLost, match="not all slices were written"):
            core.take_over(_rest(), outbound)
    outbound.ready(replace(WHOLE, layer=LAYERS - 1, n_layers=1))
    assert _taken(core, outbound) == written


def test_what_could_never_be_had_is_refused(core: MessengerCore) -> None:
    _got(core, _prompt())
    outbound = _written(core)
    for wrong, param in ((replace(_rest(), landing_layers=0), "landing_layers"), (_rest(N_BLOCKS + 1), "n_blocks")):
        with pytest.raises(InvalidRequest) as refused:
            core.take_over(wrong, outbound)
        assert refused.value.param == param
    _taken(core, outbound)
    with pytest.raises(InvalidRequest, match="has its blocks already"):
        core.take_over(_rest(), outbound)


# --- both ends, on the loop -------------------------------------------------------------------------------------------


def _receiver(
    rig: Rig, tasks: asyncio.TaskGroup, request: Acquire | None = None
) -> "asyncio.Task[Acquired | MooncakeError]":
    async def wait() -> Acquired | MooncakeError:
        try:
            return await rig.cut.acquire(request or _rest())
        except MooncakeError as error:
            return error

    return tasks.create_task(wait())


def _sender(rig: Rig, tasks: asyncio.TaskGroup) -> "asyncio.Task[SendReport | MooncakeError]":
    """It has written all."""
    rig.cut.announce(WHOLE)

    async def finish() -> SendReport | MooncakeError:
        try:
            return await rig.cut.finish_send(FinishSend(transfer_id=T))
        except MooncakeError as error:
            return error

    return tasks.create_task(finish())


async def _begin(rig: Rig) -> Acquired:
    acquired = await rig.cut.acquire(_prompt())
    rig.cut.start_send(START)
    return acquired


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("first", ["the receiver asks", "the sender begins", "the sender has written"])
def test_they_meet_whoever_comes_first(first: str) -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        if first == "the receiver asks":
            receiver = _receiver(rig, tasks)
            await _turns()
        written = await _begin(rig)
        if first == "the sender begins":
            receiver = _receiver(rig, tasks)
            await _turns()
        sender = _sender(rig, tasks)
        await _turns()
        if first == "the sender has written":
            assert not sender.done()
            receiver = _receiver(rig, tasks)
        report, acquired = await sender, await receiver
        assert isinstance(report, SendReport)
        assert (report.transport, report.sent_bytes) == ("arena", 0)
        assert isinstance(acquired, Acquired)
        assert acquired.blocks == written.blocks
        assert acquired.landed is not None
        assert rig.core.all_jobs() == [DECODE], "sending ends its job"
        assert rig.cut.load().transports == "arena"
        assert rig.peer.told == [], "nobody was called"
        assert T not in rig.cut.hand_overs

    run(scenario)


def test_a_receiver_holds_nothing_before() -> None:
    """So senders that fill the arena still find their receivers."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        receiver = _receiver(rig, tasks, _rest(N_BLOCKS))
        await _turns()
        assert rig.core.pool.free_blocks == N_BLOCKS
        acquired = await rig.cut.acquire(_prompt(N_BLOCKS))
        rig.cut.start_send(START)
        assert isinstance(await _sender(rig, tasks), SendReport)
        landed = await receiver
        assert isinstance(landed, Acquired)
        assert landed.blocks == acquired.blocks

    run(scenario)


def test_a_receiver_waits_for_room_behind_the_prompt() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        await rig.cut.acquire(replace(_prompt(N_BLOCKS - 3), job_id=JobId("other")))
        receiver, sender = _receiver(rig, tasks, _rest(4)), _sender(rig, tasks)
        await _turns()
        assert [receiver.done(), sender.done()] == [False, False]
        rig.cut.release(JobId("other"))
        assert isinstance(await receiver, Acquired)
        assert isinstance(await sender, SendReport)

    run(scenario)


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_sender_that_dies_fails_its_receiver(when: str) -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        if when == "before":
            rig.cut.release(PREFILL)
            receiver = _receiver(rig, tasks)
        else:
            receiver = _receiver(rig, tasks)
            await _turns()
            rig.cut.release(PREFILL)
        assert "the job was released" in str(await receiver)
        assert (rig.core.n_jobs, T in rig.cut.hand_overs) == (0, False)

    run(scenario)


def test_a_sender_that_dies_at_its_end_is_told() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        sender = _sender(rig, tasks)
        await _turns()
        rig.cut.release(PREFILL)
        assert "the sender's job was released" in str(await sender)
        assert isinstance(await _receiver(rig, tasks), SliceLost)

    run(scenario)


@pytest.mark.parametrize("how", ["released", "its process is gone", "its call was cancelled"])
@pytest.mark.parametrize("is_finishing", [False, True])
def test_a_receiver_that_is_gone_fails_the_sender_at_its_end(how: str, is_finishing: bool) -> None:
    """Without room behind the prompt, so that it still waits when the sender has written all."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        await rig.cut.acquire(replace(_prompt(N_BLOCKS - 3), job_id=JobId("other")))
        decode = Incarnation("decode")
        rig.cut.came(decode)
        receiver = _receiver(rig, tasks, replace(_rest(4), incarnation=decode))
        sender = _sender(rig, tasks) if is_finishing else None
        await _turns()
        if how == "released":
            rig.cut.release(DECODE)
        elif how == "its process is gone":
            rig.cut.worker_gone(Holder(instance_id=InstanceId("decode0"), incarnation=decode))
        else:
            receiver.cancel()
        await asyncio.wait([receiver])
        failure = await (sender or _sender(rig, tasks))
        assert isinstance(failure, SliceLost)
        assert "has ended" in str(failure)
        assert rig.core.all_jobs() == [JobId("other")]

    run(scenario)


def test_a_receiver_that_does_not_come_is_not_waited_for_for_ever() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await rig.cut.acquire(_prompt())
        rig.cut.start_send(replace(START, deadline_s=0.01))
        failure = await _sender(rig, tasks)
        assert isinstance(failure, SliceLost)
        assert "took over 0.01 s" in str(failure)
        assert (rig.core.n_jobs, T in rig.cut.hand_overs) == (0, False)

    run(scenario)


def test_a_receiver_that_waits_for_another_node_is_not_met() -> None:
    """It has blocks reserved for a transfer: nobody would fill them."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await _begin(rig)
        receiver = _receiver(rig, tasks, replace(_rest(), landing_from="ipc:///elsewhere"))
        await _turns()
        failure = await _sender(rig, tasks)
        assert isinstance(failure, SliceLost)
        assert "waits for blocks of another node" in str(failure)
        assert isinstance(await receiver, SliceLost)

    run(scenario)


def test_slices_outside_the_blocks_are_refused_and_those_of_nobody_mean_nothing() -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        await _begin(rig)
        with pytest.raises(SliceLost, match="no slices"):
            rig.cut.announce(replace(WHOLE, n_blocks=4))
        rig.cut.release(PREFILL)
        rig.cut.announce(WHOLE)
        assert rig.core.n_jobs == 0

    run(scenario)
