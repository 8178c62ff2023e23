"""Memory in large pages is a process' own, and goes back."""

import gc
import mmap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mooncake_mesh.engine.large_pages import in_large_pages  # noqa: E402


def mapping(address: int) -> str:
    """How *address* is mapped: rw-p, or nothing."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split()[:2]
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            return permissions
    return ""


def test_it_begins_with_a_page_and_is_private() -> None:
    """Shared memory has large pages by a setting of its own, which is mostly off, and counts as nobody's."""
    memory = in_large_pages(3 << 20)
    assert (memory.shape, memory.dtype) == ((3 << 20,), torch.uint8)
    assert memory.data_ptr() % (2 << 20) == 0
    assert not memory.any()
    assert mapping(memory.data_ptr()) == "rw-p"


def test_it_goes_back_when_nothing_views_it() -> None:
    memory = in_large_pages(32 << 20)
    part, address = memory[5:9], memory.data_ptr() + (20 << 20)
    del memory
    gc.collect()
    part.fill_(1)
    assert mapping(address) == "rw-p"
    del part
    gc.collect()
    assert mapping(address) != "rw-p"


def test_without_large_pages_there_are_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = in_large_pages(100)
    memory.fill_(2)
    assert int(memory.sum()) == 200
