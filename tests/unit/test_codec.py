"""What the codec refuses, and that it names the place."""

import ast
import dataclasses
import enum
import json
import math
from pathlib import Path
from typing import Any

import pytest

from mooncake_proto import codec
from mooncake_proto.client import GenerationDelta
from mooncake_proto.codec import decode, encode, message
from mooncake_proto.control import Failure, Load, Member, ModelCard, Register, Role
from mooncake_proto.envelope import MAX_FRAMES, MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, VERSION_FRAME
from mooncake_proto.errors import MalformedMessage, UnknownKind, VersionMismatch, WireError
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.kvcache import KvChange, KvEvent, KvEvents
from mooncake_proto.serving import (
    DecodeJob,
    FirstToken,
    Sampling,
    Schedule,
    Stopping,
    TokenBatch,
    TokenEntry,
    TokenLogprob,
)
from mooncake_proto.transfer import Acquired, Grown

MEMBER = Member(
    role=Role.PREFILL,
    instance_id=InstanceId("prefill-0"),
    node_id=NodeId("node-a"),
    incarnation=Incarnation("0011223344556677"),
    endpoint="tcp://127.0.0.1:5000",
    model=ModelCard(
        name="m", fingerprint="f", dtype="float32", block_tokens=16, block_bytes=4096, max_context_tokens=128
    ),
)
REGISTER = Register(member=MEMBER, load=Load())
BATCH = TokenBatch(
    instance_id=InstanceId("decode-0"),
    entries=tuple(
        TokenEntry(
            job_id=JobId(f"j{i}"), position=i, token=i, logprob=TokenLogprob(logprob=-1.0, top=((i, -1.0), (9, -2.0)))
        )
        for i in range(4)
    ),
)
SCHEDULE = Schedule(job_id=JobId("j"), model="m", prompt_tokens=3, max_new_tokens=4, keys=b"")
JOB = DecodeJob(
    job_id=JobId("j"),
    transfer_id=TransferId("t"),
    incarnation=Incarnation("i"),
    tokens=b"\1\0\0\0" * 3,
    keys=b"k" * 32,
    key_root=b"r" * 16,
    sampling=Sampling(),
    stopping=Stopping(max_new_tokens=4),
    drawn_tokens=0,
    stream_endpoint="tcp://127.0.0.1:1",
    deadline_s=1.0,
)
FIRST = FirstToken(job_id=JobId("j"), position=0, token=1, cached_tokens=0, prefill_s=0.1, queue_s=0.0)
EVENTS = KvEvents(
    node_id=NodeId("n"),
    incarnation=Incarnation("i"),
    first_seq=1,
    events=(KvEvent(change=KvChange.STORED, key="0f" * 16),),
)

DELETED = object()


def changed(body: object, path: list[str | int], value: object) -> list[bytes]:
    """Frames of *body* with the JSON value at *path* in its header's body replaced, or deleted."""
    frames = encode(body)
    header = json.loads(frames[2])
    place: Any = header["body"]
    for step in path[:-1]:
        place = place[step]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    frames[2] = json.dumps(header).encode()
    return frames


