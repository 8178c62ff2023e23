"""What unit tests share."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """A loop leaves its signal handlers behind; pytest, and the next test that is interrupted, need their own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
