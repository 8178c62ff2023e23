"""Copies to and from a device go by pinned memory, piece by piece, and in order with what is computed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mooncake_mesh.config_layerwise import Overlap  # noqa: E402
from mooncake_mesh.engine.copying import CopyThread  # noqa: E402
from mooncake_mesh.engine.kv_storage import ArenaPages  # noqa: E402
from mooncake_mesh.engine.staging import Staging  # noqa: E402
from mooncake_mesh.engine.streams import Mark  # noqa: E402
from tests.unit.test_engine_kv_storage import LAYOUT, bound, values  # noqa: E402


class OnDevice(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor that says it is not the host's."""

    @property
    def is_cpu(self) -> bool:
        return False


class Told:
    """Streams that note what they are told. Each mark has a number, from 0 on."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.pinned_items: list[int] = []
        self._n = 0

    def mark(self) -> Mark:
        told, number = self, self._n
        self._n += 1

        class Numbered:
            def wait(self) -> None:
                told.notes.append(f"wait {number}")

        return Numbered()

    @contextmanager
    def beside(self, mark: Mark) -> Iterator[None]:
        mark.wait()
        self.notes.append("beside")
        yield
        self.notes.append("done")

    def pinned(self, n_items: int, dtype: Any) -> Any:
        self.pinned_items.append(n_items)
        return torch.empty(n_items, dtype=dtype)


def rows(layers: int, tokens: int = 3) -> Any:
    return torch.arange(layers * 2 * 4 * tokens * 8, dtype=torch.float32).view(layers, 2, 4, tokens, 8)


def test_a_piece_is_filled_again_when_it_has_been_sent() -> None:
    told, source = Told(), rows(4)
    out = torch.zeros_like(source)

    def read(layer: int, piece: Any) -> None:
        told.notes.append(f"read {layer}")
        piece.copy_(source[layer])

    Staging(told).read(out, read)
    assert torch.equal(out, source)
    assert told.notes == ["read 0", "read 1", "wait 0", "read 2", "wait 1", "read 3", "wait 3"]


def test_a_piece_is_taken_when_it_has_come_and_not_overwritten_before() -> None:
    told, source, taken = Told(), rows(3), []

    def write(layer: int, piece: Any) -> None:
        told.notes.append(f"write {layer}")
        taken.append(piece.clone())

    Staging(told).write(source, write)
    assert torch.equal(torch.stack(taken), source)
    assert told.notes == ["wait 0", "write 0", "wait 1", "write 1", "wait 2", "write 2"]


def test_one_layer_needs_no_second_piece() -> None:
    told, source = Told(), rows(1)
    out = torch.zeros_like(source)
    Staging(told).read(out, lambda _, piece: piece.copy_(source[0]))
    assert torch.equal(out, source)
    Staging(told).write(source, lambda _, piece: piece.fill_(0))


def test_pinned_memory_grows_to_the_largest_layer_and_each_thread_has_its_own() -> None:
    told = Told()
    staging = Staging(told)

    def read(tokens: int) -> None:
        staging.read(torch.zeros_like(rows(2, tokens)), lambda _, piece: piece.zero_())

    for tokens in (3, 2, 5, 4):
        read(tokens)
    other = threading.Thread(target=read, args=(4,))
    other.start()
    other.join()
    assert told.pinned_items == [2 * 2 * 4 * tokens * 8 for tokens in (3, 5, 4)]


@pytest.mark.parametrize(("start", "end"), [(0, 4), (3, 14), (5, 6)])
def test_pages_are_copied_to_a_device_and_back(start: int, end: int) -> None:
    pages, _ = bound()
    blocks = [4, 0, 3, 1, 2]
    staged = ArenaPages(LAYOUT, staging=Staging(Told()))
    staged.bind(memoryview(bytearray(6 * LAYOUT.block_bytes)))
    kv = values(1, 0, 20)
    for one in (pages, staged):
        one.write_layers(0, blocks, 0, kv)
    there = torch.zeros_like(kv[:, :, :, start:end]).as_subclass(OnDevice)
    staged.read_all(blocks, start, end, there)
    assert torch.equal(there.as_subclass(torch.Tensor), kv[:, :, :, start:end])
    one = torch.zeros_like(there[1])
    staged.read_positions(1, blocks, start, end, one)
    assert torch.equal(one.as_subclass(torch.Tensor), kv[1, :, :, start:end])
    changed = kv[:, :, :, start:end] + 1
    staged.write_layers(0, blocks, start, changed.as_subclass(OnDevice))
    pages.write_layers(0, blocks, start, changed)
    back, expected = torch.zeros_like(kv), torch.zeros_like(kv)
    staged.read_all(blocks, 0, 20, back)
    pages.read_all(blocks, 0, 20, expected)
    assert torch.equal(back, expected)


def test_a_copy_beside_comes_after_what_was_asked_for_before() -> None:
    told = Told()
    copies = CopyThread(Overlap.ON, streams=told)
    copies.run(lambda: told.notes.append("copy"), 1).outcome().result(10)
    assert told.notes == ["wait 0", "beside", "copy", "done"]
    told.notes.clear()
    CopyThread(Overlap.OFF, streams=told).run(lambda: told.notes.append("copy"), 1)
    assert told.notes == ["copy"], "in the stream of who asks"
