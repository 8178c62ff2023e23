"""What a stalled party costs the others: memory of every process while a client, the gateway or the conductor stalls.

Requests come at a steady rate all the time, and whoever is not answered leaves after a while. Meanwhile

* many clients open a stream with long tokens (log-probabilities) and never read: until all they asked for is drawn;
* or the gateway is stopped (SIGSTOP), and requests go on coming to its listening socket;
* or the conductor is stopped, and the gateway goes on asking it.

Then the party goes on, and the mesh must answer and be at rest again. ``growth`` is the peak of a process' anonymous
memory (no arena, no file) over what it had under the same load before; its ceiling is worked out from the limits that
docs/faults.md names.
"""

import asyncio
import contextlib
import enum
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from mooncake_proto.control import Role
from tests.mesh import clients
from tests.mesh.harness import Mesh

MIB: Final = 1 << 20
_SAMPLE_S: Final = 0.1
_PATIENCE_S: Final = 5.0
_RECEIVE_BYTES: Final = 4096
_LOAD_TOKENS: Final = 64
_DRAWN_WITHIN_S: Final = 180.0

WRITTEN_BYTES: Final = 128 << 10
"""Of one stream that nobody reads: what is serialised and waits in the gateway for room in the socket."""
TOKEN_BYTES: Final = 1536
"""Of one token with the log-probabilities of five others, from when it is drawn until the answer ends."""
BASE_BYTES: Final = 24 * MIB
"""Of everything else in a process: ZeroMQ's queues, calls in flight, what Python keeps for itself."""

_FLAGS: Final = {
    "conductor": ["--ttft-slo-s=600", "--tbt-slo-s=60"],
    "decode": ["--fake-decode-s-base=0.02", "--max-batch=256"],
}


class Party(enum.Enum):
    CLIENTS = "clients read nothing"
    GATEWAY = "gateway stopped"
    CONDUCTOR = "conductor stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallPlan:
    """``unread`` streams of ``tokens`` each; the others stall for ``stall_s``; ``per_s`` requests come all the time.

    ``warm_s`` before and ``recover_s`` after that.
    """

    unread: int = 128
    tokens: int = 1000
    stall_s: float = 20.0
    per_s: float = 20.0
    warm_s: float = 5.0
    recover_s: float = 8.0

    def ceiling_bytes(self, process: str, party: Party) -> int:
        """By how much *process* may grow while *party* stalls."""
        if process.startswith("gateway") and party is Party.CLIENTS:
            return BASE_BYTES + self.unread * (WRITTEN_BYTES + self.tokens * TOKEN_BYTES)
        return BASE_BYTES


