"""Processes of a stress run: messengers with an SSD folder each, their conductor, and the workers that use them."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

import numpy as np

from bench.stress_books import Bytes, Ledger
from mooncake_mesh.cli.up import dies_with
from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.mesh.arena import BorrowedArena, Holder, borrow_to_write
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Load, Ok, Ping, Pong, StatusQuery, StatusReport
from mooncake_proto.ids import InstanceId, JobId, new_incarnation
from mooncake_proto.transfer import ArenaInfo, Attach, Release

_R = TypeVar("_R")

BLOCK_BYTES: Final = 50_000
"""Whole 8-byte words, but no whole pages: a slot on SSD is padded, a slice lies across pages."""
LAYERS: Final = 4
N_BLOCKS: Final = 160
N_SLOTS: Final = 384
SLOT_BYTES: Final = -(-BLOCK_BYTES // 4096) * 4096

_START_S: Final = 30.0
_LATE_S: Final = 5.0
"""A call that ends this much after its deadline has not kept it. This process shares its processors, too."""
_RELEASE_S: Final = 3.0
_RETRY_S: Final = 0.05
_BUGS: Final = frozenset(
    {"internal_error", "invariant_violated", "invalid_transition", "malformed_message", "unknown_kind"}
)
_ALARMS: Final = frozenset({"handler_crashed", "message_refused"})
_ERRORS_OF_HARM: Final = frozenset({"ssd_tier_off"})


class Process:
    """One process of the mesh and what it says. ``life`` counts its starts."""

    def __init__(self, name: str, role: str, flags: dict[str, object], ledger: Ledger) -> None:
        self.name = name
        self.life = 0
        self.said: Counter[str] = Counter()
        self.process: subprocess.Popen[bytes] | None = None
        self._ledger = ledger
        self._last: deque[str] = deque(maxlen=30)
        all_flags = {"instance-id": name, "log-level": "warning", "log-format": "json", **flags}
        self._command = [
            sys.executable,
            "-P",
            "-m",
            "mooncake_mesh",
            role,
            *[f"--{k}={v}" for k, v in all_flags.items()],
        ]
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None, "start it first"
        return self.process.pid

    def start(self) -> None:
        self.life += 1
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=dies_with(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), name=f"log-{self.name}", daemon=True)
        self._reader.start()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._ended()

    def stop(self) -> int:
        """End in order; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._ledger.violation(f"{self.name} did not stop within {_START_S:g} s of SIGTERM")
            self.process.kill()
        return self._ended()

    def _ended(self) -> int:
        assert self.process is not None
        assert self._reader is not None
        code = self.process.wait()
        self._reader.join()
        return code

    def check_alive(self) -> None:
        if self.process is not None and self.process.poll() is not None:
            said = "\n    ".join(self._last)
            self._ledger.violation(f"{self.name} ended by itself with {self.process.returncode}; it said\n    {said}")
            raise RuntimeError(f"{self.name} is gone")

    def limit_files(self, max_bytes: int) -> None:
        """Writes beyond *max_bytes* of any file fail (EFBIG), as they do on a full disk; -1 lifts the limit."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (max_bytes, hard))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_kib(self) -> dict[str, int]:
        """``Rss``, ``Pss``, ``Pss_Anon`` (what is no file and no arena) and others, in KiB."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()[1:]
        return {name.rstrip(":"): int(value) for name, value, *_ in map(str.split, lines)}

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        """On a thread: count what the process says; some of it may never be said."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                try:
                    event: dict[str, Any] = json.loads(text)
                except ValueError:
                    self._ledger.violation(f"{self.name} wrote what is no event: {text[:2000]}")
                    continue
                name = str(event.get("event"))
                self.said[name] += 1
                is_error = event.get("level") in ("error", "critical") and name not in _ERRORS_OF_HARM
                if name in _ALARMS or is_error or event.get("code") in _BUGS:
                    self._ledger.violation(f"{self.name} reports {text[:4000]}")


class Node(Process):
    """A messenger. ``harm`` grows whenever something is done to it, or ends: what spans no change was undisturbed."""

    def __init__(self, name: str, folder: Path, transport: str, eviction: str, ledger: Ledger) -> None:
        self.endpoint = f"ipc://{folder}/{name}.ipc"
        self.ssd = folder / f"{name}-ssd"
        self.harm = 0
        self.workers: list[Worker] = []
        flags = {
            "node-id": name,
            "bind": self.endpoint,
            "conductor": f"ipc://{folder}/conductor.ipc",
            "run-dir": folder,
            "arena-bytes": N_BLOCKS * BLOCK_BYTES,
            "transport": transport,
            "eviction": eviction,
            "ssd-dir": self.ssd,
            "ssd-bytes": N_SLOTS * SLOT_BYTES,
        }
        super().__init__(name, "messenger", flags, ledger)

    async def answers(self) -> None:
        """Wait until it does. Raises RuntimeError."""
        async with RpcClient(self.endpoint) as rpc:
            deadline_s = monotonic() + _START_S
            while monotonic() < deadline_s:
                self.check_alive()
                try:
                    await rpc.call(Ping(), Pong, timeout_s=1.0)
                except MooncakeError:
                    continue
                return
        self._ledger.violation(f"{self.name} did not answer within {_START_S:g} s of its start")
        raise RuntimeError(f"{self.name} does not answer")


class Conductor(Process):
    """It hears what messengers say of themselves."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.endpoint = f"ipc://{folder}/conductor.ipc"
        flags = {"bind": self.endpoint, "publish": f"ipc://{folder}/cluster.ipc", "heartbeat-s": 0.2}
        super().__init__("conductor", "conductor", flags, ledger)

    async def report(self) -> StatusReport:
        async with RpcClient(self.endpoint) as rpc:
            return await rpc.call(StatusQuery(), StatusReport, timeout_s=10.0)

    async def load(self, node: Node) -> Load:
        for state in (await self.report()).cluster.members:
            if state.member.instance_id == node.name:
                return state.load
        return Load()