@pytest.mark.parametrize(
    ("body", "steps", "value", "path", "text"),
    [
        # missing
        (REGISTER, ["member"], DELETED, "member", "missing"),
        (REGISTER, ["member", "model", "block_tokens"], DELETED, "member.model.block_tokens", "missing"),
        (BATCH, ["entries", 3, "token"], DELETED, "entries[3].token", "missing"),
        # wrong type
        (REGISTER, ["member"], None, "member", "expected an object, got null"),
        (REGISTER, ["member"], [], "member", "expected an object, got list"),
        (REGISTER, ["member", "endpoint"], 5, "member.endpoint", "expected str, got int"),
        (REGISTER, ["member", "model", "block_tokens"], "16", "member.model.block_tokens", "expected int, got str"),
        (REGISTER, ["member", "model", "block_tokens"], 16.0, "member.model.block_tokens", "expected int, got float"),
        (REGISTER, ["member", "model", "block_tokens"], True, "member.model.block_tokens", "expected int, got bool"),
        (BATCH, ["entries"], {}, "entries", "expected a list, got dict"),
        (BATCH, ["entries"], "abc", "entries", "expected a list, got str"),
        (BATCH, ["entries", 3, "token"], None, "entries[3].token", "expected int, got null"),
        (BATCH, ["entries", 1], 7, "entries[1]", "expected an object, got int"),
        (BATCH, ["entries", 2, "logprob", "logprob"], False, "entries[2].logprob.logprob", "expected float, got bool"),
        (BATCH, ["entries", 2, "logprob", "top", 1], [1], "entries[2].logprob.top[1]", "expected a list of 2"),
        (
            BATCH,
            ["entries", 2, "logprob", "top", 1],
            [1, "x"],
            "entries[2].logprob.top[1][1]",
            "expected float, got str",
        ),
        (FIRST, ["prefill_s"], "1", "prefill_s", "expected float, got str"),
        (JOB, ["stopping", "stop_token_ids"], [1, 2, "x"], "stopping.stop_token_ids[2]", "expected int, got str"),
        (Grown(blocks={"a": (1,)}), ["blocks", "b"], "x", "blocks.b", "expected a list, got str"),
        (Grown(blocks={"a": (1,)}), ["blocks"], [], "blocks", "expected an object, got list"),
        (Failure(code="c", message="m"), ["retryable"], 1, "retryable", "expected bool, got int"),
        # not one of the words
        (
            REGISTER,
            ["member", "role"],
            "king",
            "member.role",
            "expected one of gateway, conductor, prefill, decode, messenger, stage, got 'king'",
        ),
        (FIRST, ["finish"], 1, "finish", "expected one of stop, length, cancelled, got int"),
        # out of range
        (BATCH, ["entries", 0, "token"], -1, "entries[0].token", "expected 0 to 2**63-1, got -1"),
        (BATCH, ["entries", 0, "token"], 2**63, "entries[0].token", f"expected 0 to 2**63-1, got {2**63}"),
        (BATCH, ["entries", 0, "token"], 2**64, "entries[0].token", "expected int, got float"),
        (JOB, ["sampling", "seed"], 2**64, "sampling.seed", "expected int, got float"),
        (
            Acquired(job_id=JobId("j"), blocks=(1, 2), cached_blocks=0),
            ["blocks", 1],
            -1,
            "blocks[1]",
            "expected 0 to 2**63-1, got -1",
        ),
        (EVENTS, ["events", 0, "key"], "0f", "events[0].key", "expected 32 hex digits"),
        (EVENTS, ["events", 0, "key"], "0g" * 16, "events[0].key", "expected 32 hex digits"),
        # a rule of the class
        (JOB, ["stopping", "max_new_tokens"], 0, "stopping", "max_new_tokens must be at least 1, got 0"),
        (SCHEDULE, ["prompt_tokens"], 0, "prompt_tokens", "expected 1 to 2**63-1, got 0"),
        # a payload field is no JSON
        (JOB, ["key_root"], "text", None, None),
    ],
)
def test_a_bad_field_is_named(
    body: object, steps: list[str | int], value: object, path: str | None, text: str | None
) -> None:
    frames = changed(body, steps, value)
    if path is None:  # the frame of the same name wins
        assert decode(frames)[1] == body
        return
    with pytest.raises(MalformedMessage) as refusal:
        decode(frames)
    assert refusal.value.path == path
    assert str(refusal.value) == f"{path}: {text}"


def test_an_int_is_welcome_where_a_float_is_due() -> None:
    [_, decoded] = decode(changed(FIRST, ["prefill_s"], 2))
    assert decoded.prefill_s == 2.0
    assert type(decoded.prefill_s) is float


def test_fields_of_a_newer_peer_are_ignored() -> None:
    assert decode(changed(REGISTER, ["colour"], "blue"))[1] == REGISTER
    assert decode(changed(REGISTER, ["member", "model", "colour"], {"deep": [1]}))[1] == REGISTER
    assert decode(changed(BATCH, ["entries", 3, "colour"], None))[1] == BATCH


def test_absent_fields_take_their_defaults() -> None:
    assert decode(changed(JOB, ["sampling"], {}))[1] == JOB
    assert decode(changed(REGISTER, ["member", "model"], DELETED))[1].member.model is None


# --- frames -----------------------------------------------------------------------------------------------------------


def reframed(names: list[object], frames: list[bytes]) -> list[bytes]:
    """JOB with other payload frames under other names."""
    base = encode(JOB)
    header = json.loads(base[2])
    header["frames"] = names
    return [*base[:2], json.dumps(header).encode(), *frames]


