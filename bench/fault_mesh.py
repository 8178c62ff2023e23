"""A mesh of fake engines with a spare for every worker, its requests, and the books that must be even after a fault.

::

    node0: prefill0   node1: prefill1   node2: decode0   node3: decode1      each with its messenger
    one conductor, one gateway

Chunks and steps take long enough that whoever watches the logs can act within one.
"""

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mooncake_mesh.engine.fake import expected_tokens
from mooncake_mesh.gateway.tokenizer import ByteTokenizer, SpecialTokens
from mooncake_mesh.kv.block_hash import chain, join_keys, key_root, token_bytes
from mooncake_proto import codec
from mooncake_proto.control import Health, MemberState, Ping, Role
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import BlockKey, MessageId
from mooncake_proto.serving import Sampling
from mooncake_proto.transfer import Replicate
from tests.mesh import clients
from tests.mesh.clients import FAKE, Stream
from tests.mesh.harness import Mesh, held

SETTLE_S: Final = 2.0
MAX_BATCH: Final = 4
CHUNK_TOKENS: Final = 64
LEASES: Final = ("--suspect-after-s=1.5", "--dead-after-s=3")
"""As a conductor has them by default: they are a part of what is measured. Those of a test's mesh are longer."""
FLAGS: Final = {
    "conductor": ["--ttft-slo-s=600", "--tbt-slo-s=60", "--replication-share=0", *LEASES],
    "prefill": ["--fake-prefill-s-base=0.12", f"--chunk-tokens={CHUNK_TOKENS}", "--log-level=debug"],
    "decode": ["--fake-decode-s-base=0.03", f"--max-batch={MAX_BATCH}"],
}
_NODES: Final = {"prefill0": 0, "prefill1": 1, "decode0": 2, "decode1": 3}
_MOST_BURSTS: Final = 15
_MOST_AT_ONCE: Final = 6
_COPY_DESCRIPTORS: Final = 4  # of a copy that was declined, as another one was under way
_PAIR_DESCRIPTORS: Final = 6
_SOURCE_DESCRIPTORS: Final = 12
_UNCONNECTED_DESCRIPTORS: Final = _COPY_DESCRIPTORS + 4 * (_PAIR_DESCRIPTORS + _SOURCE_DESCRIPTORS)
_LOOK_EVERY_S: Final = 0.1
_RUNNING: Final = re.compile(r"^mooncake_requests_running (\d+)", re.MULTILINE)


def fault_mesh(flags: Mapping[str, Sequence[str]] = FLAGS) -> Mesh:
    """Not started yet: a context manager."""
    return Mesh(prefill_nodes=(0, 1), decode_nodes=(2, 3), flags=flags)


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Ask:
    """One streamed request: greedy where *seed* is None. Its *answer* is that of the fake engine unless given."""

    prompt: str
    max_tokens: int
    seed: int | None = None
    answer: str | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    stream: Stream | None = None

    def start(self, base: str) -> "Ask":
        """Send it to the gateway at *base*, an http URL."""
        fields: dict[str, Any] = dict(self.more)
        if self.seed is not None:
            fields |= {"temperature": 0.8, "seed": self.seed}
        self.stream = Stream(base, self.prompt, self.max_tokens, fields)
        self.stream.__enter__()
        return self

    @property
    def opened(self) -> Stream:
        assert self.stream is not None, "start first"
        return self.stream

    def keys(self, mesh: Mesh) -> list[BlockKey]:
        """Of the whole blocks of the prompt and the answer."""
        card = mesh.member("prefill0").model
        assert card is not None, "a worker has a model"
        root = key_root(
            fingerprint=card.fingerprint,
            dtype=card.dtype,
            block_tokens=card.block_tokens,
            block_bytes=card.block_bytes,
            tenant="",
            cache_salt="",
        )
        tokens = ByteTokenizer().encode(self.prompt + self.opened.text, SpecialTokens.ADD)
        return chain(root, token_bytes(tokens[:-1]), card.block_tokens)

    def expected(self) -> str:
        """What an undisturbed mesh answers."""
        if self.answer is not None:
            return self.answer
        tokenizer = ByteTokenizer()
        sampling = None if self.seed is None else Sampling(temperature=0.8, seed=self.seed)
        prompt = tokenizer.encode(self.prompt, SpecialTokens.ADD)
        return tokenizer.decode(expected_tokens(FAKE, prompt, self.max_tokens, sampling=sampling))

    def end(self, *, timeout_s: float) -> "End":
        """Wait for the end of the stream and judge it."""
        stream = self.opened
        try:
            stream.wait_over(timeout_s=timeout_s)
        except AssertionError as late:
            stream.disconnect()
            return End(kind="hung", detail=str(late))
        terminals = len(stream.finish_reasons) + len(stream.errors)
        if stream.broken or terminals == 0:
            kind = "cut" if stream.done_marks == 0 and terminals == 0 else "wrong"
            return End(kind=kind, detail=stream.broken or "the stream ended without a word")
        if terminals > 1 or (stream.status == 200 and stream.done_marks != 1):
            return End(kind="wrong", detail=f"{terminals} terminal messages, {stream.done_marks} [DONE]")
        if stream.errors:
            error = stream.errors[0]
            return End(kind="refused", detail=f"{stream.status} {error.get('code')}: {error.get('message')}"[:120])
        if stream.text != self.expected():
            return End(kind="wrong", detail=f"{stream.text!r} instead of {self.expected()!r}")
        return End(kind="finished", detail="")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a request ended: ``finished`` with the very output, ``refused`` with one error, ``cut`` off with its gateway,
    or ``wrong`` or ``hung``, which never may be."""

    kind: str
    detail: str


def placements(mesh: Mesh) -> list[dict[str, Any]]:
    """What the conductor's current life placed, oldest first."""
    return [event for event in mesh.logs("conductor") if event["event"] == "request_placed"]


