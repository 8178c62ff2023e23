"""Contexts over pages, without a model: of sequences in work, and of those that are over."""

import random
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from mooncake_mesh.config_layerwise import Overlap  # noqa: E402
from mooncake_mesh.engine.contexts import ContextCache  # noqa: E402
from mooncake_mesh.engine.copying import CopyThread  # noqa: E402
from mooncake_mesh.engine.kv_storage import ArenaPages, Span  # noqa: E402
from mooncake_mesh.engine.preloading import Preloads  # noqa: E402
from mooncake_mesh.kv.layers import LayerRange  # noqa: E402
from mooncake_proto.ids import BlockKey  # noqa: E402
from tests.unit.test_engine_kv_storage import LAYOUT, bound, values  # noqa: E402

CPU = torch.device("cpu")


def forward(pages: ArenaPages, cache: ContextCache, spans: Sequence[Span], numbers: Sequence[int]) -> None:
    """One forward over *spans* that checks what attention would see."""
    contexts = cache.open(spans)
    for layer in range(3):
        for span, number, context in zip(spans, numbers, contexts, strict=True):
            new = values(number, span.start, span.end)[layer]
            pages.write_layers(layer, span.blocks, span.start, new[None])
            k, v = context.extend(layer, new)
            expected = values(number, 0, span.end)[layer]
            assert torch.equal(k, expected[0:1])
            assert torch.equal(v, expected[1:2])
    cache.commit(spans)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), budget_blocks=st.sampled_from([0, 2, 5, 9, 100]))
def test_contexts_always_hold_what_the_sequence_wrote(seed: int, budget_blocks: int) -> None:
    """Sequences join, grow, break off, leave and leave their blocks to others, under any budget."""
    rng = random.Random(seed)
    pages, _ = bound(n_blocks=24)
    budget_bytes = budget_blocks * LAYOUT.block_bytes
    cache = ContextCache(pages, CPU, budget_bytes)
    free = list(range(24))
    rng.shuffle(free)
    running: dict[int, tuple[list[int], int]] = {}
    for number in range(30):
        if len(free) >= 6 and rng.random() < 0.7:
            running[number] = ([free.pop() for _ in range(6)], 0)
        chosen = [one for one in running if rng.random() < 0.6]
        spans = []
        for one in chosen:
            blocks, start = running[one]
            end = min(start + rng.randint(1, 7), 24)
            spans.append(Span(sequence=str(one), blocks=blocks[: LAYOUT.blocks_for(end)], start=start, end=end))
        spans = [span for span in spans if span.start < span.end]
        if rng.random() < 0.15:
            cache.open(spans)
            cache.abandon(spans)
        else:
            forward(pages, cache, spans, [int(span.sequence) for span in spans])
            for span in spans:
                running[int(span.sequence)] = (running[int(span.sequence)][0], span.end)
        assert cache.kept_bytes <= budget_bytes
        for one in [one for one, (_, end) in running.items() if end >= 20]:
            free.extend(running.pop(one)[0])


def test_a_kept_context_does_not_read_the_pages_again() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=0, end=5)], [1])
    arena[:] = -1.0
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=5, end=6)], [1])


def test_a_cleared_cache_reads_the_pages_again() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=0, end=5)], [1])
    cache.clear()
    assert cache.kept_bytes == 0
    arena[:] = -1.0
    with pytest.raises(AssertionError):
        forward(pages, cache, [Span(sequence="s", blocks=[1, 2, 3], start=5, end=6)], [1])


def test_the_least_recently_used_context_goes_first() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 2 * LAYOUT.block_bytes)
    spans = [Span(sequence=str(i), blocks=[i], start=0, end=2) for i in range(3)]
    for i in (0, 1, 0, 2):
        forward(pages, cache, [spans[i]], [i])
    assert list(cache._kept) == ["0", "2"]


# --- of sequences that are over -----------------------------------------------------------------------------------


def keys(conversation: int, n_blocks: int, shared_blocks: int = 0) -> list[BlockKey]:
    """Of a conversation's first blocks, of which the first *shared_blocks* are those of conversation 0."""
    return [BlockKey(b"%8d%8d" % (0 if i < shared_blocks else conversation, i)) for i in range(n_blocks)]


