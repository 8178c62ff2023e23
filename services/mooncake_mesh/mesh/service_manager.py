"""Word to the service manager that started this process: systemd's ``sd_notify`` protocol, see sd_notify(3).

It is told when the process is ready, when it stops, and, where it watches (``WatchdogSec=``), that it makes progress. A
process that has work in hand and gets nowhere says nothing any more, and is restarted. Without ``NOTIFY_SOCKET`` nobody
listens and nothing is said.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_PINGS_PER_PERIOD: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """``done`` grows with the work that was finished; ``pending`` is what is in hand."""

    done: int
    pending: int


class ServiceManager:
    """*address* is where it listens (None: nobody does), *watchdog_s* how long it waits for a sign of progress."""

    def __init__(self, address: str | None, watchdog_s: float | None = None) -> None:
        self._address = None if address is None else _socket_address(address)
        self._watchdog_s = watchdog_s
        self._timer: asyncio.TimerHandle | None = None
        self._seen = -1

    def ready(self) -> None:
        self._say("READY=1")

    def stopping(self) -> None:
        self._say("STOPPING=1")

    def watch(self, progress: Callable[[], Progress]) -> None:
        """Tell of progress from now on, as often as the manager needs it; from the running event loop.

        That this runs is progress of the loop; *progress* says what the work in hand makes.
        """
        if self._address is None or self._watchdog_s is None:
            return
        now = progress()
        if not now.pending or now.done != self._seen:
            self._say("WATCHDOG=1")
        self._seen = now.done
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._watchdog_s / _PINGS_PER_PERIOD, self.watch, progress)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _say(self, state: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as speaking:
                speaking.setblocking(False)
                speaking.sendto(state.encode(), self._address)
        except OSError as error:
            log.warning("service_manager_unreachable", state=state, error=str(error))


def service_manager(environ: Mapping[str, str] = os.environ) -> ServiceManager:
    """The one that *environ* names. A watchdog that is meant for another process is none (``WATCHDOG_PID``)."""
    is_mine = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    period_us = environ.get("WATCHDOG_USEC", "")
    watchdog_s = int(period_us) / 1e6 if is_mine and period_us.isdecimal() and int(period_us) else None
    return ServiceManager(environ.get("NOTIFY_SOCKET") or None, watchdog_s)


def _socket_address(address: str) -> str:
    """A leading @ stands for the zero byte of an abstract address."""
    return "\0" + address[1:] if address.startswith("@") else address
