"""The child's side of bench.transfer: answer each question on stdin with a measurement on stdout.

Uses the standard library only, because it also runs inside the peers' own environments.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

POOL_BYTES: Final = 256 << 20
SIZES: Final = (64 << 10, 512 << 10, 1 << 20, 4 << 20, 16 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Move blocks of ``size_bytes``, ``batch`` in one call, call after call for ``seconds``; ``op`` is the path's."""

    op: str
    size_bytes: int
    batch: int
    seconds: float
    least_calls: int = 3
    most_calls: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``cpu_s`` counts this process and all it started, over the measured calls."""

    calls: int
    moved_bytes: int
    seconds: float
    cpu_s: float
    p50_us: float
    p99_us: float

    @property
    def gb_per_s(self) -> float:
        return self.moved_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.moved_bytes / 1e9)


def offsets(question: Question, call: int, pool_bytes: int = POOL_BYTES) -> list[int]:
    """Where the blocks of the *call*-th call lie: the pool is walked in order, again and again."""
    slots = pool_bytes // question.size_bytes
    first = call * question.batch
    return [(first + i) % slots * question.size_bytes for i in range(question.batch)]


def timed(question: Question, work: Callable[[int], object]) -> Answer:
    """Do *work* call after call."""
    clock = _Clock(question)
    while clock.goes_on():
        started = perf_counter()
        work(clock.calls)
        clock.took(perf_counter() - started)
    return clock.answer()


async def timed_async(
    question: Question,
    work: Callable[[int], Awaitable[object]],
    prepare: Callable[[int], Awaitable[object]] | None = None,
) -> Answer:
    """As :func:`timed`; *prepare* comes before each call, off the clock (its CPU time counts)."""
    clock = _Clock(question)
    while clock.goes_on():
        if prepare is not None:
            await prepare(clock.calls)
        started = perf_counter()
        await work(clock.calls)
        clock.took(perf_counter() - started)
    return clock.answer()


class _Clock:
    def __init__(self, question: Question) -> None:
        self._question = question
        self._durations: list[float] = []
        self._done_s = 0.0
        gc.collect()
        self._cpu_before_s = tree_cpu_s()

    @property
    def calls(self) -> int:
        return len(self._durations)

    def goes_on(self) -> bool:
        if self.calls >= self._question.most_calls:
            return False
        return self.calls < self._question.least_calls or self._done_s < self._question.seconds

    def took(self, seconds: float) -> None:
        self._durations.append(seconds)
        self._done_s += seconds

    def answer(self) -> Answer:
        ordered = sorted(self._durations)
        return Answer(
            calls=self.calls,
            moved_bytes=self.calls * self._question.batch * self._question.size_bytes,
            seconds=self._done_s,
            cpu_s=tree_cpu_s() - self._cpu_before_s,
            p50_us=1e6 * ordered[len(ordered) // 2],
            p99_us=1e6 * ordered[int(0.99 * len(ordered))],
        )


def tree_cpu_s() -> float:
    """CPU time of this process and its descendants, to the nanosecond where the kernel keeps schedstat."""
    total_ns = 0
    processes = [str(os.getpid())]
    while processes:
        for task in Path(f"/proc/{processes.pop()}/task").glob("*"):
            try:
                total_ns += int((task / "schedstat").read_text().split()[0])
                processes += (task / "children").read_text().split()
            except OSError:  # it has just ended
                continue
    return total_ns / 1e9


def read_question() -> Question | None:
    """The next question, or None at the end."""
    line = sys.stdin.readline()
    return Question(**json.loads(line)) if line.strip() else None


def ready() -> None:
    _say({"ready": True})


def give(answer: Answer) -> None:
    _say(asdict(answer))


def answer_all(measure: Callable[[Question], Answer]) -> None:
    """Say that we are ready, then answer questions until there are no more."""
    ready()
    while (question := read_question()) is not None:
        give(measure(question))


def _say(content: dict[str, object]) -> None:
    print(json.dumps(content), flush=True)


def start_other_end(module: str, *args: str) -> tuple["subprocess.Popen[str]", dict[str, str]]:
    """Run *module* as the other end; it says where it is in its first line and goes when its stdin closes."""
    other = subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert other.stdout is not None
    while line := other.stdout.readline():  # libraries print things of their own
        if line.startswith("{"):
            return other, json.loads(line)
    raise RuntimeError(f"the other end of {module} did not start")


def be_other_end(where: dict[str, str]) -> None:
    """Tell the first end where we are, and stay until it goes."""
    print(json.dumps(where), flush=True)
    sys.stdin.read()
