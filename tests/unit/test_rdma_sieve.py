"""The map that keeps queue pairs: bounded, and what is used stays."""

from hypothesis import given
from hypothesis import strategies as st

from mooncake_mesh.messenger.transports.rdma.sieve import SieveMap


def filled(capacity: int, keys: str) -> SieveMap[str, str]:
    entries: SieveMap[str, str] = SieveMap(capacity)
    for key in keys:
        assert entries.put(key, key.upper()) == []
    return entries


def test_the_oldest_unused_entry_goes() -> None:
    entries = filled(3, "abc")
    assert entries.put("d", "D") == ["A"]
    assert entries.get("a") is None


def test_what_was_used_is_passed_over_once() -> None:
    entries = filled(3, "abc")
    entries.get("a")
    assert entries.put("d", "D") == ["B"]  # the hand stands behind b now, and a has lost its mark
    assert entries.put("e", "E") == ["C"]
    assert entries.put("f", "F") == ["D"]
    assert entries.put("g", "G") == ["E"]
    assert sorted(entries) == ["A", "F", "G"]


def test_when_all_were_used_the_hand_comes_round() -> None:
    entries = filled(3, "abc")
    for key in "abc":
        entries.get(key)
    assert entries.put("d", "D") == ["A"]


def test_an_entry_in_use_is_never_evicted() -> None:
    entries: SieveMap[str, str] = SieveMap(2, may_evict=lambda value: value.islower())
    entries.put("a", "IN USE")
    entries.put("b", "idle")
    assert entries.put("c", "IN USE") == ["idle"]
    assert entries.put("d", "IN USE") == []  # over capacity rather than wrong
    assert len(entries) == 3


def test_the_same_key_replaces() -> None:
    entries = filled(2, "ab")
    assert entries.put("a", "new") == ["A"]
    assert entries.get("a") == "new"
    assert len(entries) == 2


def test_popping_takes_out() -> None:
    entries = filled(2, "ab")
    assert entries.pop("a") == "A"
    assert entries.pop("a") is None
    assert entries.put("c", "C") == []


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from(["get", "put", "pop"]), st.integers(0, 8))))
def test_agrees_with_a_plain_queue(capacity: int, steps: list[tuple[str, int]]) -> None:
    """Against SIEVE as in the paper: a list, a mark for each entry, and a hand that is an index."""
    entries: SieveMap[int, int] = SieveMap(capacity)
    queue: list[int] = []
    marks: set[int] = set()
    hand = 0

    def remove(key: int) -> None:
        nonlocal hand
        index = queue.index(key)
        queue.pop(index)
        marks.discard(key)
        hand -= index < hand

    for what, key in steps:
        if what == "get":
            assert entries.get(key) == (key if key in queue else None)
            if key in queue:
                marks.add(key)
        elif what == "pop":
            assert entries.pop(key) == (key if key in queue else None)
            if key in queue:
                remove(key)
        else:
            gone = []
            if key in queue:
                remove(key)
                gone.append(key)
            while len(queue) >= capacity:
                hand %= len(queue)
                while queue[hand] in marks:
                    marks.discard(queue[hand])
                    hand = (hand + 1) % len(queue)
                gone.append(queue[hand])
                remove(queue[hand])
            queue.append(key)
            assert entries.put(key, key) == gone
        assert list(entries) == queue