BLOCKS = [1, 2, 3, 4, 5, 6]


def spans_of(name: str, start: int, end: int, known: Sequence[BlockKey] = ()) -> Span:
    return Span(sequence=name, blocks=BLOCKS, start=start, end=end, keys=known)


def arrived(pages: ArenaPages, kv: Any, blocks: Sequence[int] = BLOCKS, *, start: int = 0) -> None:
    """*kv* of all layers is in the pages, as another node has sent it."""
    for layer in range(3):
        pages.write_layers(layer, blocks, start, kv[layer : layer + 1])


def test_the_next_turn_goes_on_in_the_context_of_the_one_before() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [spans_of("turn 1", 0, 13)], [1])
    cache.retire("turn 1", keys(1, 3))
    kept_bytes = cache.kept_bytes
    arena[:] = -1.0
    forward(pages, cache, [spans_of("turn 2", 12, 20, keys(1, 3))], [1])
    assert cache.kept_bytes == kept_bytes, "the very same one"


def test_what_it_does_not_share_is_read_from_the_pages() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [spans_of("old", 0, 16)], [1])
    cache.retire("old", keys(1, 4))
    arena[[1, 2]] = -1.0  # the shared blocks
    branch = values(1, 0, 16)
    branch[:, :, :, 8:] = values(2, 8, 16)
    arrived(pages, branch[:, :, :, 8:], start=8)
    span = spans_of("new", 16, 17, [*keys(1, 2), *keys(2, 4)[2:]])
    [context] = cache.open([span])
    for layer in range(3):
        k, v = context.extend(layer, values(2, 16, 17)[layer])
        assert torch.equal(torch.cat((k, v))[:, :, :16], branch[layer])


@pytest.mark.parametrize("known", [[], keys(2, 3), keys(1, 3)[1:]], ids=["unknown", "other", "not from the start"])
def test_nobody_gets_the_context_of_another_prefix(known: list[BlockKey]) -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [spans_of("old", 0, 12)], [1])
    cache.retire("old", keys(1, 3))
    arrived(pages, values(2, 0, 12))
    forward(pages, cache, [spans_of("new", 12, 14, known)], [2])


def test_only_what_was_computed_is_kept_of_a_sequence_that_broke_off() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    forward(pages, cache, [spans_of("old", 0, 9)], [1])
    cache.retire("old", keys(1, 6))
    arrived(pages, values(1, 0, 24))
    forward(pages, cache, [spans_of("new", 23, 24, keys(1, 5))], [1])
    cache.retire("unknown", keys(1, 6))
    cache.retire("empty", [])


def test_contexts_that_are_over_go_before_those_in_work() -> None:
    pages, arena = bound(n_blocks=24)
    cache = ContextCache(pages, CPU, 4 * 7 * LAYOUT.block_bytes)
    for number in range(3):
        forward(pages, cache, [spans_of(f"{number}", 0, 20)], [number])
    cache.retire("2", keys(2, 5))
    for number in range(3, 5):
        forward(pages, cache, [spans_of(f"{number}", 0, 20)], [number])
    arena[:] = -1.0
    forward(pages, cache, [spans_of("1", 20, 21)], [1])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), budget_blocks=st.sampled_from([0, 9, 30, 1000]), overlap=st.sampled_from(Overlap))
