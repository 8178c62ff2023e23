"""How jobs and transfers of a messenger end when a worker, a peer or a message is not where it should be."""

import asyncio
import dataclasses
import re

import pytest

from mooncake_mesh.config import TransportKind
from mooncake_mesh.errors import PeerUnreachable, SliceLost, TransferError
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.mesh.arena import Holder
from mooncake_mesh.messenger.landing import SliceSpan
from mooncake_mesh.messenger.transports import tls
from mooncake_mesh.messenger.transports.api import Incoming
from mooncake_mesh.messenger.transports.certificates import new_identity
from mooncake_proto.ids import Incarnation, JobId
from mooncake_proto.transfer import (
    AbortTransfer,
    Acquired,
    OpenTransfer,
    PushBlocks,
    Pushing,
    Replicate,
    StartSend,
    TransferPlan,
)
from tests.unit.mesh_doubles import until
from tests.unit.messenger_rig import BLOCK_BYTES, KEY, LAYERS, OTHER, WORKER, Rig, T, run


def _slice(logical: int = 0) -> list[Incoming]:
    span = SliceSpan(logical=logical, layer=0, n_layers=LAYERS)
    return [Incoming(span=span, size_bytes=BLOCK_BYTES, checksum=None)]


# --- transports that were asked for by name ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked_for", "offered"), [(TransportKind.TCP, ("rdma",)), (TransportKind.RDMA, ("tcp",)), (TransportKind.RDMA, ())]
)
def test_a_transport_that_was_asked_for_by_name_is_never_replaced(
    asked_for: TransportKind, offered: tuple[str, ...]
) -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting = tasks.create_task(rig.acquire("j", landing=T, landing_blocks=2, landing_layers=LAYERS))
        with pytest.raises(
            TransferError, match=rf"^no common transport: node0 offers .*, node0 takes {asked_for.value}$"
        ):
            await rig.receiver.open(OpenTransfer(transfer_id=T, source=rig.info, transports=offered))
        waiting.cancel()

    run(scenario, asked_for)


def test_of_the_transports_that_are_offered_the_one_asked_for_is_taken() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting = tasks.create_task(rig.acquire("j", landing=T, landing_blocks=2, landing_layers=LAYERS))
        request = OpenTransfer(transfer_id=T, source=rig.info, transports=("shm", "rdma", "tcp"))
        assert (await rig.receiver.open(request)).transport == "tcp"
        waiting.cancel()

    run(scenario)


# --- encryption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "identity", "names"),
    [
        (TransportKind.TCP, None, ("tcp",)),
        (TransportKind.TCP, new_identity(), ("tcp+tls",)),
        (TransportKind.AUTO, None, ("shm", "tcp")),
        (TransportKind.AUTO, new_identity(), ("shm", "tcp+tls")),
    ],
)
def test_encrypted_tcp_is_another_transport_than_tcp(
    transport: TransportKind, identity: tls.Identity | None, names: tuple[str, ...]
) -> None:
    """So two nodes with different settings find no common one, and each says what it has."""
    other = "tcp" if names[-1] == "tcp+tls" else "tcp+tls"

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting = tasks.create_task(rig.acquire("j", landing=T, landing_blocks=2, landing_layers=LAYERS))
        text = re.escape(f"no common transport: node0 offers {other}, node0 takes {', '.join(names)}")
        with pytest.raises(TransferError, match=f"^{text}$"):
            await rig.receiver.open(OpenTransfer(transfer_id=T, source=rig.info, transports=(other,)))
        plan = await rig.receiver.open(OpenTransfer(transfer_id=T, source=rig.info, transports=names[-1:]))
        assert (plan.transport, len(plan.link_secret)) == (names[-1], 64)
        assert plan.tls_fingerprint == ("" if identity is None else identity.fingerprint.hex())
        waiting.cancel()

    run(scenario, transport, identity)


@pytest.mark.parametrize(
    ("transport", "fingerprint", "refusal"),
    [
        ("tcp", "", "'tcp' was not offered, but tcp+tls"),
        ("tcp+tls", "", "does not say what its certificate is"),
        ("shm", "", "'shm' was not offered"),
    ],
)
def test_a_plan_that_would_have_kv_travel_in_clear_is_not_followed(
    transport: str, fingerprint: str, refusal: str
) -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        rig.peer.answers[OpenTransfer] = TransferPlan(
            transfer_id=T,
            transport=transport,
            tcp_host="localhost",
            tcp_port=1,
            token="00" * 16,
            slots=(),
            link_secret="00" * 32,
            tls_fingerprint=fingerprint,
        )
        await rig.acquire("j")
        rig.cut.start_send(
            StartSend(job_id=JobId("j"), transfer_id=T, target=OTHER, n_blocks=2, layers=LAYERS, deadline_s=60.0)
        )
        with pytest.raises(TransferError, match=re.escape(refusal)):
            await rig.sender.finish(T)
        await until(lambda: any(isinstance(told, AbortTransfer) and refusal in told.reason for told in rig.peer.told))
        rig.cut.end_job(JobId("j"), "released")

    run(scenario, TransportKind.TCP, new_identity())


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_a_job_released_before_its_transfer_has_begun_tells_the_receiver() -> None:
    """Both messages may lie in one read: the transfer's task is cancelled before its first step."""

    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        await rig.acquire("j")
        start = StartSend(job_id=JobId("j"), transfer_id=T, target=OTHER, n_blocks=2, layers=LAYERS, deadline_s=60.0)
        rig.cut.start_send(start)
        rig.cut.end_job(JobId("j"), "released")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert rig.peer.told == [AbortTransfer(transfer_id=T, reason="the sender's job was released")]

    run(scenario)


