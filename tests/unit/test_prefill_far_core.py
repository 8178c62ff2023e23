"""Room that a head gives prompts in the memory of far stages, and where what these have computed may land."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.errors import InvalidRequest, SliceLost, TransferError
from mooncake_mesh.kv.block_hash import chain, token_bytes
from mooncake_mesh.kv.layers import LayerRange
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_mesh.messenger.landing import Destination, SliceSpan
from mooncake_mesh.messenger.transports.api import Incoming, LinkLost
from mooncake_mesh.prefill.far_core import KvLanding, PrefixPlaces, PromptRoom, SliceNames
from mooncake_proto.ids import BlockKey, JobId

A, B, C = JobId("a"), JobId("b"), JobId("c")
LAYOUT = KvLayout(layers=5, kv_heads=1, head_dim=4, dtype=KvDtype.FLOAT32, block_tokens=8)
NAMES = SliceNames(chunk_blocks=4)
FAR = (LayerRange(first=2, end=3, total=5), LayerRange(first=4, end=5, total=5))
BLOCKS = (7, 3, 9)


def keys(name: str) -> list[BlockKey]:
    """Of three whole blocks."""
    return chain(BlockKey(name.encode().ljust(16)), token_bytes(range(3)), 1)


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_prompt_waits_for_the_blocks_of_those_before_it() -> None:
    room = PromptRoom(5)
    assert room.enter(A, 3)
    assert room.enter(A, 3)  # for every chunk
    assert not room.enter(B, 3)
    assert [room.begin(A), room.begin(A)] == [True, False]
    room.over(A)
    room.end(A, ())
    assert not room.enter(B, 3), "a chunk of it is under way"
    assert not room.enter(A, 1), "its former life goes on"
    room.over(A)
    assert room.enter(B, 3)
    assert (room.jobs, len(set(room.blocks(B)))) == ((B,), 3)


def test_blocks_that_were_used_are_used_again() -> None:
    room = PromptRoom(100)
    room.enter(A, 4)
    blocks = room.blocks(A)
    room.end(A, ())
    room.enter(B, 6)
    assert set(blocks) < set(room.blocks(B))


def test_what_a_prompt_leaves_is_held_for_one_that_begins_like_it() -> None:
    room = PromptRoom(10)
    room.enter(A, 4)
    blocks = room.blocks(A)
    room.end(A, keys("one"))
    room.enter(B, 6, [*keys("one")[:2], *keys("two")])
    assert (room.blocks(B)[:2], room.held_blocks(B)) == (blocks[:2], 2)
    assert not {blocks[2]} & set(room.blocks(B)), "the rest of it is kept"
    assert room.enter(C, 3, keys("one"))
    assert room.held_blocks(C) == 0, "one prompt at a time has them"


def test_what_is_kept_goes_when_its_blocks_are_needed_the_oldest_and_the_end_of_it_first() -> None:
    room = PromptRoom(8)
    for job, name in ((A, "one"), (B, "two")):
        room.enter(job, 4)
        room.end(job, keys(name))
    room.enter(C, 4)  # two blocks are free
    room.end(C, ())
    room.enter(A, 4, keys("one"))
    assert room.held_blocks(A) == 1
    room.enter(B, 4, keys("two"))
    assert room.held_blocks(B) == 3


def test_nothing_is_kept_twice_nor_of_a_prompt_that_failed() -> None:
    room = PromptRoom(9)
    for job in (A, B):
        room.enter(job, 3)
    room.end(A, keys("one"))
    room.end(B, keys("one"))
    assert room.enter(C, 9, keys("two"))
    room.end(C, ())
    room.enter(A, 3, keys("one"))
    assert room.held_blocks(A) == 0
    assert len(set(room.blocks(A))) == 3


def test_what_is_held_is_in_use_while_a_chunk_of_it_is_under_way() -> None:
    room = PromptRoom(4)
    room.enter(A, 4)
    room.begin(A)
    room.end(A, keys("one"))
    assert not room.enter(B, 3, keys("one"))
    room.over(A)
    assert room.enter(B, 4, keys("one"))
    assert room.held_blocks(B) == 3


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9), st.sampled_from(["one", "two", ""])), max_size=60)
)
def test_no_block_is_given_twice_and_none_is_lost(moves: list[tuple[str, int, str]]) -> None:
    """Each move begins a prompt or, where that one is there, ends it: with success, or without."""
    room = PromptRoom(9)
    for name, n_blocks, prefix in moves:
        job = JobId(name)
        if job in room.jobs:
            room.end(job, keys(prefix)[: len(room.blocks(job))] if prefix else ())
        else:
            room.enter(job, n_blocks, keys(prefix) if prefix else ())
        given_away = [block for each in room.jobs for block in room.blocks(each)]
        assert len(given_away) == len(set(given_away)) <= 9
    for job in room.jobs:
        room.end(job, ())
    assert room.enter(JobId("all"), 9)
    assert sorted(room.blocks(JobId("all"))) == list(range(9))


def test_a_prompt_that_never_has_room_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        PromptRoom(5).enter(A, 6)


def test_without_far_stages_there_is_room_for_any_prompt() -> None:
    room = PromptRoom(None)
    assert room.enter(A, 1000)
    assert (room.begin(A), room.blocks(A)) == (True, ())
    room.end(A, ())
    room.end(A, ())  # twice, or of one that was never here
    room.over(A)
    assert room.jobs == ()


# --- landing ----------------------------------------------------------------------------------------------------------


def slice_in(number: int, index: int, layer: int, n_layers: int = 1, *, size: int | None = None) -> Incoming:
    span = SliceSpan(logical=NAMES.logical(number, index), layer=layer, n_layers=n_layers)
    return Incoming(span=span, size_bytes=n_layers * LAYOUT.slice_bytes if size is None else size, checksum=None)


class Head:
    """A landing with chunk 6 open, and what was said of it."""

    def __init__(self) -> None:
        self.landed: list[tuple[int, range, range]] = []
        self.landing = KvLanding(LAYOUT, FAR, NAMES, landed=lambda *what: self.landed.append(what), quiet=lambda: None)
        self.landing.open(6, BLOCKS)

    def take(self, *incoming: Incoming, error: TransferError | None = None) -> list[Destination]:
        destinations = self.landing.begin(incoming)
        self.landing.end(destinations, error)
        return destinations

    def close(self) -> bool:
        self.landing.shut(6)
        return self.landing.close(6)


def test_slices_land_in_the_blocks_of_the_job_and_runs_of_them_are_told() -> None:
    head = Head()
    destinations = head.take(*(slice_in(6, index, 2) for index in range(3)))
    assert [place.offset // LAYOUT.slice_bytes for place in destinations] == [block * 5 + 2 for block in BLOCKS]
    assert head.landed == [(6, range(2, 3), range(3))]
    head.take(slice_in(6, 0, 4), slice_in(6, 2, 4))
    assert head.landed[1:] == [(6, range(4, 5), range(1)), (6, range(4, 5), range(2, 3))]
    head.take(slice_in(6, 1, 4))
    assert head.close()


def test_a_chunk_of_which_something_is_missing_is_not_complete() -> None:
    head = Head()
    head.take(*(slice_in(6, index, 2) for index in range(3)))
    assert not head.close()


def test_what_comes_twice_is_written_once_and_what_was_lost_may_come_again() -> None:
    head = Head()
    assert len(head.take(slice_in(6, 0, 2), error=LinkLost("gone"))) == 1
    assert head.landed == []
    assert len(head.take(slice_in(6, 0, 2))) == 1
    assert head.take(slice_in(6, 0, 2)) == []
    assert len(head.landed) == 1


def test_a_block_is_quiet_when_its_last_write_has_ended() -> None:
    head = Head()
    destinations = head.landing.begin([slice_in(6, 1, 2)])
    with pytest.raises(SliceLost):
        head.landing.begin([slice_in(6, 1, 2)])
    head.landing.shut(6)
    assert not head.landing.is_quiet(6)
    head.landing.end(destinations, SliceLost("cut short"))
    assert head.landing.is_quiet(6)


@pytest.mark.parametrize(
    "wrong",
    [
        slice_in(5, 0, 2),  # a chunk that is over
        slice_in(6, 3, 2),  # behind the chunk's blocks
        slice_in(6, 0, 1),  # a layer of a stage that writes it itself
        slice_in(6, 0, 2, 2),
        slice_in(6, 0, 4, 0),
        slice_in(6, 0, 2, size=LAYOUT.slice_bytes - 1),
    ],
)
def test_what_has_no_place_is_refused_and_all_that_came_with_it(wrong: Incoming) -> None:
    head = Head()
    with pytest.raises(SliceLost):
        head.take(slice_in(6, 0, 2), wrong)
    with pytest.raises(SliceLost):
        head.take(slice_in(6, 0, 2), slice_in(6, 0, 2))
    assert len(head.take(slice_in(6, 0, 2))) == 1


def test_nothing_lands_in_a_chunk_that_is_being_closed() -> None:
    head = Head()
    head.landing.shut(6)
    with pytest.raises(SliceLost):
        head.take(slice_in(6, 0, 2))


def test_names_do_not_outgrow_the_wire() -> None:
    for number in (0, 1, 4095, 4096, 10**12):
        logical = NAMES.logical(number, 3)
        assert logical < 2**32
        assert NAMES.chunk_and_index(logical) == (NAMES.key(number), 3)
    assert len({NAMES.key(number) for number in range(100, 200)}) == 100


# --- a cached prefix --------------------------------------------------------------------------------------------------


def test_a_prefix_lands_in_the_layers_of_the_stage() -> None:
    places = PrefixPlaces(LAYOUT, LayerRange(first=2, end=4, total=5), n_blocks=10)

    def begin(block: int, layer: int, n_layers: int) -> list[Destination]:
        span = SliceSpan(logical=block, layer=layer, n_layers=n_layers)
        return places.begin([Incoming(span=span, size_bytes=n_layers * LAYOUT.slice_bytes, checksum=None)])

    (place,) = begin(9, 2, 2)
    assert place.offset == (9 * 5 + 2) * LAYOUT.slice_bytes
    for wrong in ((10, 2, 2), (9, 1, 2), (9, 3, 2), (9, 3, 0)):
        with pytest.raises(SliceLost):
            begin(*wrong)