def test_payload_frames_are_named_not_positional() -> None:
    frames = reframed(["key_root", "tokens", "keys"], [JOB.key_root, JOB.tokens, JOB.keys])
    assert decode(frames)[1] == JOB


def test_payload_frames_of_a_newer_peer_are_ignored() -> None:
    frames = reframed(["tokens", "hue", "keys", "key_root"], [JOB.tokens, b"?", JOB.keys, JOB.key_root])
    assert decode(frames)[1] == JOB


@pytest.mark.parametrize(
    ("names", "payload", "path", "text"),
    [
        (["tokens", "keys"], [b"", b""], "key_root", "missing"),
        (["tokens", "keys", "key_root"], [b"", b""], "frames", "does not name the 2 payload frames"),
        (["tokens", "keys"], [b"", b"", b""], "frames", "does not name the 3 payload frames"),
        (["tokens", "tokens", "keys", "key_root"], [b""] * 4, "frames", "names a payload frame twice"),
        ([["tokens"], "keys", "key_root"], [b""] * 3, "tokens", "missing"),
        (["job_id", "tokens", "keys", "key_root"], [b"x", b"", b"", b"r" * 16], None, None),
        (["tokens", "keys", "key_root"], [b"123", b"", b"r" * 16], "tokens", "3 bytes are no multiple of 4"),
        (["tokens", "keys", "key_root"], [b"", b"k" * 17, b"r" * 16], "keys", "17 bytes are no multiple of 16"),
        (["tokens", "keys", "key_root"], [b"", b"", b""], "key_root", "expected 16 bytes, got 0"),
    ],
)
def test_payload_frames_are_checked(
    names: list[object], payload: list[bytes], path: str | None, text: str | None
) -> None:
    frames = reframed(names, payload)
    if path is None:  # a frame cannot replace a field that travels in the header
        assert decode(frames)[1].job_id == JOB.job_id
        return
    with pytest.raises(MalformedMessage) as refusal:
        decode(frames)
    assert str(refusal.value) == f"{path}: {text}"


@pytest.mark.parametrize("names", [None, "tokens", 3, {"tokens": 0}])
def test_frame_names_must_be_a_list(names: object) -> None:
    base = encode(JOB)
    header = json.loads(base[2]) | {"frames": names}
    with pytest.raises(MalformedMessage, match=r"^frames: does not name the 3 payload frames$"):
        decode([*base[:2], json.dumps(header).encode(), *base[3:]])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_truncated_messages(count: int) -> None:
    with pytest.raises(MalformedMessage, match=f"^expected at least 3 frames, got {count}$"):
        decode(encode(JOB)[:count])


def test_a_lost_payload_frame() -> None:
    with pytest.raises(MalformedMessage, match=r"^frames: does not name the 2 payload frames$"):
        decode(encode(JOB)[:-1])


def test_too_many_frames() -> None:
    with pytest.raises(MalformedMessage, match="exceed the limit"):
        decode([*encode(REGISTER), *[b""] * MAX_FRAMES])


@pytest.mark.parametrize("version", [b"", b"mooncake/2", b"mooncake/10", b"MOONCAKE/1", b"\xff" * 100])
def test_another_version(version: bytes) -> None:
    with pytest.raises(VersionMismatch, match="this process b'mooncake/1'"):
        decode([version, *encode(REGISTER)[1:]])


@pytest.mark.parametrize("kind", [b"", b"control.sing", b"Register", b"control.register ", b"x" * 1000])
def test_an_unknown_kind(kind: bytes) -> None:
    frames = encode(REGISTER)
    with pytest.raises(UnknownKind):
        decode([frames[0], kind, frames[2]])


@pytest.mark.parametrize(
    ("header", "path"),
    [
        (b"", "header"),
        (b"[]", "header"),
        (b"null", "header"),
        (b'{"body": {}', "header"),
        (b'{"body": {"a": NaN}}', "header"),
        (b'{"body": {"a": 1e999}}', "header"),
        (b'{"body": {"a": "\\ud800"}}', "header"),
        (b'{"body": {"a": "\xff"}}', "header"),
        (b'{"body": ' + b"[" * 100_000, "header"),
        (b"{}", "body"),
        (b'{"body": null}', "body"),
        (b'{"body": []}', "body"),
        (b'{"body": "x"}', "body"),
    ],
)
def test_a_bad_header(header: bytes, path: str) -> None:
    with pytest.raises(MalformedMessage) as refusal:
        decode([VERSION_FRAME, b"control.ping", header])
    assert refusal.value.path == path