def test_an_abort_that_comes_before_its_landing_ends_it() -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        await rig.receiver.abort(T, "prefill failed")
        with pytest.raises(SliceLost, match="prefill failed"):
            await rig.acquire("j", landing=T, landing_blocks=2, landing_layers=LAYERS)

    run(scenario)


@pytest.mark.parametrize("is_released", [False, True], ids=["its job waits", "its job was released meanwhile"])
def test_an_abort_is_acknowledged_after_the_last_write(is_released: bool) -> None:
    """The sender may use its memory for something else from then on."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting, token = await rig.open_landing(tasks, "j")
        places = rig.receiver.begin(token, _slice())
        if is_released:
            rig.cut.end_job(JobId("j"), "released")
        abort = tasks.create_task(rig.receiver.abort(T, "the sender's job was released"))
        assert isinstance(await waiting, SliceLost)
        assert not abort.done()
        rig.receiver.end(token, places, None)
        async with asyncio.timeout(5.0):
            await abort
        with pytest.raises(SliceLost):
            rig.receiver.begin(token, _slice())

    run(scenario)


def test_a_repeated_slice_that_ends_after_its_job_means_nothing() -> None:
    """It was admitted without a place to write to, so nothing is in flight, and the landing is not kept for it."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting, token = await rig.open_landing(tasks, "j")
        rig.receiver.end(token, rig.receiver.begin(token, [_slice()[0], _slice(1)[0]]), None)
        await waiting
        assert rig.receiver.begin(token, _slice()) == []
        rig.cut.end_job(JobId("j"), "done")
        rig.receiver.end(token, [], None)

    run(scenario)


# --- senders that come late -------------------------------------------------------------------------------------------


def test_a_sender_that_comes_after_the_job_has_gone_with_all_it_wanted_has_nothing_to_send() -> None:
    """A receiver that found everything cached waits for nobody, and may be over before the sender has begun."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting, token = await rig.open_landing(tasks, "j")
        places = rig.receiver.begin(token, [_slice()[0], _slice(1)[0]])
        rig.receiver.end(token, places, None)
        assert isinstance(await waiting, Acquired)
        rig.cut.end_job(JobId("j"), "done")
        again = OpenTransfer(transfer_id=T, source=rig.info, transports=("tcp",))
        async with asyncio.timeout(5.0):
            assert (await rig.receiver.open(again)).slots == ()

    run(scenario)


def test_a_sender_that_comes_after_the_job_was_released_is_told_at_once() -> None:
    """It would hold its blocks and wait for the landing until its deadline."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        waiting, _ = await rig.open_landing(tasks, "j")
        rig.cut.end_job(JobId("j"), "the job was released")
        assert isinstance(await waiting, SliceLost)
        with pytest.raises(SliceLost, match="the job was released"):
            async with asyncio.timeout(5.0):
                await rig.receiver.open(OpenTransfer(transfer_id=T, source=rig.info, transports=("tcp",)))

    run(scenario)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_fetch_ends_with_the_messenger_it_comes_from() -> None:
    """It had promised the blocks; the job computes them instead of waiting for the fetch to time out."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        rig.peer.answers[PushBlocks] = Pushing(transfer_id=T, n_blocks=1)
        waiting = tasks.create_task(rig.acquire("j", fetch_from=OTHER, fetch_blocks=1))
        await until(lambda: any(isinstance(body, PushBlocks) for body in rig.peer.told), "the fetch to be asked for")
        rig.cut.peer_lost("ipc:///somebody-else")
        await asyncio.sleep(0)
        assert not waiting.done()
        rig.cut.peer_lost(OTHER)
        assert (await waiting).cached_blocks == 0
        rig.cut.end_job(JobId("j"), "done")

    run(scenario)


def test_a_fetch_from_a_node_that_is_gone_waits_for_nobody() -> None:
    """The conductor may say for seconds that a dead node has a prefix."""

    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        rig.peer.there = False
        assert (await rig.acquire("j", fetch_from=OTHER, fetch_blocks=1)).cached_blocks == 0
        assert rig.core.n_jobs == 1, "the job's own blocks, and none of the fetch"
        rig.cut.end_job(JobId("j"), "done")

    run(scenario)


def test_a_push_to_a_node_that_is_gone_holds_nothing() -> None:
    """Asked for before its receiver died, heard of afterwards."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await rig.acquire("j")
        rig.core.seal(JobId("j"), 0, [KEY])
        rig.cut.end_job(JobId("j"), "done")
        rig.peer.there = False
        push = PushBlocks(transfer_id=T, target=OTHER, keys=join_keys([KEY]), deadline_s=20.0)
        assert (await rig.cut.push_blocks(push)).n_blocks == 1
        await until(lambda: rig.core.n_jobs == 0, "the push to be given up")
        assert rig.core.pool.evictable_blocks == 1

    run(scenario)