@dataclass(slots=True, kw_only=True)
class StallResult:
    """Of one party: by how much each process grew at most, in bytes; how the steady requests ended."""

    party: Party
    plan: StallPlan
    growth: dict[str, int]
    ends: dict[str, int]
    violations: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add what is over its ceiling to ``violations``."""
        for process, grown in self.growth.items():
            ceiling = self.plan.ceiling_bytes(process, self.party)
            if grown > ceiling:
                self.violations.append(
                    f"{self.party.value}: {process} grew by {grown / MIB:.1f} MiB, over {ceiling / MIB:.1f}"
                )


def run_stalls(plan: StallPlan, parties: Sequence[Party] = tuple(Party)) -> list[StallResult]:
    """One party after the other, each with a mesh of its own: what one has freed would hide what the next one takes."""
    return [_run_stall(plan, party) for party in parties]


def _run_stall(plan: StallPlan, party: Party) -> StallResult:
    with Mesh(flags=_FLAGS) as mesh:
        return asyncio.run(_stall(mesh, plan, party))


def table(results: Sequence[StallResult]) -> str:
    """Processes down, a column for each party: growth and ceiling."""
    lines = [f"{'process':<14}" + "".join(f"{result.party.value:<28}" for result in results)]
    for process in results[0].growth:
        cells = []
        for result in results:
            ceiling = result.plan.ceiling_bytes(process, result.party)
            cells.append(f"{result.growth[process] / MIB:.1f} of {ceiling / MIB:.1f} MiB")
        lines.append(f"{process:<14}" + "".join(f"{cell:<28}" for cell in cells))
    return "\n".join(lines)


async def _stall(mesh: Mesh, plan: StallPlan, party: Party) -> StallResult:
    load = _Load(mesh.http, plan.per_s)
    async with load.coming():
        await asyncio.sleep(plan.warm_s)
        with _Peaks({name: mesh.pid(name) for name in mesh.names}) as peaks:
            if party is Party.CLIENTS:
                await _unread(mesh, plan, load)
            else:
                await _stopped(mesh, "gateway0" if party is Party.GATEWAY else "conductor", plan.stall_s)
            await asyncio.sleep(plan.recover_s)
            peaks.sample()
    result = StallResult(party=party, plan=plan, growth=peaks.growth, ends=load.ends)
    try:
        await asyncio.to_thread(mesh.wait_healthy)
        await asyncio.to_thread(mesh.wait_idle)
        text = await asyncio.to_thread(clients.complete, mesh.http, "after a stall", 8)
        assert text == clients.expected_text("after a stall", 8), text
    except AssertionError as error:
        result.violations.append(f"{party.value}: {error}")
    result.judge()
    return result


async def _stopped(mesh: Mesh, name: str, stall_s: float) -> None:
    mesh.stop(name)
    try:
        await asyncio.sleep(stall_s)
    finally:
        mesh.cont(name)


async def _unread(mesh: Mesh, plan: StallPlan, load: "_Load") -> None:
    """Until the mesh has drawn all that the streams asked for, and decodes for nobody but the *load*."""
    with ExitStack() as streams:
        for number in range(plan.unread):
            streams.enter_context(_unread_stream(mesh.http, f"{number} is not read", plan.tokens))
        await _until(lambda: _decoding(mesh) > load.running, "begin")
        await _until(lambda: _decoding(mesh) <= load.running, "come to an end")


async def _until(holds: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + _DRAWN_WITHIN_S
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < until_s, f"the streams that nobody reads do not {what}"
        await asyncio.sleep(_SAMPLE_S)


def _decoding(mesh: Mesh) -> int:
    """Jobs that decode instances have."""
    loads = [state.load for state in mesh.status().cluster.members if state.member.role is Role.DECODE]
    return sum(load.running_jobs + load.queued_jobs for load in loads)


@contextmanager
def _unread_stream(base: str, prompt: str, tokens: int) -> Iterator[None]:
    """A client that asks for a long answer and takes next to nothing of it."""
    parts = urlsplit(base)
    with socket.socket() as plug:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        plug.connect((parts.hostname or "", parts.port or 80))
        plug.sendall(clients.streamed_request(parts.netloc, prompt, tokens, logprobs=5))
        yield


class _Load:
    """Requests at a steady rate, each on its own connection: how many run, and how the others ended."""

    def __init__(self, base: str, per_s: float) -> None:
        self._parts = urlsplit(base)
        self._per_s = per_s
        self.running = 0
        self.ends: dict[str, int] = {}

    @asynccontextmanager
    async def coming(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            source = tasks.create_task(self._come(tasks))
            try:
                yield
            finally:
                source.cancel()

    async def _come(self, tasks: asyncio.TaskGroup) -> None:
        number = 0
        while True:
            tasks.create_task(self._ask(number))
            number += 1
            await asyncio.sleep(1 / self._per_s)

    async def _ask(self, number: int) -> None:
        end = "left"
        self.running += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                end = await self._end(f"{number} of the load {'goes on ' * (number % 40)}")
        self.running -= 1
        self.ends[end] = self.ends.get(end, 0) + 1

    async def _end(self, prompt: str) -> str:
        try:
            reader, writer = await asyncio.open_connection(self._parts.hostname, self._parts.port)
        except OSError as error:
            return type(error).__name__
        try:
            writer.write(clients.streamed_request(self._parts.netloc, prompt, _LOAD_TOKENS))
            status = (await reader.readline()).split(b" ")[1:2]
            while line := await reader.readline():
                if line == b"data: [DONE]\n":
                    return "finished"
            return (status or [b"cut"])[0].decode()
        except OSError as error:
            return type(error).__name__
        finally:
            writer.transport.abort()


class _Peaks:
    """Most anonymous memory of each process while the block runs, over what it had at its begin."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self._first = {name: _anonymous_bytes(pid) for name, pid in pids.items()}
        self._peak = dict(self._first)

    def __enter__(self) -> "_Peaks":
        self._sampling = asyncio.get_running_loop().call_later(_SAMPLE_S, self._sample)
        return self

    def __exit__(self, *_: object) -> None:
        self._sampling.cancel()

    @property
    def growth(self) -> dict[str, int]:
        return {name: self._peak[name] - first for name, first in self._first.items()}

    def sample(self) -> None:
        for name, pid in self._pids.items():
            self._peak[name] = max(self._peak[name], _anonymous_bytes(pid))

    def _sample(self) -> None:
        self.sample()
        self._sampling = asyncio.get_running_loop().call_later(_SAMPLE_S, self._sample)


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
