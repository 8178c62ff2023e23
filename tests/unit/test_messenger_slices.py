"""One transfer at both ends: which slices go out, and which may land."""

import pytest

from mooncake_mesh.errors import SliceLost
from mooncake_mesh.kv.block_pool import BlockPool, BlockState
from mooncake_mesh.messenger.landing import Landing, LandingState, SliceSpan
from mooncake_mesh.messenger.sending import Outbound
from mooncake_proto.ids import BlockId, BlockKey, JobId, TransferId
from mooncake_proto.transfer import SliceReady, Slot

LAYERS, SLICE_BYTES = 4, 16


def span(logical: int, layer: int = 0, n_layers: int = LAYERS) -> SliceSpan:
    return SliceSpan(logical=logical, layer=layer, n_layers=n_layers)


def landing_of(pool: BlockPool, n_blocks: int, *, first: int = 0) -> Landing:
    blocks = pool.reserve("job", n_blocks)
    assert isinstance(blocks, list)
    slots = [Slot(logical=first + i, block=block, generation=pool.generation(block)) for i, block in enumerate(blocks)]
    return Landing(TransferId("t"), JobId("job"), slots, layers=LAYERS, slice_bytes=SLICE_BYTES, now_s=10.0)


# --- landing ----------------------------------------------------------------------------------------------------------


def test_a_slice_goes_where_its_slot_says() -> None:
    pool = BlockPool(4)
    landing = landing_of(pool, 2, first=3)
    [place] = landing.admit([span(4, 1, 2)], pool)
    block = landing.slots[1].block
    assert (place.block, place.offset, place.size_bytes) == (block, (block * LAYERS + 1) * SLICE_BYTES, 2 * SLICE_BYTES)


def test_a_landing_is_over_with_its_last_slice() -> None:
    pool = BlockPool(2)
    landing = landing_of(pool, 2)
    for logical, layer in ((0, 0), (1, 2), (1, 0), (0, 2)):
        assert landing.state is LandingState.OPEN
        landing.written(landing.admit([span(logical, layer, 2)], pool), pool, 11.0 + layer)
    assert (landing.state.value, landing.received_bytes) == ("landed", 2 * LAYERS * SLICE_BYTES)
    assert (landing.first_slice_s, landing.last_slice_s) == (11.0, 13.0)


def test_a_repeated_slice_is_taken_and_not_written_again() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    landing.written(landing.admit([span(0, 0, 2)], pool), pool, 11.0)
    assert landing.admit([span(0, 0, 2), span(0, 1, 1)], pool) == []
    landing.written(landing.admit([span(0, 2, 2)], pool), pool, 11.0)
    assert landing.admit([span(0)], pool) == [], "also after the end: the acknowledgement may have been lost"
    assert landing.received_bytes == LAYERS * SLICE_BYTES


@pytest.mark.parametrize(
    "bad",
    [
        span(2),
        span(0, -1, 1),
        span(0, 0, 0),
        span(0, 3, 2),
        span(0, LAYERS, 1),
        span(0, 0, 2),  # half of it is here
        span(1, 0, 1),  # it is being written
    ],
)
def test_what_has_no_place_is_refused_and_nothing_of_its_batch_begins(bad: SliceSpan) -> None:
    pool = BlockPool(3)
    landing = landing_of(pool, 2)
    landing.written(landing.admit([span(0, 0, 1)], pool), pool, 11.0)
    [running] = landing.admit([span(1, 0, 2)], pool)
    with pytest.raises(SliceLost):
        landing.admit([span(0, 2, 1), bad], pool)
    assert landing.admit([span(0, 2, 1)], pool) != []
    landing.written([running], pool, 11.0)
    pool.check_invariants()


def test_slices_of_one_batch_may_not_overlap() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    for batch in ([span(0, 0, 1), span(0, 0, 1)], [span(0, 0, 2), span(0, 1, 2)]):
        with pytest.raises(SliceLost, match="overlap"):
            landing.admit(batch, pool)
    assert len(landing.admit([span(0, 0, 2), span(0, 2, 2)], pool)) == 2


def test_a_spoiled_write_fails_the_landing_for_good() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    first, second = (landing.admit([span(0, layer, 1)], pool) for layer in (0, 1))
    landing.spoiled(first, pool, "damaged")
    assert (landing.state, landing.failure) == (LandingState.FAILED, "damaged")
    landing.written(second, pool, 11.0)
    landing.fail("later")
    assert (landing.state.value, landing.failure) == ("failed", "damaged")
    with pytest.raises(SliceLost, match="damaged"):
        landing.admit([span(0, 2, 1)], pool)
    pool.release("job")
    assert pool.free_blocks == 1


def test_a_late_write_of_an_earlier_owner_is_refused() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    pool.release("job")
    with pytest.raises(SliceLost, match="right to write"):
        landing.admit([span(0)], pool)
    assert pool.reserve("next", 1) == [BlockId(landing.slots[0].block)]
    with pytest.raises(SliceLost, match="right to write"):
        landing.admit([span(0)], pool)


def test_a_block_with_a_write_in_flight_has_no_new_owner_before_its_end() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    places = landing.admit([span(0)], pool)
    pool.release("job")
    assert pool.state(places[0].block) is BlockState.DRAINING
    assert not isinstance(pool.reserve("next", 1), list)
    landing.written(places, pool, 11.0)
    assert isinstance(pool.reserve("next", 1), list)


