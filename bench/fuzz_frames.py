"""Mutated messages for ZeroMQ sockets: from a message of every kind, with names that the mesh knows in some of them.

What a seed makes is the same each time, except for the names that a mesh draws anew.
"""

import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mooncake_proto import codec
from mooncake_proto.control import (
    Drain,
    Failure,
    Goodbye,
    MemberState,
    Ping,
    Pong,
    Register,
    Stop,
    SwitchRole,
)
from mooncake_proto.envelope import VERSION_FRAME, Envelope
from mooncake_proto.errors import UnknownKind, WireError
from mooncake_proto.ids import MessageId
from tests.golden.samples import sample
from tests.mesh import clients

JsonPlace = tuple[Any, Any]

ABSURD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**30),
    *(0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308),
    *(
        "",
        "\0",
        "x",
        "☾",
        "\ud83d",
        "nonsense",
        "ipc:///nowhere",
        "tcp://127.0.0.1:1",
        "../../etc/passwd",
        "a" * 10_000,
    ),
    *([], {}, [[]], [None], {"": None}, [1, "2", 3.5], ["x"] * 1000),
)
_LONGEST_ID: Final = 1 << 16
_OF_MEMBERS_ONLY: Final = frozenset(
    {"control.register", "control.goodbye", "control.stop", "control.drain", "control.switch_role"}
)
"""In the name of a living member these do what they say: it would be no fault that the member is gone then."""
_DEADLINE_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What messages may truthfully name: values by the name of the field they stand in."""

    values: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, members: Sequence[MemberState], *, tokens: str, model: str) -> "Names":
        """Of the *members* of a mesh whose gateway takes tokens at *tokens*."""
        endpoints = [state.member.endpoint for state in members]
        return cls(
            values={
                "incarnation": [state.member.incarnation for state in members],
                "instance_id": [state.member.instance_id for state in members],
                "node_id": [state.member.node_id for state in members],
                "target": endpoints,
                "source": endpoints,
                "fetch_from": endpoints,
                "stream_endpoint": [tokens],
                "model": [model],
            }
        )


class FrameMutator:
    """Messages without end; ``jobs`` are the ids of jobs that these named, as far as a message can name them."""

    def __init__(self, rng: random.Random, names: Names) -> None:
        self._rng = rng
        self._names = names
        self._samples = {kind: codec.encode(sample(cls), Envelope()) for kind, cls in sorted(codec.kinds().items())}
        self._kinds = list(self._samples)
        self.jobs: set[str] = set()

    def message(self, taken: Sequence[str]) -> list[bytes]:
        """The frames of one message, mostly of a kind in *taken*. About half are well-formed, and lie."""
        while self._is_order(frames := self._any_message(taken)):
            pass
        return frames

    def _is_order(self, frames: Sequence[bytes]) -> bool:
        """Whether a living member would do what it is told: a message may become one when only its kind is changed."""
        try:
            _, body = codec.decode(frames)
        except WireError:
            return False
        member = body.member if isinstance(body, Register) else body
        is_known = getattr(member, "incarnation", None) in self._names.values["incarnation"]
        return is_known and isinstance(body, Register | Goodbye | Stop | Drain | SwitchRole)

    def _any_message(self, taken: Sequence[str]) -> list[bytes]:
        rng = self._rng
        kind = rng.choice(taken if rng.random() < 0.85 else self._kinds)
        frames = list(self._samples[kind])
        header = json.loads(frames[2])
        header |= {"id": str(rng.randrange(1000)), "deadline_s": _DEADLINE_S}
        self._shorten_deadlines(header)
        if rng.random() < 0.6:
            self._name_truly(header["body"], kind)
        is_well_formed = rng.random() < 0.6
        for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
            if is_well_formed:
                self._lie(header["body"])
            else:
                self._mutate_value(header)
        frames[2] = json.dumps(header).encode(errors="surrogatepass")
        for _ in range(0 if is_well_formed else rng.choice((0, 0, 1, 2))):
            self._mutate_frames(frames)
        if is_well_formed and rng.random() < 0.3:
            frames[3:] = [rng.randbytes(len(frame) * rng.choice((0, 1, 2, 9))) for frame in frames[3:]]
        self._note_jobs(header.get("body"))
        return frames

    def _shorten_deadlines(self, tree: Any) -> None:
        for container, key in places(tree):
            if key == "deadline_s" and container[key] is not None:
                container[key] = _DEADLINE_S

    def _name_truly(self, body: Any, kind: str) -> None:
        for container, key in places(body):
            known = self._names.values.get(key) if isinstance(key, str) else None
            if known and isinstance(container[key], str) and not (key == "incarnation" and kind in _OF_MEMBERS_ONLY):
                container[key] = self._rng.choice(known)

    def _lie(self, body: Any) -> None:
        """Another value of the same type somewhere."""
        rng = self._rng
        found = [place for place in places(body) if place[1] not in ("incarnation", "deadline_s")]
        if not found:
            return
        container, key = rng.choice(found)
        match container[key]:
            case bool(old):
                container[key] = not old
            case int():
                container[key] = rng.choice((0, 1, 2, 3, 15, 16, 17, 64, 1000, 2**31, 2**32, 2**53, 2**62, 2**63 - 1))
            case float():
                container[key] = rng.choice((0.0, 0.5, 1e-9, 1e9, 1e300, -1.0))
            case str(old) if not old.isascii():  # a name: what is spelt in ASCII is one of a few words
                container[key] = rng.choice(("", "x", "ipc:///nowhere", "a" * 5000, "tcp://127.0.0.1:1", "decode0"))
            case list(old):
                container[key] = rng.choice(([], old * 40, old[::-1], old[:1]))
            case dict(old) if all(isinstance(name, str) and "-" in name for name in old):  # by names, no body
                container[key] = {name * 3: value for name, value in old.items()}

    def _mutate_value(self, header: dict[str, Any]) -> None:
        rng = self._rng
        found = list(places(header.get("body")))
        if not found or rng.random() < 0.05:
            header[rng.choice(("id", "re", "cause", "body", "frames", "deadline_s"))] = absurd(rng)
            return
        container, key = rng.choice(found)
        old = container[key]
        match rng.randrange(6):
            case 0:
                del container[key]
            case 1 if isinstance(old, int | float) and not isinstance(old, bool):
                container[key] = rng.choice((old + 1, old - 1, -old, old * 2**40, old / 3))
            case 2 if isinstance(old, str):
                container[key] = rng.choice((old * 100, old[1:], old.upper(), old + "\n"))
            case 3 if isinstance(old, list):
                container[key] = rng.choice((old * 50, old[::-1], [old], [*old, absurd(rng)]))
            case _:
                container[key] = absurd(rng)

    def _mutate_frames(self, frames: list[bytes]) -> None:
        rng = self._rng
        at = rng.randrange(len(frames))
        match rng.randrange(7):
            case 0:
                frames[at] = frames[at][: rng.randint(0, len(frames[at]))]
            case 1 if len(frames) > 1:
                del frames[at]
            case 2:
                frames.insert(at, frames[at])
            case 3 if frames[at]:
                changed = bytearray(frames[at])
                changed[rng.randrange(len(changed))] ^= rng.randint(1, 255)
                frames[at] = bytes(changed)
            case 4:
                frames[at] = rng.randbytes(rng.choice((0, 1, 16, 1024)))
            case 5 if len(frames) > 1:
                frames[1] = rng.choice(self._kinds).encode()
            case 6:
                frames[0] = rng.choice((VERSION_FRAME, b"mooncake/0", b"", b"\xff"))

    def _note_jobs(self, body: Any) -> None:
        for container, key in places(body):
            job_id = container[key]
            if key == "job_id" and isinstance(job_id, str) and job_id.isprintable() and len(job_id) < _LONGEST_ID:
                self.jobs.add(job_id)


def absurd(rng: random.Random) -> Any:
    """A value that hardly any field takes, and nobody else has."""
    return copy.deepcopy(rng.choice(ABSURD))


def places(tree: Any) -> Iterator[JsonPlace]:
    """Every value in *tree* as its container and its key there."""
    pairs = list(tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ())
    for key, value in pairs:
        yield tree, key
        yield from places(value)


def kinds_taken(endpoint: str) -> list[str]:
    """Kinds of message that the process at *endpoint* does not refuse as such. Raises NoAnswer."""
    taken = sorted(set(codec.kinds()) - {"control.cancel_call"})
    with clients.dealer(endpoint) as plug:
        for kind in list(taken):
            frames = codec.encode(sample(codec.kinds()[kind]), Envelope(id=MessageId(kind), deadline_s=_DEADLINE_S))
            plug.send_multipart(frames)
        plug.send_multipart(tagged(Ping(), 0))
        while True:
            envelope, answer = clients.receive(plug, timeout_s=10.0)
            if isinstance(answer, Pong) and envelope.re == "proper-0":
                return taken
            if isinstance(answer, Failure) and answer.code == UnknownKind.code:
                taken.remove(envelope.re)


def tagged(body: object, number: int) -> list[bytes]:
    """A proper message with an id of its own."""
    return codec.encode(body, Envelope(id=MessageId(f"proper-{number}"), deadline_s=5.0))