def keep_logs(mesh: Mesh, folder: Path) -> None:
    """Copy the log of every process of *mesh* into *folder*, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for log in mesh.folder.glob("*.log"):
        shutil.copy(log, folder)


def requests_running(mesh: Mesh) -> int:
    """Requests in flight at the gateway."""
    found = _RUNNING.search(clients.get(mesh.http, "/metrics").body.decode())
    assert found is not None, "the gateway counts its requests"
    return int(found[1])


# --- the books --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Books:
    """What a mesh at rest holds: taken once when every process has talked to every other, compared after each fault.

    A restarted process makes its connections when it first needs them, so it may have fewer descriptors than at first,
    and never more.
    """

    mesh: Mesh
    settle_s: float = SETTLE_S
    blocks: dict[str, int] = field(default_factory=dict)
    members: frozenset[str] = frozenset()
    descriptors: dict[str, int] = field(default_factory=dict)

    def open(self) -> None:
        """Have every prefill instance work with every decode instance, then note what is held."""
        self.note(self._connect_all())

    def note(self, spare: int = _UNCONNECTED_DESCRIPTORS) -> None:
        """Note what is held, and that every process may have *spare* descriptors more."""
        report = self.mesh.wait_idle()
        self.blocks = dict(_blocks(report.cluster.members))
        self.members = frozenset(str(state.member.instance_id) for state in report.cluster.members)
        self.descriptors = {name: _descriptors(self.mesh.pid(name)) + spare for name in self.mesh.names}

    def differences(self, since_s: float) -> list[str]:
        """What is not as at the start ``settle_s`` after *since_s* (monotonic), or later if asked later; in words."""
        try:
            self.mesh.wait_healthy()
        except AssertionError as ill:
            return [str(ill)]
        while True:
            found = self._differences()
            if not found or time.monotonic() > since_s + self.settle_s:
                return found
            time.sleep(_LOOK_EVERY_S)

    def _differences(self) -> list[str]:
        members = self.mesh.status().cluster.members
        found = [f"{state.member.instance_id} still has {held(state)}" for state in members if held(state)]
        blocks = dict(_blocks(members))
        if blocks != self.blocks:
            found.append(f"blocks {blocks}, at the start {self.blocks}")
        alive = {str(state.member.instance_id) for state in members if state.health is Health.ALIVE}
        if alive != self.members:
            found.append(f"leases {sorted(alive)}, at the start {sorted(self.members)}")
        for name in self.mesh.names:
            now = _descriptors(self.mesh.pid(name))
            if now > self.descriptors[name]:
                found.append(f"{name} has {now} descriptors, at the start {self.descriptors[name]}")
        running = requests_running(self.mesh)
        if running:
            found.append(f"the gateway counts {running} running requests")
        return found

    def close(self) -> list[str]:
        """As :meth:`differences`, when all have talked to all again: now nothing may hide a leak."""
        self._connect_all()
        return self.differences(time.monotonic())

    def _connect_all(self) -> int:
        """Requests on each pair of workers; and every messenger copies something from every other one.

        The conductor may never choose some pair: how many more descriptors a process may need for those.
        """
        pairs = {(prefill, decode) for prefill in ("prefill0", "prefill1") for decode in ("decode0", "decode1")}
        copied = {worker: False for pair in pairs for worker in pair}
        for burst in range(_MOST_BURSTS):
            asks = [
                self._placed(f"{time.monotonic_ns()} hello {number}") for number in range(1 + burst % _MOST_AT_ONCE)
            ]
            for ask, prefill, decode in asks:
                end = ask.end(timeout_s=40.0)
                assert end.kind == "finished", end
                pairs.discard((prefill, decode))
                for worker, n_blocks in ((prefill, 1), (decode, None)):  # the shorter prefix first: it is new
                    if not copied[worker]:
                        self._copy_to_all(ask.keys(self.mesh)[:n_blocks], _NODES[worker])
                        copied[worker] = True
            if not pairs and all(copied.values()):
                break
        return (
            _COPY_DESCRIPTORS
            + _PAIR_DESCRIPTORS * len(pairs)
            + _SOURCE_DESCRIPTORS * list(copied.values()).count(False)
        )

    def _placed(self, prompt: str) -> tuple[Ask, str, str]:
        """A request, and where it was placed."""
        before = len(placements(self.mesh))
        ask = Ask(prompt=prompt, max_tokens=32).start(self.mesh.http)
        event = self.mesh.wait(lambda: next(iter(placements(self.mesh)[before:]), None), what="a placement")
        return ask, event["prefill"], event["decode"]

    def _copy_to_all(self, keys: Sequence[BlockKey], source: int) -> None:
        """The order that the conductor gives for a hot prefix; where it is already, nothing happens."""
        order = Replicate(keys=join_keys(keys), source=self.mesh.endpoint(f"messenger{source}"))
        for node in _NODES.values():
            if node == source:
                continue
            with clients.dealer(self.mesh.endpoint(f"messenger{node}")) as plug:
                plug.send_multipart(codec.encode(order, Envelope()))
                plug.send_multipart(codec.encode(Ping(), Envelope(id=MessageId("1"))))
                clients.receive(plug, timeout_s=30.0)  # it has begun
        self.mesh.wait_idle()


def _blocks(members: Iterable[MemberState]) -> Iterable[tuple[str, int]]:
    for state in members:
        if state.member.role is Role.MESSENGER:
            yield str(state.member.instance_id), state.load.blocks_free + state.load.blocks_evictable


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def descriptor_table(pid: int) -> Sequence[str]:
    """What the descriptors of a process are, for people."""
    return sorted(os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