def test_a_push_that_an_earlier_life_of_its_receiver_asked_for_is_refused_at_once() -> None:
    """The next life answers on the same endpoint, and will never reserve a landing for it."""

    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        push = OpenTransfer(transfer_id=T, source=rig.info, transports=("tcp",), was_asked_for=True)
        with pytest.raises(SliceLost, match="no landing"):
            async with asyncio.timeout(5.0):
                await rig.receiver.open(push)
        landing = tasks.create_task(rig.receiver.open(dataclasses.replace(push, was_asked_for=False)))
        await asyncio.sleep(0)
        assert not landing.done(), "a decode job may reserve it any moment"
        landing.cancel()

    run(scenario)


def test_a_push_says_that_it_was_asked_for() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        await rig.acquire("j")
        rig.core.seal(JobId("j"), 0, [KEY])
        rig.cut.end_job(JobId("j"), "done")
        await rig.cut.push_blocks(PushBlocks(transfer_id=T, target=OTHER, keys=join_keys([KEY]), deadline_s=0.1))
        await until(lambda: any(isinstance(body, OpenTransfer) for body in rig.peer.told), "the push to be opened")
        assert [body.was_asked_for for body in rig.peer.told if isinstance(body, OpenTransfer)] == [True]
        await until(lambda: rig.core.n_jobs == 0, "the push to be given up")

    run(scenario)


def test_a_prefix_that_two_jobs_want_is_fetched_by_one_at_a_time() -> None:
    async def scenario(rig: Rig, tasks: asyncio.TaskGroup) -> None:
        def asked() -> int:
            return sum(isinstance(body, PushBlocks) for body in rig.peer.told)

        rig.peer.answers[PushBlocks] = Pushing(transfer_id=T, n_blocks=1)
        waiting = [tasks.create_task(rig.acquire(job, fetch_from=OTHER, fetch_blocks=1)) for job in ("j", "k")]
        await until(lambda: asked() == 1, "the fetch to be asked for")
        for _ in range(10):
            await asyncio.sleep(0)
        assert asked() == 1
        rig.cut.peer_lost(OTHER)
        await until(lambda: asked() == 2, "the second job to try for itself, as nothing has come")
        rig.cut.peer_lost(OTHER)
        for one in waiting:
            rig.cut.end_job((await one).job_id, "done")

    run(scenario)


def test_replicas_come_one_at_a_time_and_hold_nothing() -> None:
    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        rig.peer.answers[PushBlocks] = Pushing(transfer_id=T, n_blocks=1)
        order = Replicate(keys=join_keys([KEY]), source=OTHER)
        rig.cut.replicate(order)
        await until(lambda: rig.core.n_jobs == 1, "blocks to be reserved for it")
        rig.cut.replicate(Replicate(keys=b"o" * 16, source=OTHER))
        await asyncio.sleep(0)
        assert sum(isinstance(body, PushBlocks) for body in rig.peer.told) == 1
        rig.cut.peer_lost(OTHER)
        await until(lambda: rig.core.n_jobs == 0, "it to be given up")

    run(scenario)


def test_a_worker_of_an_earlier_life_of_the_messenger_gets_no_blocks() -> None:
    """Its call waited for a connection and reached the next life; were it to die now, nobody would release them."""

    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        with pytest.raises(PeerUnreachable, match="prefill0"):
            await rig.acquire("j", Incarnation("older"))
        assert rig.core.n_jobs == 0
        rig.cut.came(Incarnation("older"))
        await rig.acquire("j", Incarnation("older"))
        rig.cut.worker_gone(Holder(instance_id=WORKER.instance_id, incarnation=Incarnation("older")))
        assert rig.core.n_jobs == 0

    run(scenario)


def test_a_release_that_overtakes_its_acquire_is_not_forgotten() -> None:
    """A worker gave a job up while the messenger was stopped; the Acquire comes by the older connection."""

    async def scenario(rig: Rig, _: asyncio.TaskGroup) -> None:
        rig.cut.release(JobId("j"))
        with pytest.raises(SliceLost, match="released before"):
            await rig.acquire("j")
        assert rig.core.n_jobs == 0
        await rig.acquire("k")
        rig.cut.release(JobId("k"))
        assert rig.core.n_jobs == 0

    run(scenario)
