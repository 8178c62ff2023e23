"""In which order a device works off what threads ask of it.

A CPU does each thing when it is asked to. CUDA does what is asked in one stream in that order, later, and different
streams beside each other: a copy in a stream of its own must be told what it comes after.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A moment in a device's work."""

    def wait(self) -> None:
        """Return when the device has come to it."""


class Streams(Protocol):
    def mark(self) -> Mark:
        """Where all that the calling thread has asked for is done."""

    def beside(self, mark: Any) -> AbstractContextManager[None]:
        """What the calling thread asks for in here is done after *mark*, one of :meth:`mark`, and beside what other
        threads ask for later. At the end all of it is done."""

    def pinned(self, n_items: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory from and to which the device copies by itself."""


class _Now:
    def wait(self) -> None:
        """It is done already."""


class HostStreams:
    """For a CPU: there is nothing to wait for."""

    def mark(self) -> Mark:
        return _Now()

    def beside(self, mark: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def pinned(self, n_items: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n_items, dtype=dtype)


class _CudaMark:
    def __init__(self, stream: Any) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaStreams:
    """For a CUDA device: copies have one stream, beside that of the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: Any = torch.cuda.Stream(device)

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self._device))

    @contextmanager
    def beside(self, mark: _CudaMark) -> Iterator[None]:
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(mark.event)
            try:
                yield
            finally:
                self._copies.synchronize()

    def pinned(self, n_items: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n_items, dtype=dtype, pin_memory=True)


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
