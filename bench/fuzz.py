"""What no peer of ours would send, on everything that listens: `python -m bench.fuzz --minutes 10`.

A mesh of fake engines gets, in rounds:

* mutated messages of every kind on every ZeroMQ socket (fuzz_frames.py), some with names of living members;
* damaged bytes beneath ZeroMQ, at the data port and the arena socket, with and without a link's secret (fuzz_links.py);
* mutated HTTP requests (fuzz_bodies.py), and with ``--schemathesis PROGRAM`` those that schemathesis makes of the
  gateway's own description.

Afterwards every process must be in its first life, no log may hold an error or a traceback, no answer may say
"internal" or 500, no process may have grown by more than ``--growth-mib`` after the first third, and a known request
must have the answer it had. ``--seed`` repeats a run, but for times and for the names that a mesh draws.
"""

import argparse
import asyncio
import itertools
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq

from bench.fuzz_bodies import BodyMutator, FuzzedRequest
from bench.fuzz_frames import FrameMutator, Names, kinds_taken, tagged
from bench.fuzz_links import LinkFuzzer
from bench.soak import sample
from mooncake_proto import codec
from mooncake_proto.control import Failure, Goodbye, Ping, Pong
from mooncake_proto.errors import WireError
from mooncake_proto.ids import JobId
from mooncake_proto.transfer import Release
from tests.mesh import clients
from tests.mesh.fork_server import ForkServer
from tests.mesh.harness import Mesh, held

GROWTH_MIB: Final = 48.0
_WARM_UP: Final = 0.3
_MESSAGES: Final = 120
_REQUESTS: Final = 12
_ANSWER_S: Final = 20.0
_PROMPT: Final = "what is asked before and after"
_SERIOUS: Final = ("error", "critical")
_MESSENGERS: Final = ("messenger0", "messenger1")


