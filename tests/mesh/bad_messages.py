"""Messages that every ZeroMQ socket of the mesh must refuse, as data.

``FRAMES`` break the wire contract itself, whatever socket they reach. ``FIELDS`` break the fields of one kind, on the
socket that takes this kind.
"""

import random
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from mooncake_proto import codec
from mooncake_proto.envelope import VERSION_FRAME, Envelope
from mooncake_proto.ids import MessageId

MALFORMED: Final = "malformed_message"
UNKNOWN_KIND: Final = "unknown_kind"
VERSION: Final = "version_mismatch"

_PICKLE_BOMB: Final = b"cposix\nsystem\n(S'touch /tmp/mooncake-was-here'\ntR."
_PING: Final = b"control.ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFrames:
    """Frames of one message without identity, and the Failure that answers them."""

    name: str
    frames: tuple[bytes, ...]
    code: str
    path: str = ""


def _frames(name: str, *frames: bytes, code: str = MALFORMED, path: str = "") -> BadFrames:
    return BadFrames(name=name, frames=frames, code=code, path=path)


def _header(name: str, header: bytes, path: str = "header") -> BadFrames:
    return _frames(name, VERSION_FRAME, _PING, header, path=path)


FRAMES: Final = (
    # frames
    _frames("empty message", b""),
    _frames("one frame", b"hello"),
    _frames("version alone", VERSION_FRAME),
    _frames("no header", VERSION_FRAME, _PING),
    _frames("three empty frames", b"", b"", b"", code=VERSION),
    _frames("17 frames", VERSION_FRAME, _PING, b'{"body": {}}', *[b""] * 14),
    _frames("200 empty frames", *[b""] * 200),
    # version
    _frames("next version", b"mooncake/2", _PING, b'{"id": "7", "body": {}}', code=VERSION),
    _frames("no version", b"mooncake", _PING, b'{"id": "7", "body": {}}', code=VERSION),
    _frames("version of 1 MiB", b"9" * (1 << 20), _PING, b'{"id": "7", "body": {}}', code=VERSION),
    _frames("an http request", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"", code=VERSION),
    # kind
    _frames("unknown kind", VERSION_FRAME, b"control.no_such", b'{"id": "7", "body": {}}', code=UNKNOWN_KIND),
    _frames("empty kind", VERSION_FRAME, b"", b'{"id": "7", "body": {}}', code=UNKNOWN_KIND),
    _frames("kind in capitals", VERSION_FRAME, b"CONTROL.PING", b'{"id": "7", "body": {}}', code=UNKNOWN_KIND),
    _frames("kind of 1 MiB", VERSION_FRAME, b"k" * (1 << 20), b'{"id": "7", "body": {}}', code=UNKNOWN_KIND),
    _frames("kind not utf-8", VERSION_FRAME, b"\xff\xfe", b'{"id": "7", "body": {}}', path="kind"),
    _frames("a kind that is only an answer", VERSION_FRAME, b"control.ok", b'{"body": {}}', code=UNKNOWN_KIND),
    _frames("pickle as kind", VERSION_FRAME, _PICKLE_BOMB, b'{"id": "7", "body": {}}', code=UNKNOWN_KIND),
    # header
    _header("empty header", b""),
    _header("header no json", b"hello"),
    _header("truncated header", b'{"id": "7", "body": {'),
    _header("header not utf-8", b'{"id": "\xff"}'),
    _header("header an array", b"[]"),
    _header("header null", b"null"),
    _header("header with NaN", b'{"id": "7", "deadline_s": NaN, "body": {}}'),
    _header("header nested 100000 deep", b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    _header("header of 9 MiB", b'{"body": {"pad": "' + b"x" * (9 << 20) + b'"}}'),
    _header("pickle as header", _PICKLE_BOMB),
    _header("nul bytes as header", b"\0" * 64),
    _header("id a number", b'{"id": 7, "body": {}}', "header.id"),
    _header("deadline a string", b'{"id": "7", "deadline_s": "soon", "body": {}}', "header.deadline_s"),
    # body
    _header("no body", b'{"id": "7"}', "body"),
    _header("body null", b'{"id": "7", "body": null}', "body"),
    _header("body a list", b'{"id": "7", "body": []}', "body"),
    # payload frames
    _frames("payload without a name", VERSION_FRAME, _PING, b'{"id": "7", "body": {}}', b"x", path="frames"),
    _frames("name without a payload", VERSION_FRAME, _PING, b'{"id": "7", "body": {}, "frames": ["x"]}', path="frames"),
    _frames("names no list", VERSION_FRAME, _PING, b'{"id": "7", "body": {}, "frames": "x"}', b"x", path="frames"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadField:
    """A message of *kind* to the socket named *to*, with header fields and payload that break its shape at *path*."""

    name: str
    to: str
    kind: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    payload: dict[str, bytes] = field(default_factory=dict)

    def frames(self) -> tuple[bytes, ...]:
        header = {"id": "7", "body": self.body, "frames": list(self.payload)}
        return (VERSION_FRAME, self.kind.encode(), orjson.dumps(header), *self.payload.values())


_SAMPLING: Final = {"temperature": 0.0}
_STOPPING: Final = {"max_new_tokens": 4}
_JOB: Final = {
    "job_id": "j",
    "transfer_id": "t",
    "incarnation": "i",
    "sampling": _SAMPLING,
    "stopping": _STOPPING,
    "drawn_tokens": 0,
    "stream_endpoint": "ipc:///nowhere",
    "deadline_s": 1.0,
}
_PREFILL: Final = {**_JOB, "decode": None}
_TOKENS: Final = {"tokens": b"\1\0\0\0", "keys": b""}
_DECODE_PAYLOAD: Final = {**_TOKENS, "key_root": b"\0" * 16}
_ACQUIRE: Final = {"job_id": "j", "instance_id": "i", "incarnation": "n", "n_blocks": 1, "max_cached_blocks": 0}
_SCHEDULE: Final = {"job_id": "j", "model": "fake", "prompt_tokens": 5, "max_new_tokens": 5}
_ENTRY: Final = {"job_id": "j", "position": 0, "token": 65}


def _field(name: str, to: str, kind: str, path: str, body: dict[str, Any], **payload: bytes) -> BadField:
    return BadField(name=name, to=to, kind=kind, path=path, body=body, payload=payload)


FIELDS: Final = (
    _field("operation unknown", "sdk", "client.generate", "operation", {"operation": "dance"}, request=b"{}"),
    _field("no operation", "sdk", "client.generate", "operation", {}, request=b"{}"),
    _field("no request", "sdk", "client.generate", "request", {"operation": "chat"}),
    _field("request in the header", "sdk", "client.generate", "request", {"operation": "chat", "request": "{}"}),
    _field("caching action unknown", "sdk", "client.caching", "action", {"action": "dance"}, request=b""),
    _field(
        "caching query of numbers",
        "sdk",
        "client.caching",
        "query.n",
        {"action": "list", "query": {"n": 1}},
        request=b"",
    ),
    _field("target a list", "sdk", "client.cancel", "target", {"target": ["7"]}),
    _field(
        "token a string",
        "tokens",
        "serving.token_batch",
        "entries[1].token",
        {"instance_id": "d", "entries": [_ENTRY, {**_ENTRY, "token": "A"}]},
    ),
    _field("entries an object", "tokens", "serving.token_batch", "entries", {"instance_id": "d", "entries": {}}),
    _field("no token", "tokens", "serving.first_token", "token", {"job_id": "j", "position": 0}),
    _field(
        "negative position",
        "tokens",
        "serving.token_batch",
        "entries[0].position",
        {"instance_id": "d", "entries": [{**_ENTRY, "position": -1}]},
    ),
    _field(
        "finish unknown",
        "tokens",
        "serving.token_batch",
        "entries[0].finish",
        {"instance_id": "d", "entries": [{**_ENTRY, "finish": "bored"}]},
    ),
    _field("no model", "conductor", "serving.schedule", "model", {"job_id": "j"}, keys=b""),
    _field("tokens a string", "conductor", "serving.schedule", "prompt_tokens", {**_SCHEDULE, "prompt_tokens": "5"}),
    _field("negative tokens", "conductor", "serving.schedule", "prompt_tokens", {**_SCHEDULE, "prompt_tokens": -5}),
    _field("tokens true", "conductor", "serving.schedule", "max_new_tokens", {**_SCHEDULE, "max_new_tokens": True}),
    _field("keys of 17 bytes", "conductor", "serving.schedule", "keys", _SCHEDULE, keys=b"k" * 17),
    _field("role unknown", "conductor", "control.register", "member.role", {"member": {"role": "king"}}),
    _field("no load", "conductor", "control.heartbeat", "load", {"instance_id": "i", "incarnation": "n"}),
    _field(
        "half a load",
        "conductor",
        "control.heartbeat",
        "load.blocks_free",
        {"instance_id": "i", "incarnation": "n", "load": {"blocks_free": 1.5}},
    ),
    _field(
        "key not hex",
        "conductor",
        "kvcache.events",
        "events[0].key",
        {"node_id": "n", "incarnation": "i", "first_seq": 1, "events": [{"change": "stored", "key": "xyz"}]},
    ),
    _field("keys of 15 bytes", "messenger0", "transfer.acquire", "keys", _ACQUIRE, keys=b"k" * 15),
    _field("negative blocks", "messenger0", "transfer.acquire", "n_blocks", {**_ACQUIRE, "n_blocks": -1}, keys=b""),
    _field("blocks of 2**63", "messenger0", "transfer.acquire", "n_blocks", {**_ACQUIRE, "n_blocks": 2**63}, keys=b""),
    _field(
        "landing layers null",
        "messenger0",
        "transfer.acquire",
        "landing_layers",
        {**_ACQUIRE, "landing_layers": None},
        keys=b"",
    ),
    _field("nothing wanted", "messenger0", "transfer.grow", "wanted", {"jobs": ["j"]}),
    _field(
        "half a slice",
        "messenger0",
        "transfer.slice_offer",
        "slices[0].layer",
        {"transfer_id": "t", "slices": [{"logical": 0}]},
    ),
    _field("no block size", "messenger0", "transfer.attach", "block_bytes", {"instance_id": "i", "incarnation": "n"}),
    _field("three bytes of tokens", "prefill0", "serving.prefill_job", "tokens", _PREFILL, tokens=b"abc", keys=b""),
    _field(
        "temperature a word",
        "prefill0",
        "serving.prefill_job",
        "sampling.temperature",
        {**_PREFILL, "sampling": {"temperature": "hot"}},
        **_TOKENS,
    ),
    _field(
        "no new tokens",
        "prefill0",
        "serving.prefill_job",
        "stopping",
        {**_PREFILL, "stopping": {"max_new_tokens": 0}},
        **_TOKENS,
    ),
    _field("decode a name", "prefill0", "serving.prefill_job", "decode", {**_PREFILL, "decode": "d"}, **_TOKENS),
    _field("job id null", "prefill0", "serving.cancel_job", "job_id", {"job_id": None}),
    _field("root of 15 bytes", "decode0", "serving.decode_job", "key_root", _JOB, **{**_TOKENS, "key_root": b"k" * 15}),
    _field(
        "deadline null", "decode0", "serving.decode_job", "deadline_s", {**_JOB, "deadline_s": None}, **_DECODE_PAYLOAD
    ),
    _field(
        "stop tokens mixed",
        "decode0",
        "serving.decode_job",
        "stopping.stop_token_ids[1]",
        {**_JOB, "stopping": {"max_new_tokens": 4, "stop_token_ids": [1, "2"]}},
        **_DECODE_PAYLOAD,
    ),
    _field("negative token", "decode0", "serving.prefill_done", "token", {"job_id": "j", "token": -1}),
)


def noise(seed: int) -> list[bytes]:
    """Random frames, some behind a right version or kind, so that the deeper checks are reached as well."""
    source = random.Random(seed)
    frames = [source.randbytes(source.choice((0, 1, 7, 64, 4096))) for _ in range(source.randint(1, 8))]
    if len(frames) > 2 and source.random() < 0.7:
        frames[0] = VERSION_FRAME
        if source.random() < 0.7:
            frames[1] = source.choice(sorted(codec.kinds())).encode()
    return frames


def good(body: object, *, deadline_s: float | None = None) -> list[bytes]:
    return codec.encode(body, Envelope(id=MessageId("7"), deadline_s=deadline_s))
