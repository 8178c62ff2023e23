"""A transfer's slices: cut, spread, tried again on other paths, and always at an end."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.messenger.transports.rdma.batch import Batch, Blame, Piece, cut, joined
from mooncake_mesh.messenger.transports.rdma.paths import Path, PathHealth, Tiers, tiers
from mooncake_mesh.messenger.transports.rdma.topology import Affinity

A, B = Path("peer", "a", "x"), Path("peer", "b", "y")
ONE = Tiers(groups=((A,),))
TWO = Tiers(groups=((A, B),))


def batch(n_slices: int, paths: Tiers = ONE, *, window: int = 4, attempts: int = 3) -> Batch:
    slices = cut([Piece(local_offset=0, remote_offset=0, size_bytes=4096 * n_slices)], 4096)
    assert len(slices) == n_slices
    return Batch(slices, paths, PathHealth(rest_s=30.0), window=window, attempts=attempts)


def taken(batch: Batch, now_s: float = 0.0) -> dict[Path, list[int]]:
    return {path: [piece.number for piece in slices] for path, slices in batch.take(now_s)}


# --- cutting ----------------------------------------------------------------------------------------------------------


def test_a_small_rest_joins_the_slice_before_it() -> None:
    sizes = [piece.size_bytes for piece in cut([Piece(local_offset=0, remote_offset=0, size_bytes=8192 + 1024)], 4096)]
    assert sizes == [4096, 5120]
    sizes = [piece.size_bytes for piece in cut([Piece(local_offset=0, remote_offset=0, size_bytes=8192 + 1025)], 4096)]
    assert sizes == [4096, 4096, 1025]


@given(st.lists(st.integers(0, 100_000), max_size=4), st.integers(2_000, 40_000))
def test_slices_cover_every_byte_once_and_in_order(sizes: list[int], slice_bytes: int) -> None:
    pieces = [Piece(local_offset=i << 20, remote_offset=(i + 9) << 20, size_bytes=size) for i, size in enumerate(sizes)]
    slices = cut(pieces, slice_bytes)
    assert [piece.number for piece in slices] == list(range(len(slices)))
    for i, size in enumerate(sizes):
        own = [piece for piece in slices if piece.local_offset >> 20 == i]
        at = i << 20
        for piece in own:
            assert piece.local_offset == at
            assert piece.remote_offset - piece.local_offset == 9 << 20
            assert 0 < piece.size_bytes <= slice_bytes + slice_bytes // 4
            at += piece.size_bytes
        assert at == (i << 20) + size


def test_neighbours_at_both_ends_become_one_piece() -> None:
    def piece(local: int, remote: int, size: int) -> Piece:
        return Piece(local_offset=local, remote_offset=remote, size_bytes=size)

    assert joined([piece(10, 110, 5), piece(0, 100, 10), piece(15, 115, 1)]) == [piece(0, 100, 16)]
    assert joined([piece(0, 100, 10), piece(10, 111, 5)]) == [piece(0, 100, 10), piece(10, 111, 5)]
    assert joined([piece(0, 100, 10), piece(11, 110, 5)]) == [piece(0, 100, 10), piece(11, 110, 5)]
    assert joined([]) == []


# --- spreading --------------------------------------------------------------------------------------------------------


def test_slices_are_spread_over_the_paths() -> None:
    assert taken(batch(6, TWO)) == {A: [0, 2, 4], B: [1, 3, 5]}


def test_the_window_of_each_path_bounds_what_is_in_flight() -> None:
    transfer = batch(9, TWO, window=2)
    assert taken(transfer) == {A: [0, 2], B: [1, 3]}
    assert taken(transfer) == {}
    transfer.arrived(1, B)
    assert taken(transfer) == {B: [4]}


def test_a_transfer_of_nothing_is_over() -> None:
    transfer = batch(0)
    assert transfer.is_over
    assert transfer.failure is None


def test_it_is_over_when_everything_has_arrived() -> None:
    transfer = batch(2)
    taken(transfer)
    transfer.arrived(0, A)
    assert not transfer.is_over
    transfer.arrived(1, A)
    assert (transfer.is_over, transfer.failure) == (True, None)


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_slice_that_failed_takes_another_path() -> None:
    transfer = batch(2, TWO)
    taken(transfer)
    transfer.failed(0, A, Blame.PATH, "retries exceeded", now_s=0.0)
    assert taken(transfer) == {B: [0]}


def test_on_the_only_path_it_is_tried_again_until_its_attempts_are_used_up() -> None:
    transfer = batch(1, attempts=3)
    for _ in range(3):
        assert not transfer.is_over
        assert taken(transfer) == {A: [0]}
        transfer.failed(0, A, Blame.PATH, "retries exceeded", now_s=0.0)
    assert transfer.is_over
    assert transfer.failure == "a → x: retries exceeded"


def test_a_refusal_is_final_and_waits_for_what_is_in_flight() -> None:
    transfer = batch(6, TWO, window=1)
    taken(transfer)
    transfer.failed(0, A, Blame.REQUEST, "remote access error", now_s=0.0)
    assert taken(transfer) == {}
    assert not transfer.is_over  # slice 1 is still on its way
    transfer.arrived(1, B)
    assert (transfer.is_over, transfer.failure) == (True, "a → x: remote access error")


def test_a_neighbours_failure_costs_neither_an_attempt_nor_the_path() -> None:
    transfer = batch(1, TWO, attempts=1)
    for _ in range(5):
        assert taken(transfer) == {A: [0]}
        transfer.failed(0, A, Blame.NEIGHBOUR, "closed", now_s=0.0)
    taken(transfer)
    transfer.arrived(0, A)
    assert transfer.is_over
    assert transfer.failure is None


def test_giving_up_sends_nothing_more() -> None:
    transfer = batch(3, window=1)
    taken(transfer)
    transfer.give_up("interrupted")
    transfer.arrived(0, A)
    assert taken(transfer) == {}
    assert transfer.is_over


def test_without_a_path_it_fails_at_once() -> None:
    transfer = batch(1, Tiers(groups=()))
    assert taken(transfer) == {}
    assert transfer.is_over
    assert transfer.failure == "there is no path"


def test_what_one_transfer_learned_of_a_path_serves_the_next() -> None:
    health = PathHealth(rest_s=30.0)
    slices = cut([Piece(local_offset=0, remote_offset=0, size_bytes=1)], 4096)
    first = Batch(slices, TWO, health, window=4, attempts=3)
    taken(first)
    first.failed(0, A, Blame.PATH, "retries exceeded", now_s=0.0)
    second = Batch(slices, TWO, health, window=4, attempts=3)
    assert taken(second, now_s=1.0) == {B: [0]}
    assert taken(Batch(slices, TWO, health, window=4, attempts=3), now_s=31.0) == {A: [0]}


@given(st.data())
def test_every_transfer_ends_and_each_slice_arrives_at_most_once(data: st.DataObject) -> None:
    local = Affinity(preferred=("a", "b"), secondary=("c",))
    paths = tiers("peer", local, Affinity(preferred=("x",), secondary=("y",)))
    n_slices, window, attempts = (data.draw(st.integers(1, 8)) for _ in range(3))
    transfer = batch(n_slices, paths, window=window, attempts=attempts)
    in_flight: list[tuple[int, Path]] = []
    arrived: set[int] = set()
    neighbours = data.draw(st.integers(0, 5))
    for step in range(n_slices * attempts + neighbours + 1):
        for path, slices in transfer.take(float(step)):
            in_flight += [(piece.number, path) for piece in slices]
        assert transfer.in_flight == len(in_flight)
        assert len({number for number, _ in in_flight}) == len(in_flight)
        if transfer.is_over:
            break
        number, path = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
        outcome = data.draw(
            st.sampled_from([None, Blame.PATH, Blame.REQUEST, *([Blame.NEIGHBOUR] if neighbours else [])])
        )
        if outcome is None:
            assert number not in arrived
            arrived.add(number)
            transfer.arrived(number, path)
        else:
            neighbours -= outcome is Blame.NEIGHBOUR
            transfer.failed(number, path, outcome, "broken", float(step))
    assert transfer.is_over
    assert (transfer.failure is None) == (len(arrived) == n_slices)
