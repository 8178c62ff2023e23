"""What a conductor heard and decided, kept in a file, and the same again from that file.

A recording is text: first a line about the conductor, then one line for each event in the order in which the core was
told of it: the time, the message as it would travel (base64 of its frames; none when only time passed), and the digest
of all answers so far. A core that is told the same gives the same answers, in any process.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import TextIOBase
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from mooncake_mesh.conductor.core import ConductorCore, Incompatible
from mooncake_mesh.kv.event_stream import FeedRefused
from mooncake_mesh.mesh.peers import PeerEvent
from mooncake_proto import codec
from mooncake_proto.control import Goodbye, Heartbeat, Load, Member, Register
from mooncake_proto.ids import Incarnation, InstanceId
from mooncake_proto.kvcache import KvEvents, KvEventsAck, KvSnapshot
from mooncake_proto.serving import Outcomes, Placement, Rejected, Schedule

FORMAT: Final = "mooncake-mesh/recording/1"


class BadRecording(ValueError):
    """A file that is no recording, or not a whole one up to its last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One event; *message* None: time passed. *digest* is that of all answers up to this one."""

    now_s: float
    message: object | None
    digest: str


class Recording:
    """A recording that is being written."""

    def __init__(self, file: TextIOBase, about: Mapping[str, Any]) -> None:
        self._file = file
        self._answers = hashlib.sha256()
        self._write({"format": FORMAT, **about})

    def note(self, now_s: float, message: object | None, answer: object) -> None:
        """*message* was answered by *answer* at *now_s*."""
        self._answers.update(repr(answer).encode())
        frames = [] if message is None else [base64.b64encode(frame).decode() for frame in codec.encode(message)]
        self._write({"s": now_s, "frames": frames, "digest": self._answers.hexdigest()})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class RecordedCore(ConductorCore):
    """A core that notes what it is told and what it answers. Its owner takes its orders after each placement."""

    def __init__(self, recording: Recording, **given: Any) -> None:
        super().__init__(**given)
        self._recording = recording
        self._now_s = self._started_s

    def register(self, member: Member, load: Load, now_s: float) -> list[PeerEvent] | Incompatible:
        answer = super().register(member, load, now_s)
        self._note(now_s, Register(member=member, load=load), answer)
        return answer

    def heartbeat(
        self, instance_id: InstanceId, incarnation: Incarnation, load: Load, now_s: float
    ) -> list[PeerEvent] | None:
        answer = super().heartbeat(instance_id, incarnation, load, now_s)
        self._note(now_s, Heartbeat(instance_id=instance_id, incarnation=incarnation, load=load), answer)
        return answer

    def goodbye(self, instance_id: InstanceId, incarnation: Incarnation) -> list[PeerEvent]:
        answer = super().goodbye(instance_id, incarnation)
        self._note(self._now_s, Goodbye(instance_id=instance_id, incarnation=incarnation), answer)
        return answer

    def expire(self, now_s: float) -> list[PeerEvent]:
        answer = super().expire(now_s)
        self._note(now_s, None, answer)
        return answer

    def kv_events(self, batch: KvEvents) -> KvEventsAck | FeedRefused | None:
        answer = super().kv_events(batch)
        self._note(self._now_s, batch, answer)
        return answer

    def kv_snapshot(self, snapshot: KvSnapshot) -> KvEventsAck | FeedRefused | None:
        answer = super().kv_snapshot(snapshot)
        self._note(self._now_s, snapshot, answer)
        return answer

    def schedule(self, request: Schedule, now_s: float) -> Placement | Rejected:
        answer = super().schedule(request, now_s)
        self._note(now_s, request, answer)
        return answer

    def outcomes(self, batch: Outcomes, now_s: float) -> None:
        super().outcomes(batch, now_s)
        self._note(now_s, batch, None)

    def _note(self, now_s: float, message: object | None, answer: object) -> None:
        self._now_s = now_s
        self._recording.note(now_s, message, answer)


class OpenRecording:
    """The file of a recording, for the length of a ``with`` block."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._file = path.open("w")
        self.recording = Recording(self._file, about)

    def __enter__(self) -> Recording:
        return self.recording

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def about(path: Path) -> dict[str, Any]:
    """The first line of a recording. Raises BadRecording for another file."""
    with path.open() as file:
        try:
            line = json.loads(file.readline())
        except json.JSONDecodeError as error:
            raise BadRecording(f"{path}: {error}") from error
    if not isinstance(line, dict) or line.get("format") != FORMAT:
        raise BadRecording(f"{path}: expected a recording of format {FORMAT!r}")
    return line


def events(path: Path) -> Iterator[Recorded]:
    """The events of a recording. A last line that was cut off, as a killed process leaves it, is left out."""
    with path.open() as file:
        file.readline()
        for line in file:
            if not line.endswith("\n"):
                return
            known = json.loads(line)
            frames = [base64.b64decode(frame) for frame in known["frames"]]
            message = codec.decode(frames)[1] if frames else None
            yield Recorded(now_s=known["s"], message=message, digest=known["digest"])


def replayed(path: Path, core: ConductorCore) -> Iterator[tuple[Recorded, object]]:
    """Each event with what *core* answers to it. ValueErrors as in :func:`events`."""
    for event in events(path):
        yield event, _answer(core, event)


def _answer(core: ConductorCore, event: Recorded) -> object:
    match event.message:
        case None:
            return core.expire(event.now_s)
        case Register(member=member, load=load):
            return core.register(member, load, event.now_s)
        case Heartbeat() as beat:
            return core.heartbeat(beat.instance_id, beat.incarnation, beat.load, event.now_s)
        case Goodbye() as goodbye:
            return core.goodbye(goodbye.instance_id, goodbye.incarnation)
        case KvEvents() as batch:
            return core.kv_events(batch)
        case KvSnapshot() as snapshot:
            return core.kv_snapshot(snapshot)
        case Schedule() as request:
            answer = core.schedule(request, event.now_s)
            core.orders.take()
            return answer
        case Outcomes() as batch:
            core.outcomes(batch, event.now_s)
            return None
        case other:
            raise BadRecording(f"{type(other).__name__} is nothing that a conductor is told")
