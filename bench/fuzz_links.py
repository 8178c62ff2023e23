"""Mutated bytes where no ZeroMQ message goes: the messengers' data port and arena socket, and beneath ZeroMQ itself."""

import contextlib
import itertools
import random
import socket
import struct
from typing import Final

from bench.fuzz_frames import tagged
from mooncake_mesh.messenger.transports import link_auth
from mooncake_mesh.messenger.transports.frames import ENTRY, HEAD, HELLO, MAGIC, Carriage, Hello, Kind
from mooncake_proto.control import Ping, Pong
from mooncake_proto.ids import Incarnation, InstanceId, JobId, TransferId
from mooncake_proto.transfer import Acquire, ArenaInfo, Attach, OpenTransfer, Release, TransferPlan
from tests.mesh import clients
from tests.mesh.harness import Mesh

_LAYERS: Final = 2
_BLOCK_BYTES: Final = 2048
_PATIENCE_S: Final = 0.2
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
_READY: Final = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
_ARENA_HELLO: Final = struct.Struct("<64s16s")


class LinkFuzzer:
    """Connects to the transports of *receiver*, a messenger of *mesh*, with and without the secret of a link."""

    def __init__(self, mesh: Mesh, rng: random.Random, *, receiver: str, sender: str, worker: str) -> None:
        self._mesh = mesh
        self._rng = rng
        self._receiver = mesh.endpoint(receiver)
        self._port = int(mesh.wait_log(receiver, "arena_cut")["data_port"])
        self._arena = f"{mesh.folder}/{receiver}.arena"
        attach = Attach(instance_id=InstanceId("fuzz"), incarnation=Incarnation("f" * 16), block_bytes=_BLOCK_BYTES)
        self._source = clients.ask(mesh.endpoint(sender), attach, ArenaInfo)
        self._worker = InstanceId(worker)
        self._numbers = itertools.count()

    def strangers(self) -> None:
        """A few connections that prove nothing."""
        hello = HELLO.pack(MAGIC, self._rng.choice((0, 1, 9)), b"s" * 16, 1, self._rng.randrange(20), 1)
        for data in (self._damaged(hello + bytes(64)), self._rng.randbytes(200), self._damaged(self._frame(b"t" * 16))):
            _say(socket.create_connection(("127.0.0.1", self._port), timeout=5.0), data)
        _say(_unix(self._arena), self._damaged(_ARENA_HELLO.pack(b"fuzz", b"f" * 16)))

    def beneath_zeromq(self, endpoint: str) -> None:
        """Half a handshake, a whole one with damaged frames behind it."""
        sizes = (b"\x02" + struct.pack(">Q", self._rng.choice((2**63, 2**40, 5))), b"\x00\x05hello", b"\x04\x01\x05")
        frames = b"".join(self._rng.choice((*sizes, b"\x01\xff", b"\x00\x00", b"\xff")) for _ in range(5))
        greeted = _GREETING + _READY + frames
        _say(_unix(endpoint.removeprefix("ipc://")), greeted if self._rng.random() < 0.5 else self._damaged(greeted))

    def link(self) -> None:
        """Open a link as a sender does, and say damaged frames of a transfer that was really planned."""
        job_id, transfer_id = JobId(f"fuzz-link-{next(self._numbers)}"), TransferId(f"fuzz-{self._rng.random()}")
        acquire = Acquire(
            job_id=job_id,
            instance_id=self._worker,
            incarnation=Incarnation(self._mesh.incarnation(self._worker)),
            keys=b"",
            n_blocks=2,
            max_cached_blocks=0,
            landing=transfer_id,
            landing_blocks=2,
            landing_layers=_LAYERS,
        )
        with clients.dealer(self._receiver) as plug:
            plug.send_multipart(tagged(acquire, 1))
            plug.send_multipart(tagged(Ping(), 2))
            _, first = clients.receive(plug, timeout_s=5.0)
            if isinstance(first, Pong):
                open_it = OpenTransfer(transfer_id=transfer_id, source=self._source, transports=("tcp",))
                plan = clients.ask(self._receiver, open_it, TransferPlan)
                self._speak(plan)
        clients.ask(self._receiver, Release(job_id=job_id), object)

    def _speak(self, plan: TransferPlan) -> None:
        hello = Hello(
            kind=Kind.CONTROL, sender=self._rng.randbytes(16), epoch=1, lane=0, n_lanes=self._rng.choice((1, 2))
        )
        with socket.create_connection((plan.tcp_host, plan.tcp_port), timeout=5.0) as raw:
            challenge = raw.recv(link_auth.CHALLENGE_BYTES)
            answer = link_auth.answer(bytes.fromhex(plan.link_secret), challenge, hello)
            raw.sendall(answer.said)
            assert answer.is_welcome(raw.recv(link_auth.WELCOME_BYTES)), "who knows the secret is let in"
            for _ in range(self._rng.randrange(1, 6)):
                frame = self._frame(bytes.fromhex(plan.token))
                if not _tell(raw, frame if self._rng.random() < 0.3 else self._damaged(frame)):
                    break
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
            _drain(raw)

    def _frame(self, token: bytes) -> bytes:
        rng = self._rng
        n_slices = rng.choice((1, 1, 2, 512, 65535))
        size = rng.choice((_BLOCK_BYTES // _LAYERS, 1, 0, 2**32 - 1))
        carriage = rng.choice((Carriage.INLINE, Carriage.INLINE, Carriage.LANES, Carriage.MAPPED, 77))
        entry = ENTRY.pack(
            rng.choice((0, 1, 2, 2**31)), rng.choice((0, 1, 65535)), rng.choice((1, 2, 0)), size, rng.randrange(2), 7
        )
        total = min(size * min(n_slices, 2), 2**32 - 1)
        head = HEAD.pack(rng.choice((0, 1, 2, 2**32 - 1)), token, n_slices, carriage, total)
        return head + entry * min(n_slices, 512) + b"p" * min(total, 4096)

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._rng.choice((0, 1, 1, 3))):
            changed[self._rng.randrange(len(changed))] ^= self._rng.randint(1, 255)
        return bytes(changed[: self._rng.choice((len(changed), len(changed), self._rng.randrange(len(changed))))])


def _unix(path: str) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(5.0)
    raw.connect(path)
    return raw


def _say(raw: socket.socket, data: bytes) -> None:
    with raw:
        if _tell(raw, data):
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
            _drain(raw)


def _tell(raw: socket.socket, data: bytes) -> bool:
    """Whether the other end still listens."""
    try:
        raw.sendall(data)
    except OSError:
        return False
    return True


def _drain(raw: socket.socket) -> None:
    """Read what is said, and leave when that was all for a while."""
    raw.settimeout(_PATIENCE_S)
    with contextlib.suppress(OSError):
        while raw.recv(4096):
            pass