class WorkerLost(Exception):
    """This worker's hold on the arena is over: its messenger or it itself is gone."""


class Worker:
    """A process of a node as its messenger sees one: a connection for calls, and one that keeps the arena mapped."""

    def __init__(self, node: Node, number: int, ledger: Ledger) -> None:
        self.node = node
        self.name = f"{node.name}-w{number}"
        self.me = Holder(instance_id=InstanceId(self.name), incarnation=new_incarnation())
        self.rpc = RpcClient(node.endpoint)
        self.is_dead = False
        self.attached = asyncio.Event()
        self._ledger = ledger
        self._arena: BorrowedArena | None = None

    async def run(self) -> None:
        """Stay attached to the messenger, also to its next lives, until cancelled or dead."""
        attach = Attach(
            instance_id=self.me.instance_id, incarnation=self.me.incarnation, block_bytes=BLOCK_BYTES, layout="stress"
        )
        try:
            while not self.is_dead:
                try:
                    info = await self.rpc.call(attach, ArenaInfo, timeout_s=2.0)
                    self._arena = await borrow_to_write(info.socket_path, self.me)
                except MooncakeError:
                    await asyncio.sleep(_RETRY_S)
                    continue
                self.attached.set()
                await self._arena.lost.wait()
                self._let_go()
        finally:
            self.die()

    def die(self) -> None:
        """As a process that is killed: both connections close, nothing more is written."""
        if not self.is_dead:
            self.is_dead = True
            self._let_go()
            self.rpc.close()

    def _let_go(self) -> None:
        arena, self._arena = self._arena, None
        self.attached.clear()
        if arena is not None:
            arena.lost.set()
            arena.close()

    @property
    def hold(self) -> BorrowedArena | None:
        """The arena as it is mapped now; another one, or none, after a loss."""
        return self._arena

    def block(self, hold: BorrowedArena, block: int) -> Bytes:
        """The bytes of a block; keep no view over an await. Raises WorkerLost when *hold* is over."""
        if self._arena is not hold:
            raise WorkerLost(self.name)
        return np.frombuffer(hold.arena.view[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], np.uint8)

    async def call(self, body: object, expect: type[_R], timeout_s: float) -> _R:
        """As RpcClient.call; that it ends in time, and how, is part of the test. Raises WorkerLost, too."""
        if self.is_dead:
            raise WorkerLost(self.name)
        started_s = monotonic()
        try:
            return await self.rpc.call(body, expect, timeout_s=timeout_s)
        except MooncakeError as error:
            if error.code in _BUGS:
                self._ledger.violation(f"{self.name} got {error} from {self.node.name}")
            raise
        finally:
            took_s = monotonic() - started_s
            if took_s > timeout_s + _LATE_S:
                self._ledger.violation(
                    f"{type(body).__name__} to {self.node.name} took {took_s:.1f} s of {timeout_s:g}"
                )

    def post(self, body: object) -> None:
        """Raises WorkerLost or PeerUnreachable."""
        if self.is_dead:
            raise WorkerLost(self.name)
        self.rpc.post(body)

    async def release(self, job_id: JobId) -> None:
        """Give a job back; tried until it is said, or the worker is dead.

        Also after the messenger was lost: the call that asked for the blocks may have reached its next life.
        """
        while not self.is_dead:
            try:
                await self.call(Release(job_id=job_id), Ok, _RELEASE_S)
            except WorkerLost:
                return
            except MooncakeError as error:
                self._ledger.outcomes[f"release again: {error.code}"] += 1
                await asyncio.sleep(_RETRY_S)
                continue
            return
