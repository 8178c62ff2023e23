"""Random faults under load: who is killed, stopped or restarted when follows from a seed, and so does what clients ask.

Clients stream greedy and seeded requests, many of which share a prefix, and some leave in the middle. Meanwhile one
process after the other is hurt, never two at a time, so that everybody has somebody to turn to. Every half minute all
work ends, and then nothing may be held.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.fault_mesh import Ask, Books, End, keep_logs
from bench.fault_work import DEADLINE_S, Work
from tests.mesh.harness import Mesh

ROUND_S: Final = 30.0
_GRACE_S: Final = 10.0
_PAUSES_S: Final = (0.2, 3.0)
_STALLS_S: Final = (0.3, 1.0, 2.0, 5.0, 10.0)
_DOWN_S: Final = (0.0, 0.0, 0.5, 3.0)
_LEAVERS: Final = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """One fault: what was done to whom, seconds after the start."""

    at_s: float
    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s  {self.name:<11} {self.what}"


@dataclass(slots=True)
class RandomRun:
    """One run; ``violations`` in words, of which the first leaves all logs in ``logs``."""

    minutes: float
    seed: str
    work: Work
    logs: Path | None = None
    faults: list[Injected] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    rounds: int = 0
    _started_s: float = 0.0
    _gateway_harm: list[tuple[float, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Needs the fork server. Ends early at the first violation: what comes after it may be its consequence."""
        harm = random.Random(f"{self.seed} harm")
        clients = [random.Random(f"{self.seed} client {number}") for number in range(self.work.clients)]
        try:
            with self.work.mesh() as mesh:
                books = Books(mesh)
                self.work.begin(mesh, books)
                base = mesh.http
                self._started_s = time.monotonic()
                ends_s = self._started_s + 60 * self.minutes
                while time.monotonic() < ends_s and not self.violations:
                    self._round(mesh, base, harm, clients, min(ends_s, time.monotonic() + ROUND_S))
                    over_s = time.monotonic()
                    self._mend(mesh)
                    self.violations += [f"round {self.rounds}: {found}" for found in books.differences(over_s)]
                    self.rounds += 1
                if self.logs is not None and self.violations:
                    keep_logs(mesh, self.logs)
                if not self.violations:
                    self.violations += [f"at the end: {found}" for found in self.work.end(books)]
        except AssertionError as error:
            self.violations.append(f"the mesh broke: {error}")

    # --- clients ------------------------------------------------------------------------------------------------------

    def _round(self, mesh: Mesh, base: str, harm: random.Random, clients: list[random.Random], until_s: float) -> None:
        over = threading.Event()
        threads = [threading.Thread(target=self._work, args=(base, rng, over)) for rng in clients]
        for thread in threads:
            thread.start()
        try:
            while time.monotonic() < until_s:
                time.sleep(harm.uniform(*_PAUSES_S))
                self._hurt(mesh, harm)
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _work(self, base: str, rng: random.Random, over: threading.Event) -> None:
        while not over.is_set():
            ask = self.work.ask(rng)
            leaves_s = rng.uniform(0.0, 1.0) if rng.random() < _LEAVERS else None
            began_s = time.monotonic()
            ask.start(base)
            if leaves_s is not None:
                time.sleep(leaves_s)
                ask.opened.disconnect()
                self._count(End(kind="left", detail=""), ask, began_s)
                continue
            self._count(ask.end(timeout_s=DEADLINE_S + _GRACE_S), ask, began_s)
            if ask.opened.errors or ask.opened.broken:
                time.sleep(0.2)  # as a client that tries again later

    def _count(self, end: End, ask: Ask, began_s: float) -> None:
        with self._lock:
            self.ends[end.kind] += 1
            if end.kind == "refused":
                self.refusals[end.detail] += 1
            is_fine = end.kind in ("finished", "left", "refused") and "deadline" not in end.detail
            if end.kind == "cut":
                is_fine = any(began_s < to_s and from_s < time.monotonic() for from_s, to_s in self._gateway_harm)
            if not is_fine:
                at_s = began_s - self._started_s
                self.violations.append(f"{at_s:.1f} s: {end.kind}: {end.detail} ({ask.prompt[-40:]!r}, {ask.seed})")

    # --- faults -------------------------------------------------------------------------------------------------------

    def _hurt(self, mesh: Mesh, harm: random.Random) -> None:
        name = harm.choice(mesh.names)
        began_s = time.monotonic()
        is_gateway = name == "gateway0"
        if is_gateway:
            self._gateway_harm.append((began_s, float("inf")))
        if harm.random() < 0.5:
            stall_s = harm.choice(_STALLS_S)
            self._note(name, f"SIGSTOP {stall_s:g} s")
            mesh.stop(name)
            time.sleep(stall_s)
            mesh.cont(name)
        else:
            down_s = harm.choice(_DOWN_S)
            self._note(name, f"kill -9, down for {down_s:g} s")
            mesh.kill(name)
            time.sleep(down_s)
            mesh.start(name)
        self._mend(mesh)
        if is_gateway:
            self._gateway_harm[-1] = (began_s, time.monotonic())

    def _note(self, name: str, what: str) -> None:
        self.faults.append(Injected(at_s=time.monotonic() - self._started_s, name=name, what=what))

    def _mend(self, mesh: Mesh) -> None:
        """Wait until all is well again: the next fault finds everybody with a spare."""
        mesh.wait_healthy(timeout_s=40.0)

    def report(self) -> str:
        """Every injected fault, and how requests ended."""
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.ends.items()))
        refused = ", ".join(f"{n} {what}" for what, n in sorted(self.refusals.items()))
        lines = [*map(str, self.faults), f"{len(self.faults)} faults in {self.rounds} rounds; requests: {kinds}"]
        return "\n".join([*lines, f"refusals: {refused}"] if refused else lines)
