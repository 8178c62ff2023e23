"""Waking whoever waits for "something changed", to look again."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Bell:
    """Each :meth:`ring` wakes every waiter once. Nothing is counted or stored, so nothing can grow."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, look: Callable[[], _T | None]) -> _T:
        """The first result of *look* that is not None; looks now and after each ring. Bound it with a timeout."""
        while True:
            result = look()
            if result is not None:
                return result
            await self._event.wait()
