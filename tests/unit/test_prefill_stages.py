"""What stages and their head decide about chunks: order, arrival, drops, slots; and activations through a door."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_mesh.config import TransportKind
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.engine.api import PrefillChunk, SampleRequest
from mooncake_mesh.errors import Aborted, InternalError, InvalidRequest, MeshError, PeerUnreachable, TransferError
from mooncake_mesh.messenger.identity import identity_for
from mooncake_mesh.messenger.transports.tls import Identity
from mooncake_mesh.prefill.activations import Outlet, SlotMemory, open_door
from mooncake_mesh.prefill.doors import Reach
from mooncake_mesh.prefill.pipeline_core import failure_of, is_breaking, room_of, told, told_to
from mooncake_mesh.prefill.stage_core import Flight, StageCore, StagedPrompt, StageWork, ends_prompt, prefix_keys
from mooncake_proto.ids import Incarnation, InstanceId, JobId
from mooncake_proto.pipeline import StageChunk, StageDoor, StageJoined, StageMemory
from mooncake_proto.serving import Sampling

LIFE, OTHER = Incarnation("p1"), Incarnation("p2")
DOOR = StageDoor(host_id="h", shm_path="", tcp_host="h", tcp_port=1, token="", link_secret="")


def chunk(number: int, job: str = "a", pipeline: Incarnation = LIFE) -> StageChunk:
    return StageChunk(
        pipeline=pipeline, number=number, job_id=JobId(job), transfer_id=None, start=0, n_tokens=4, blocks=(1,)
    )


def joined() -> StageCore:
    core = StageCore()
    core.join(LIFE)
    return core


def taken(core: StageCore) -> StageWork:
    work = core.next()
    assert work is not None
    return work


# --- a stage ----------------------------------------------------------------------------------------------------------


def test_chunks_are_computed_in_order_whatever_arrives_first() -> None:
    core = joined()
    core.arrived(LIFE, 1, 64)  # sooner than its chunk
    for number in (0, 1):
        core.offer(chunk(number))
    assert core.next() is None
    core.arrived(LIFE, 0, 32)
    works = [taken(core), taken(core)]
    assert [work.chunk.number for work in works] == [0, 1]
    assert [core.size_bytes(work) for work in works] == [32, 64]
    assert core.next() is None
    assert not core.is_idle
    for work in works:
        core.done(work)
    assert core.is_idle


def test_a_dropped_chunk_is_ended_without_its_activations() -> None:
    core = joined()
    for number, job in enumerate("aab"):
        core.offer(chunk(number, job))
    core.arrived(LIFE, 2, 64)
    core.drop(JobId("a"), Aborted("cancelled"))
    works = [taken(core) for _ in range(3)]
    assert [work.stop is None for work in works] == [False, False, True]
    for work in works:
        core.done(work)
    core.arrived(LIFE, 1, 64)  # it was on its way: nobody waits for it, and it is not kept
    core.offer(chunk(3))
    assert core.next() is None
    assert core.chunks == 1


def test_chunks_of_another_pipeline_or_out_of_order_are_refused() -> None:
    core = joined()
    with pytest.raises(PeerUnreachable):
        core.offer(chunk(0, pipeline=OTHER))
    core.offer(chunk(5))
    with pytest.raises(InvalidRequest):
        core.offer(chunk(5))
    core.drop_all(PeerUnreachable("gone"))
    core.done(taken(core))
    core.join(OTHER)
    core.arrived(LIFE, 0, 64)
    core.offer(chunk(0, pipeline=OTHER))
    assert core.next() is None


def test_a_stage_that_left_takes_nothing_until_it_joins() -> None:
    core = joined()
    core.offer(chunk(0))
    core.leave(PeerUnreachable("the arena is gone"))
    assert taken(core).stop is not None
    with pytest.raises(PeerUnreachable):
        core.offer(chunk(1))


@pytest.mark.parametrize(
    ("start", "n_tokens", "known", "is_last"), [(0, 8, 0, False), (8, 8, 2, False), (16, 3, 4, True)]
)
def test_keys_name_the_prefix_of_a_chunk_and_its_end_that_of_the_prompt(
    start: int, n_tokens: int, known: int, is_last: bool
) -> None:
    """Four whole blocks of four tokens, and three tokens more."""
    keys = bytes(range(64))
    told = replace(chunk(0), start=start, n_tokens=n_tokens, prompt_tokens=19, keys=keys)
    assert b"".join(prefix_keys(told, 4)) == keys[: 16 * known]
    assert ends_prompt(told) is is_last
    assert prefix_keys(replace(told, keys=b""), 4) == []


# --- the head ---------------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again_when_the_chunk_before_is_over() -> None:
    flight = Flight(slots=2)
    assert [flight.begin(), flight.begin(), flight.begin()] == [0, 1, None]
    flight.over(1)
    assert flight.begin() is None  # slot 0 is next, and in use
    flight.over(0)
    assert [flight.begin(), flight.begin(), flight.begin()] == [2, 3, None]
    assert flight.n_open == 2


def stage_of(first: int, end: int, memory: StageMemory | None = None) -> StageJoined:
    return StageJoined(
        instance_id=InstanceId("s"),
        incarnation=Incarnation("i"),
        arena=Incarnation("m"),
        fingerprint="f",
        dtype="float32",
        first_layer=first,
        end_layer=end,
        layers=6,
        hidden_bytes=8,
        door=DOOR,
        memory=memory,
    )


def test_stages_are_told_their_own_blocks_and_the_last_one_how_to_draw() -> None:
    near, far = stage_of(2, 4), stage_of(4, 6, StageMemory(n_blocks=9, door=DOOR))
    prompt = StagedPrompt(job_id=JobId("a"), transfer_id=None, n_tokens=20, cached_blocks=0, keys=b"k" * 32)
    sample = SampleRequest(sampling=Sampling(temperature=0.0), position=1, history=np.arange(20, dtype=np.int32))

    def told_all(start: int, end: int, *, is_first: bool) -> list[StageChunk]:
        tokens = np.arange(start, end, dtype=np.int32)
        last = sample if end == 20 else None
        work = PrefillChunk(sequence="a", tokens=tokens, start=start, blocks=(7, 8, 9), sample=last)
        said = told(LIFE, 3, work, prompt, is_first=is_first)
        return [told_to(stage, said, work, (0, 1, 2)) for stage in (near, far)]

    first, middle, last = (
        told_all(0, 8, is_first=True),
        told_all(8, 16, is_first=False),
        told_all(16, 20, is_first=False),
    )
    for chunks in (first, middle, last):
        assert [chunk.blocks for chunk in chunks] == [(7, 8, 9), (0, 1, 2)]
    assert [chunk.keys for chunk in (first[0], middle[0], last[0])] == [prompt.keys, b"", prompt.keys]
    assert [ends_prompt(chunk) for chunk in (*middle, *last)] == [False, False, True, True]
    assert [chunk.sampling for chunk in (*first, *last)] == [None, None, None, sample.sampling]
    assert (last[1].drawn_tokens, len(last[1].tokens)) == (1, 80)
    assert [room_of(stages) for stages in ([near], [near, far])] == [None, 9]


def test_what_went_wrong_first_is_said_rather_than_what_follows_from_it() -> None:
    own, lost, dropped = InternalError("the engine failed"), PeerUnreachable("gone"), Aborted("the job was dropped")
    assert failure_of([None, dropped, lost, own]) is own
    assert failure_of([dropped, lost]) is lost
    assert failure_of([dropped, None]) is dropped
    assert failure_of([None]) is None
    assert [is_breaking(error) for error in (own, lost, dropped)] == [False, True, False]


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "tcp", "tcp+tls"])
def test_activations_come_through_the_door(tmp_path: Path, transport: str) -> None:
    async def run() -> None:
        arrived: list[tuple[int, int]] = []
        inside, outside = SlotMemory(2, 100_000), SlotMemory(2, 100_000)
        reach = _reach(tmp_path, identity_for("test") if transport == "tcp+tls" else None)
        door = open_door(reach, "door", inside, lambda *which: arrived.append(which))
        outlet = Outlet(door.address if transport == "shm" else _elsewhere(door.address), outside, reach)
        assert outlet.transport == transport
        for number, fill in ((6, b"a"), (7, b"b"), (8, b"c")):
            size = 90_000 + number
            outside.view(number, size)[:] = fill * size
            await outlet.send(number, size)
            assert inside.view(number, size) == fill * size
        assert arrived == [(6, 90_006), (7, 90_007), (8, 90_008)]
        outlet.close()
        await door.close()

    asyncio.run(run())


def test_a_door_takes_nothing_for_another_pipeline(tmp_path: Path) -> None:
    async def run() -> None:
        arrived: list[int] = []
        memory = SlotMemory(2, 4096)
        reach = _reach(tmp_path)
        door = open_door(reach, "door", memory, lambda n, _: arrived.append(n))
        wrong = _changed(door.address, token="00" * 16)
        outlets: Sequence[Outlet] = (
            Outlet(wrong, SlotMemory(2, 4096), reach),
            Outlet(door.address, SlotMemory(2, 8192), reach),
        )
        for outlet, size in zip(outlets, (4096, 8192), strict=True):  # the second sends more than a slot takes
            with pytest.raises(TransferError):
                await outlet.send(0, size)
            outlet.close()
        assert arrived == []
        await door.close()

    asyncio.run(run())


def test_nothing_goes_in_clear_where_it_is_to_be_encrypted(tmp_path: Path) -> None:
    async def run() -> None:
        door = open_door(_reach(tmp_path), "door", SlotMemory(2, 4096), lambda *_: None)
        with pytest.raises(MeshError, match="tcp_tls"):
            Outlet(_elsewhere(door.address), SlotMemory(2, 4096), _reach(tmp_path, identity_for("test")))
        await door.close()

    asyncio.run(run())


def test_a_way_is_of_the_transport_that_is_asked_for(tmp_path: Path) -> None:
    async def run() -> None:
        memory, reach = SlotMemory(2, 4096), _reach(tmp_path)
        door = open_door(reach, "door", memory, lambda *_: None)
        assert Outlet(door.address, memory, replace(reach, transport=TransportKind.TCP)).transport == "tcp"
        with pytest.raises(MeshError, match="transport"):
            Outlet(_elsewhere(door.address), memory, replace(reach, transport=TransportKind.SHM))
        await door.close()

    asyncio.run(run())


def test_others_are_told_the_address_that_is_advertised(tmp_path: Path) -> None:
    async def run() -> None:
        config = PipelineConfig(run_dir=tmp_path, data_host="127.0.0.1", advertise_host="stage-1.example")
        door = open_door(Reach.of(config), "door", SlotMemory(2, 4096), lambda *_: None)
        assert door.address.tcp_host == "stage-1.example"
        await door.close()

    asyncio.run(run())


def _reach(folder: Path, identity: Identity | None = None) -> Reach:
    return Reach(run_dir=folder, listen="127.0.0.1", host="127.0.0.1", identity=identity)


def _elsewhere(door: StageDoor) -> StageDoor:
    return _changed(door, host_id="another machine")


def _changed(door: StageDoor, **other: Any) -> StageDoor:
    return replace(door, **other)