def test_shortening_drops_what_the_sender_has_not_even_in_flight() -> None:
    pool = BlockPool(2)
    landing = landing_of(pool, 2)
    landing.written(landing.admit([span(0)], pool), pool, 11.0)
    places = landing.admit([span(1)], pool)
    landing.shorten(1)
    assert landing.state is LandingState.LANDED
    landing.written(places, pool, 11.0)
    pool.release("job")
    assert pool.free_blocks == 2


def test_shortening_to_nothing_lands_at_once_and_a_failed_one_stays_failed() -> None:
    pool = BlockPool(2)
    landing, failed = landing_of(pool, 1), landing_of(pool, 1)
    landing.shorten(0)
    assert landing.state is LandingState.LANDED
    failed.fail("aborted")
    failed.shorten(0)
    assert failed.state is LandingState.FAILED


def test_sealing_takes_the_right_to_write() -> None:
    pool = BlockPool(1)
    landing = landing_of(pool, 1)
    pool.seal("job", BlockId(landing.slots[0].block), BlockKey(b"k" * 16))
    with pytest.raises(SliceLost, match="right to write"):
        landing.admit([span(0)], pool)


# --- sending ----------------------------------------------------------------------------------------------------------


def outbound(*blocks: int) -> Outbound:
    return Outbound(TransferId("t"), JobId("job"), [BlockId(b) for b in blocks], layers=LAYERS, slice_bytes=SLICE_BYTES)


def plan(*logicals: int) -> list[Slot]:
    return [Slot(logical=logical, block=90 + logical, generation=1) for logical in logicals]


def ready(layer: int, n_layers: int, first_block: int, n_blocks: int) -> SliceReady:
    return SliceReady(
        transfer_id=TransferId("t"), layer=layer, n_layers=n_layers, first_block=first_block, n_blocks=n_blocks
    )


def test_nothing_goes_out_before_the_plan_is_here() -> None:
    out = outbound(5, 6)
    out.ready(ready(0, LAYERS, 0, 2))
    assert out.take(10**6) == []
    out.planned(plan(0, 1, 7))
    assert [(piece.span, piece.block) for piece in out.take(10**6)] == [(span(0), 5), (span(1), 6)]
    assert out.take(10**6) == []


def test_neighbouring_layers_of_a_block_go_as_one() -> None:
    out = outbound(5)
    out.planned(plan(0))
    for layer in (0, 1, 3):
        out.ready(ready(layer, 1, 0, 1))
    pieces = out.take(10**6)
    assert [piece.span for piece in pieces] == [span(0, 0, 2), span(0, 3, 1)]
    assert [(piece.offset, piece.size_bytes) for piece in pieces] == [
        (5 * LAYERS * SLICE_BYTES, 2 * SLICE_BYTES),
        ((5 * LAYERS + 3) * SLICE_BYTES, SLICE_BYTES),
    ]


def test_what_was_announced_twice_goes_once() -> None:
    out = outbound(5)
    out.planned(plan(0))
    out.ready(ready(0, 2, 0, 1))
    out.ready(ready(1, 2, 0, 1))
    assert [piece.span for piece in out.take(10**6)] == [span(0, 0, 3)]
    out.ready(ready(0, LAYERS, 0, 1))
    assert [piece.span for piece in out.take(10**6)] == [span(0, 3, 1)]


def test_what_the_receiver_has_is_skipped() -> None:
    out = outbound(5, 6, 7)
    assert out.skipped_blocks == 0
    out.planned(plan(2))
    out.ready(ready(0, LAYERS, 0, 3))
    assert [piece.block for piece in out.take(10**6)] == [7]
    assert out.skipped_blocks == 2


def test_a_batch_ends_with_the_block_that_fills_it() -> None:
    out = outbound(5, 6, 7)
    out.planned(plan(0, 1, 2))
    out.ready(ready(0, LAYERS, 0, 3))
    sizes = [len(out.take(LAYERS * SLICE_BYTES + 1)) for _ in range(3)]
    assert sizes == [2, 1, 0]


@pytest.mark.parametrize(
    "bad", [ready(0, 0, 0, 1), ready(0, LAYERS + 1, 0, 1), ready(LAYERS, 1, 0, 1), ready(0, 1, 1, 1), ready(0, 1, 0, 2)]
)
def test_slices_outside_the_job_are_refused(bad: SliceReady) -> None:
    out = outbound(5)
    with pytest.raises(SliceLost):
        out.ready(bad)
    out.planned(plan(0))
    assert out.take(10**6) == []


def test_what_is_acknowledged_before_the_end_overlapped() -> None:
    out = outbound(5, 6)
    out.planned(plan(0, 1))
    out.ready(ready(0, LAYERS, 0, 1))
    out.acknowledged(out.take(10**6))
    out.ready(ready(0, LAYERS, 1, 1))
    out.finish()
    out.acknowledged(out.take(10**6))
    assert (out.sent_bytes, out.overlapped_bytes) == (2 * LAYERS * SLICE_BYTES, LAYERS * SLICE_BYTES)