def test_turns_and_branches_of_conversations_never_see_each_other(
    seed: int, budget_blocks: int, overlap: Overlap
) -> None:
    """Turns come with or without a preload, are broken off or retired, in blocks that were others' before."""
    rng = random.Random(seed)
    pages, _ = bound(n_blocks=24)
    budget_bytes = budget_blocks * LAYOUT.block_bytes
    cache = ContextCache(pages, CPU, budget_bytes)
    preloads = Preloads(pages, cache, LayerRange.whole(3), COPIES[overlap])
    for turn in range(25):
        conversation, start = rng.randrange(3), 4 * rng.randrange(6)
        end = min(24, start + rng.randint(1, 7))
        blocks, name = rng.sample(range(24), 6), f"turn {turn}"
        arrived(pages, values(conversation, 0, 24), blocks)
        known = keys(conversation, start // 4)[: rng.choice([0, 6])]
        span = Span(sequence=name, blocks=blocks, start=start, end=end, keys=known)
        if rng.random() < 0.5:
            loading = preloads.begin(Span(sequence=name, blocks=blocks, start=start, end=start, keys=known))
            if rng.random() < 0.7:
                loading.result(timeout=10)
        if rng.random() < 0.2:
            cache.abandon([span])
        else:
            forward(pages, cache, [span], [conversation])
        cache.retire(name, keys(conversation, end // 4))
        assert cache.kept_bytes <= budget_bytes


# --- loaded beside others -----------------------------------------------------------------------------------------

COPIES = {overlap: CopyThread(overlap) for overlap in Overlap}


def preloading(pages: ArenaPages, cache: ContextCache, overlap: Overlap = Overlap.ON) -> Preloads:
    return Preloads(pages, cache, LayerRange.whole(3), COPIES[overlap])


def held_up() -> threading.Event:
    """The copying thread waits until it is set."""
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(10)

    COPIES[Overlap.ON].run(wait, 0)
    return go_on


@pytest.mark.parametrize("overlap", Overlap)
def test_what_was_preloaded_is_not_read_again(overlap: Overlap) -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    arrived(pages, values(1, 0, 14))
    done = preloading(pages, cache, overlap).begin(spans_of("s", 14, 14))
    assert done.result(timeout=10) is None
    arena[:] = -1.0
    forward(pages, cache, [spans_of("s", 14, 15)], [1])


def test_a_step_waits_for_what_is_still_being_loaded() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    arrived(pages, values(1, 0, 14))
    go_on = held_up()
    done = preloading(pages, cache).begin(spans_of("s", 14, 14))
    assert not done.cancel()
    go_on.set()
    forward(pages, cache, [spans_of("s", 14, 15)], [1])
    assert done.result(timeout=10) is None


@pytest.mark.parametrize("how", ["clear", "retire", "abandon"])
def test_nothing_is_read_any_more_after_its_end(how: str) -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    go_on = held_up()
    done = preloading(pages, cache).begin(spans_of("s", 14, 14))
    ended = threading.Thread(
        target={
            "clear": cache.clear,
            "retire": lambda: cache.retire("s", keys(1, 3)),
            "abandon": lambda: cache.abandon([spans_of("s", 14, 15)]),
        }[how]
    )
    ended.start()
    ended.join(10)  # it need not wait for a copy that has not begun
    assert done.result(timeout=0) is None
    assert cache.kept_bytes == 0
    go_on.set()


def test_a_copy_that_fails_says_so_and_leaves_the_context_as_it_was() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 1 << 20)
    bad = Span(sequence="s", blocks=[1, 2, 3, 400], start=14, end=14)
    done: Future[None] = preloading(pages, cache).begin(bad)
    assert isinstance(done.exception(timeout=10), IndexError)
    cache.retire("s", keys(1, 3))
    assert cache.kept_bytes == 0, "nothing of it was there"


def test_without_room_for_a_context_nothing_is_loaded() -> None:
    pages, _ = bound()
    cache = ContextCache(pages, CPU, 10)
    assert preloading(pages, cache).begin(spans_of("s", 14, 14)).result(timeout=0) is None
    assert cache.kept_bytes == 0


def test_room_for_it_is_made_of_those_that_are_over_only() -> None:
    pages, arena = bound()
    cache = ContextCache(pages, CPU, 2 * 7 * LAYOUT.block_bytes)
    for name in ("running", "over"):
        forward(pages, cache, [spans_of(name, 0, 20)], [1])
    kept_bytes = cache.kept_bytes
    preloading(pages, cache).begin(spans_of("too many", 14, 14)).result(timeout=10)
    assert cache.kept_bytes == kept_bytes
    cache.retire("over", keys(2, 5))
    preloading(pages, cache).begin(spans_of("next", 14, 14)).result(timeout=10)
    arena[:] = -1.0
    forward(pages, cache, [spans_of("running", 20, 21)], [1])
