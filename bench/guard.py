"""Runs one command and leaves nothing of it behind: ``python -m bench.guard COMMAND …``.

The command runs while this process' stdin stays open. When that closes (the benchmark has ended it, or has itself died
in whatever way) everything that the command started is ended too, daemons included: they become children of this
process, which is a subreaper. It runs on the cores that this process may use.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from typing import Final

import psutil

_PR_SET_CHILD_SUBREAPER: Final = 36
_GRACE_S: Final = 15.0


def main() -> int:
    """The command's exit code; 0 when it was ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # stdin says when it is over; SIG_IGN the command would inherit
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    ended = os.pidfd_open(command.pid)
    readable, _, _ = select.select([sys.stdin, ended], [], [])
    code = command.wait() if ended in readable else 0
    while left := psutil.Process().children(recursive=True):  # again for what became ours when its parent went
        end_all(left)
    return code


def end_all(processes: list[psutil.Process]) -> None:
    """Ask *processes* to end, frozen ones too, and kill those that have not in time."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        _signal(processes, number)
    _, left = psutil.wait_procs(processes, timeout=_GRACE_S)
    _signal(left, signal.SIGKILL)
    psutil.wait_procs(left, timeout=_GRACE_S)


def freeze(guard_pid: int) -> None:
    """Stop everything that the guard of this id runs: it keeps its memory and takes no processor time."""
    _signal(_below(guard_pid), signal.SIGSTOP)


def thaw(guard_pid: int) -> None:
    """Undo :func:`freeze`."""
    _signal(_below(guard_pid), signal.SIGCONT)


def _below(guard_pid: int) -> list[psutil.Process]:
    children: list[psutil.Process] = psutil.Process(guard_pid).children(recursive=True)
    return children


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    sys.exit(main())
