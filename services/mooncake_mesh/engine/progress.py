"""Progress of a long task on stderr: a bar for a person, once it has taken a second; log events otherwise."""

import sys
import time
from types import TracebackType
from typing import Final, Self

import structlog
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_QUIET_S: Final = 1.0
_LOG_EVERY_S: Final = 5.0

log = structlog.get_logger()


class LongTask:
    """Context of one task of *total* steps; call :meth:`advance` after each."""

    def __init__(self, description: str, total: int) -> None:
        self._description = description
        self._total = total
        self._done = 0
        self._began_s = time.monotonic()
        self._logged_s = self._began_s
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and time.monotonic() - self._began_s > _QUIET_S:
            log.info("task_finished", task=self._description, seconds=round(time.monotonic() - self._began_s, 1))

    def advance(self, steps: int = 1) -> None:
        """*steps* more are done."""
        self._done += steps
        now_s = time.monotonic()
        if now_s - self._began_s < _QUIET_S:
            return
        if sys.stderr.isatty():
            self._show()
        elif now_s - self._logged_s > _LOG_EVERY_S:
            self._logged_s = now_s
            log.info("task_progress", task=self._description, done=self._done, total=self._total)

    def _show(self) -> None:
        if self._bar is None or self._task is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._description, total=self._total)
            self._bar.start()
        self._bar.update(self._task, completed=self._done)