@dataclass(slots=True)
class FuzzRun:
    """Rounds of fuzzing on *mesh*. What is wrong is in ``violations``, in words; ``counts`` says what was sent."""

    mesh: Mesh
    seed: str
    violations: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)
    _lives: dict[str, str] = field(default_factory=dict)
    _taken: dict[str, list[str]] = field(default_factory=dict)
    _known_answer: Any = None

    def begin(self) -> None:
        """Note what must be the same in the end, and ask every socket what it takes."""
        self._lives = {name: self.mesh.incarnation(name) for name in self.mesh.names}
        self._known_answer = self._known()
        self._taken = {name: kinds_taken(endpoint) for name, endpoint in self._sockets().items()}

    def round(self, number: int) -> None:
        """Everything once; what is sent depends on the seed and *number*."""
        rng = random.Random(f"{self.seed} {number}")
        names = Names.of(self.mesh.status().cluster.members, tokens=self.mesh.tokens, model=self.mesh.model)
        mutator = FrameMutator(rng, names)
        for name, endpoint in self._sockets().items():
            with self._telling(f"round {number}, {name}"):
                self._send_messages(endpoint, mutator, self._taken[name])
        fuzzer = LinkFuzzer(self.mesh, rng, receiver="messenger1", sender="messenger0", worker="decode0")
        with self._telling(f"round {number}, links"):
            for _ in range(3):
                fuzzer.strangers()
                fuzzer.link()
            for endpoint in (*self._sockets().values(), f"ipc://{self.mesh.folder}/cluster.ipc"):
                fuzzer.beneath_zeromq(endpoint)
        bodies = BodyMutator(rng, self.mesh.model)
        with self._telling(f"round {number}, http"):
            asyncio.run(self._send_requests([bodies.request() for _ in range(_REQUESTS)]))
        self.counts["links"] += 15
        self.counts["rounds"] += 1
        with self._telling(f"round {number}, afterwards"):
            self._release(mutator.jobs)
            self._dismiss()

    def _sockets(self) -> dict[str, str]:
        return {"tokens": self.mesh.tokens, **{name: self.mesh.endpoint(name) for name in self.mesh.names}}

    def _telling(self, where: str) -> "_Telling":
        return _Telling(self, where)

    def _send_messages(self, endpoint: str, mutator: FrameMutator, taken: Sequence[str]) -> None:
        """A burst, then a proper question, which must be answered."""
        with clients.dealer(endpoint) as plug:
            for _ in range(_MESSAGES):
                plug.send_multipart(mutator.message(taken))
            plug.send_multipart(tagged(Ping(), 0))
            self.counts["messages"] += _MESSAGES
            deadline_s = time.monotonic() + _ANSWER_S
            while not self._hear(plug, deadline_s):
                pass

    def _hear(self, plug: "zmq.Socket[bytes]", deadline_s: float) -> bool:
        """Take an answer in; whether it was that to the proper question."""
        try:
            envelope, body = clients.receive(plug, timeout_s=max(0.0, deadline_s - time.monotonic()))
        except WireError as error:
            self.violations.append(f"an answer that is no message: {error}")
            return False
        code = body.code if isinstance(body, Failure) else type(body).__name__
        self.answers[code] += 1
        if code == "internal":
            self.violations.append(f"answered {body}")
        return isinstance(body, Pong) and envelope.re == "proper-0"

    def _release(self, jobs: set[str]) -> None:
        """Blocks that were asked for in the name of a living worker are given back by whoever asked."""
        for messenger in _MESSENGERS:
            with clients.dealer(self.mesh.endpoint(messenger)) as plug:
                for job_id in jobs:
                    plug.send_multipart(codec.encode(Release(job_id=JobId(job_id))))
                plug.send_multipart(tagged(Ping(), 0))
                clients.receive(plug, timeout_s=_ANSWER_S)

    def _dismiss(self) -> None:
        """Say goodbye for the members that were made up: they would be remembered as dead for a minute."""
        with clients.dealer(self.mesh.conductor) as plug:
            for state in self.mesh.status().cluster.members:
                if state.member.instance_id not in self.mesh.names:
                    goodbye = Goodbye(instance_id=state.member.instance_id, incarnation=state.member.incarnation)
                    plug.send_multipart(codec.encode(goodbye))
            plug.send_multipart(tagged(Ping(), 0))
            clients.receive(plug, timeout_s=_ANSWER_S)

    # --- http ---------------------------------------------------------------------------------------------------------

    async def _send_requests(self, requests: list[FuzzedRequest]) -> None:
        await asyncio.gather(*[self._send_request(request) for request in requests])

    async def _send_request(self, request: FuzzedRequest) -> None:
        host, port = self.mesh.http.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        status = b"none"
        try:
            writer.write(request.data)
            async with asyncio.timeout(2.0 if not request.is_http else _ANSWER_S):
                status = (await reader.read(12))[9:12] or b"end"
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            pass  # bytes that announce more than they hold are waited for; an answer that never ends is told below
        except ConnectionError:
            status = status if status != b"none" else b"end"
        finally:
            writer.transport.abort()
        self.counts["requests"] += 1
        self.answers[f"HTTP {status.decode(errors='replace')}"] += 1
        if status == b"500" or (request.is_http and not status.isdigit()):
            self.violations.append(f"{status!r} to {request.what}")

    def schemathesis(self, program: str, minutes: float) -> None:
        """Requests that *program* makes of the gateway's own description, more of them for more *minutes*."""
        command = [program, "run", f"{self.mesh.http}/openapi.json", "--checks=not_a_server_error", "--no-color"]
        command += [f"--seed={zlib.crc32(self.seed.encode())}", f"--max-examples={max(10, int(10 * minutes))}"]
        command += ["--phases=examples,coverage,fuzzing", "--request-timeout=20", "--exclude-path-regex=^/metrics"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        self.counts["schemathesis"] = 1
        print(done.stdout[-2500:])
        if done.returncode != 0:
            self.violations.append(f"schemathesis ended with {done.returncode}: {done.stderr[-500:]}")

    # --- the verdict --------------------------------------------------------------------------------------------------

    def _known(self) -> Any:
        answer = clients.post(self.mesh.http, "/v1/completions", clients.completion_fields(_PROMPT, 20)).json()
        return {"choices": answer.get("choices"), "error": answer.get("error")}

    def take_memory(self) -> None:
        """Anonymous memory of every process; growth counts from the first time."""
        for name in self.mesh.names:
            if self.mesh.is_running(name):
                self.memory_mib.setdefault(name, []).append(sample(self.mesh.pid(name)).anonymous_mib)

    def end(self, *, growth_mib: float) -> None:
        """Judge."""
        dead = [name for name in self.mesh.names if not self.mesh.is_running(name)]
        self.violations += [
            f"{name} has ended with {self.mesh.exit_code(name)} after {self.mesh.logs(name)[-5:]}" for name in dead
        ]
        self.take_memory()
        self.violations += self.serious_lines()
        if dead:
            return
        with self._telling("afterwards"):
            self._wait_rested()
            if {name: self.mesh.incarnation(name) for name in self._lives} != self._lives:
                self.violations.append("a process is in another life")
            if (known := self._known()) != self._known_answer:
                self.violations.append(f"the known request is answered {known}, before {self._known_answer}")
        for name, taken in self.memory_mib.items():
            if taken[-1] - taken[0] > growth_mib:
                self.violations.append(f"{name} has grown from {taken[0]:.1f} to {taken[-1]:.1f} MiB")

    def _wait_rested(self) -> None:
        """Raises AssertionError with what the conductor knows."""
        try:
            self.mesh.wait_healthy()
            self.mesh.wait_idle()
        except AssertionError as error:
            report = self.mesh.status()
            known = [
                f"{s.member.instance_id!r} {s.member.role.value} {s.health.value} takes work {s.takes_work}, {held(s)}"
                for s in report.cluster.members
            ]
            raise AssertionError(f"{error}; {report.reasons}; {known}") from None

    def serious_lines(self) -> list[str]:
        """Errors and tracebacks in the logs."""
        found = Counter[str]()
        for name in self.mesh.names:
            for event in self.mesh.logs(name):
                if event.get("level") in _SERIOUS or "exception" in event:
                    found[f"{name} logged {event['event']}: {str(event.get('exception', event))[-600:]}"] += 1
            text = (self.mesh.folder / f"{name}.log").read_text(errors="replace")
            if "\nTraceback " in text:
                found[f"{name}: {text[text.index('Traceback ') :][:1500]}"] += 1
        return [f"{n} x {line}" for line, n in found.items()]

    def _log_lines(self) -> Counter[str]:
        return Counter(f"{name} {event['event']}" for name in self.mesh.names for event in self.mesh.logs(name))

    def report(self) -> str:
        """For people; while the mesh is there."""
        lines = [f"log lines, of {self._log_lines().total()}: {dict(self._log_lines().most_common(8))}"]
        lines += [f"sent: {dict(self.counts)}", f"answers: {dict(self.answers.most_common(30))}"]
        lines += [
            f"{name}: {' -> '.join(f'{mib:.1f}' for mib in taken)} MiB" for name, taken in self.memory_mib.items()
        ]
        return "\n".join(lines)


class _Telling:
    """A context: what the mesh does not answer in it is a violation, and names the place."""

    def __init__(self, run: FuzzRun, where: str) -> None:
        self._run = run
        self._where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, AssertionError | clients.NoAnswer | OSError):
            return False
        self._run.violations.append(f"{self._where}: {type(error).__name__}: {error}")
        return True


