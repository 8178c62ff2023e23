"""Bounded logging of what strangers can cause; pure."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LogAllowance:
    """At most ``lines`` lines in ``window_s``, so that nobody outside can fill a disk."""

    lines: int = 5
    window_s: float = 60.0
    _began_s: float = float("-inf")
    _used: int = 0
    _unsaid: int = 0

    def take(self, now_s: float) -> int | None:
        """None: say nothing. Otherwise how many lines went unsaid before this one."""
        if now_s - self._began_s >= self.window_s:
            self._began_s, self._used = now_s, 0
        if self._used >= self.lines:
            self._unsaid += 1
            return None
        self._used += 1
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid
