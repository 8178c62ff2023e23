"""The parent's side of bench.transfer: one process tree for each path, asked in turn."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any, Final

import psutil

from bench.transfer_child import Answer, Question

_START_TIMEOUT_S: Final = 60.0
_ANSWER_TIMEOUT_S: Final = 120.0
_ROOT: Final = Path(__file__).parent.parent


class RigFailed(Exception):
    """A path did not start, or stopped answering; the text says what it said last."""


class Rig:
    """A running path. One that *spins* when idle is stopped while others are measured."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, spins: bool = False) -> None:
        self._spins = spins
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=_ROOT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        self._unread = b""
        try:
            self._line(_START_TIMEOUT_S)
        except RigFailed:
            self.close()
            raise
        self._pause()

    @classmethod
    def ours(cls, module: str, *args: str) -> "Rig":
        """A path that runs in this interpreter's environment."""
        return cls([sys.executable, "-m", module, *args])

    def ask(self, question: Question) -> Answer:
        """Raises RigFailed."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(asdict(question)).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RigFailed(f"{error}: {self._last_words()}") from error
        content = self._line(_ANSWER_TIMEOUT_S)
        self._pause()
        return Answer(**content)

    def descriptors_and_bytes(self) -> tuple[int, int]:
        """Open descriptors and private memory of the whole process tree."""
        members = self._members()
        return sum(m.num_fds() for m in members), sum(m.memory_full_info().uss for m in members)

    def close(self) -> None:
        """End the path and everything it started."""
        self._signal(signal.SIGCONT)
        members = self._members()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(5.0)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(members, timeout=5.0)
        for member in alive:
            member.kill()
        self._process.stdout.close()
        self._errors.close()

    def _line(self, timeout_s: float) -> dict[str, Any]:
        """The next line that is JSON; libraries print things of their own."""
        assert self._process.stdout is not None
        deadline = monotonic() + timeout_s
        while True:
            line, found, rest = self._unread.partition(b"\n")
            if found:
                self._unread = rest
                if line.startswith(b"{"):
                    content: dict[str, Any] = json.loads(line)
                    return content
                continue
            if not select.select([self._process.stdout], [], [], max(0.0, deadline - monotonic()))[0]:
                raise RigFailed(f"no answer within {timeout_s:g} s: {self._last_words()}")
            data = os.read(self._process.stdout.fileno(), 1 << 16)
            if not data:
                raise RigFailed(f"ended: {self._last_words()}")
            self._unread += data

    def _last_words(self) -> str:
        """The last Python exception, if there is one among what libraries log; the last lines otherwise."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().split("\n")
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Failure|Failed|Lost)\b", line)]
        return (raised[-1] if raised else " / ".join(lines[-3:]))[-400:]

    def _members(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._spins:
            for member in self._members():
                member.send_signal(number)