def fuzz_mesh(folder: Path) -> Mesh:
    """Not started yet. Its gateway keeps context caches in *folder*."""
    return Mesh(flags={"gateway": [f"--cache-db={folder / 'caches.sqlite'}"], "messenger": ["--transport=tcp"]})


def _fuzz_for(run: FuzzRun, minutes: float, schemathesis: str | None) -> None:
    """Rounds until the time is over or something is wrong."""
    began_s = time.monotonic()
    run.begin()
    for number in itertools.count():
        spent = (time.monotonic() - began_s) / (60.0 * minutes)
        if spent >= 1.0 or run.violations:
            return
        run.round(number)
        if spent > _WARM_UP and not run.memory_mib:
            if schemathesis is not None:
                run.schemathesis(schemathesis, minutes)
            run.take_memory()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="default %(default)g")
    parser.add_argument("--seed", default=str(random.randrange(10**6)))
    parser.add_argument("--schemathesis", metavar="PROGRAM", help="where it is installed (pip install schemathesis)")
    parser.add_argument("--growth-mib", type=float, default=GROWTH_MIB, help="most per process (default %(default)g)")
    arguments = parser.parse_args()
    print(f"bench.fuzz --minutes {arguments.minutes:g} --seed {arguments.seed}", flush=True)
    with ForkServer() as server, tempfile.TemporaryDirectory(prefix="mm-fuzz-", dir="/tmp") as folder:
        Mesh.fork_servers["fake"] = server
        with fuzz_mesh(Path(folder)) as mesh:
            run = FuzzRun(mesh, arguments.seed)
            _fuzz_for(run, arguments.minutes, arguments.schemathesis)
            run.end(growth_mib=arguments.growth_mib)
            print(run.report())
    for violation in run.violations:
        print(f"VIOLATION {violation}")
    print(f"fuzz {'FAILED' if run.violations else 'passed'}: {len(run.violations)} violations, seed {arguments.seed}")
    return 1 if run.violations else 0


if __name__ == "__main__":
    sys.exit(main())