@pytest.mark.parametrize("where", [["member", "role"], ["member", "endpoint"], ["member"]])
def test_nesting_as_deep_as_the_parser_takes_is_refused_not_overflowed(where: list[str | int]) -> None:
    frames = changed(REGISTER, where, "DEEP")
    frames[2] = frames[2].replace(b'"DEEP"', b"[" * 1000 + b"]" * 1000)  # the parser's own limit is 1024
    with pytest.raises(MalformedMessage) as refusal:
        decode(frames)
    assert refusal.value.path == ".".join(map(str, where))


def test_sizes_are_bounded_on_both_sides() -> None:
    with pytest.raises(MalformedMessage, match=r"^header: "):
        decode([VERSION_FRAME, b"control.ping", b" " * (MAX_HEADER_BYTES + 1)])
    with pytest.raises(MalformedMessage, match=r"^header: "):
        encode(Failure(code="c", message="m" * MAX_HEADER_BYTES))
    with pytest.raises(MalformedMessage, match=r"^frames: "):
        encode(GenerationDelta(chunk=bytes(MAX_PAYLOAD_BYTES + 1)))


# --- sending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "build",
    [
        lambda x: Failure(code="c", message="m", retry_after_s=x),
        lambda x: dataclasses.replace(FIRST, queue_s=x),
        lambda x: dataclasses.replace(BATCH, entries=(*BATCH.entries, _entry(logprob=x, top=()))),
        lambda x: dataclasses.replace(BATCH, entries=(*BATCH.entries, _entry(logprob=0.0, top=((1, 0.0), (2, x))))),
    ],
)
def test_a_float_that_json_lacks_is_not_sent_as_null(build: Any, value: float) -> None:
    with pytest.raises(MalformedMessage, match="not finite"):
        encode(build(value))


def _entry(*, logprob: float, top: tuple[tuple[int, float], ...]) -> TokenEntry:
    return TokenEntry(job_id=JobId("j"), position=0, token=0, logprob=TokenLogprob(logprob=logprob, top=top))


def test_only_messages_can_be_sent() -> None:
    with pytest.raises(TypeError, match="ModelCard is not a wire message"):
        encode(MEMBER.model)


# --- registering ------------------------------------------------------------------------------------------------------


class Number(enum.Enum):
    ONE = 1


@pytest.mark.parametrize(
    "hint", [object, list[int], set[str], dict[int, str], int | str, int | str | None, Number, complex, tuple[object]]
)
def test_a_type_that_cannot_travel_is_refused_at_import(hint: Any) -> None:
    cls = dataclasses.make_dataclass("Bad", [("field", hint)], frozen=True, slots=True, kw_only=True)
    with pytest.raises(TypeError, match="travel"):
        message("test.bad")(cls)
    assert "test.bad" not in codec.kinds()


def test_a_class_without_slots_is_refused() -> None:
    cls = dataclasses.make_dataclass("Bad", [("field", int)], frozen=True)
    with pytest.raises(TypeError, match="slots"):
        message("test.bad")(cls)


def test_a_kind_has_one_class() -> None:
    with pytest.raises(ValueError, match=r"kind 'control\.ping' is registered twice"):
        message("control.ping")(Member)


def test_every_error_of_the_wire_is_one_tree() -> None:
    assert all(issubclass(error, WireError) for error in (MalformedMessage, UnknownKind, VersionMismatch))
    assert len({error.code for error in (WireError, MalformedMessage, UnknownKind, VersionMismatch)}) == 4


# --- the whole tree ---------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}


def test_nothing_in_the_tree_can_run_code_from_bytes() -> None:
    sources = [path for root in ("proto", "services", "bench") for path in (ROOT / root).rglob("*.py")]
    assert len(sources) > 20
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(), str(source))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Attribute):  # sock.send_pyobj and recv_pyobj pickle
                names = [node.attr.removeprefix("send_").removeprefix("recv_").replace("pyobj", "pickle")]
            assert not CODE_FROM_BYTES.intersection(name.split(".")[0] for name in names), (
                f"{source}: {ast.unparse(node)}"
            )
