"""When the next step begins, who wakes it until then, and how long steps take."""

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Final, Protocol

from mooncake_mesh.decode.core import DecodeCore
from mooncake_mesh.decode.forming import Forming
from mooncake_mesh.decode.inline_prompts import InlinePrompts
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.mesh.bell import Bell

_STEP_MEMORY: Final = 0.9
_LEAST_PAUSE_S: Final = 0.001
"""The loop's timers are no finer."""


class SharedCores(Protocol):
    """What a pause has to do with the cores: see CoreBoard."""

    @property
    def is_contended(self) -> bool: ...

    def rest(self) -> None: ...


class StepClock:
    """Whoever steps asks :meth:`holds` before each step, and again when *changed* rings; :meth:`begin` and :meth:`end`
    go around the step. Without *cores* that are shared nobody waits but for somebody to decode.

    ``step_s`` is what steps take of late. On the loop, while the engine thread computes nothing.
    """

    def __init__(
        self, core: DecodeCore, prompts: InlinePrompts, cores: SharedCores | None, changed: Bell, forming_s: float
    ) -> None:
        self.step_s = 0.0
        self._core = core
        self._prompts = prompts
        self._cores = cores
        self._changed = changed
        self._forming = Forming(forming_s)
        self._alarm: asyncio.TimerHandle | None = None
        self._began_s = 0.0

    def holds(self, batch: Sequence[DecodeSequence]) -> bool:
        """Whether a step over *batch* waits. If for its time, *changed* rings then at the latest."""
        if not batch:
            self._forming.idle()
            if self._cores is not None:
                self._cores.rest()
            return True
        if self._prompts.is_due or self._cores is None or not self._cores.is_contended:
            return False
        now_s, places = monotonic(), self._core.max_batch - len(batch)
        until_s = self._forming.until_s(batch, min(places, self._core.n_coming(len(batch))), now_s)
        if until_s is None or until_s - now_s < _LEAST_PAUSE_S:
            return False
        self._cores.rest()
        self._ring_after(until_s - now_s)
        return True

    def begin(self) -> None:
        self._silence()
        self._began_s = monotonic()
        self._forming.began(self._began_s)

    def end(self) -> float:
        """How long it took."""
        took_s = monotonic() - self._began_s
        self.step_s = _STEP_MEMORY * self.step_s + (1 - _STEP_MEMORY) * took_s if self.step_s else took_s
        return took_s

    def _ring_after(self, left_s: float) -> None:
        self._silence()
        self._alarm = asyncio.get_running_loop().call_later(left_s, self._changed.ring)

    def _silence(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
