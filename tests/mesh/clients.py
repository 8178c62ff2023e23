"""Blocking clients of a mesh under test: one question over ZeroMQ, whole and streamed requests over HTTP.

They are plain on purpose (one connection for each call, raw frames where a test wants them), so that a fault of the
mesh is not hidden by a client that is clever.
"""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import zmq

from mooncake_mesh.engine.fake import FakeConfig, expected_tokens
from mooncake_mesh.gateway.tokenizer import ByteTokenizer, SpecialTokens
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_mesh.mesh.curve import MeshKeys, secure_connected
from mooncake_proto import codec
from mooncake_proto.control import Failure
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import MessageId

R = TypeVar("R")

_HTTP_TIMEOUT_S: Final = 60.0
FAKE: Final = FakeConfig(
    name="fake", layout=KvLayout(layers=2, kv_heads=2, head_dim=8, dtype=KvDtype.BFLOAT16, block_tokens=16)
)


class NoAnswer(Exception):
    """Nothing came in time."""


# --- ZeroMQ -----------------------------------------------------------------------------------------------------------


@contextmanager
def dealer(endpoint: str, keys: MeshKeys | None = None) -> "Iterator[zmq.Socket[bytes]]":
    """A DEALER in a context of its own; both are gone afterwards."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as plug:
        plug.linger = 0
        secure_connected(plug, endpoint, keys)
        plug.connect(endpoint)
        yield plug


def receive(plug: "zmq.Socket[bytes]", *, timeout_s: float) -> tuple[Envelope, Any]:
    """The next message. Raises NoAnswer."""
    if not plug.poll(int(timeout_s * 1000)):
        raise NoAnswer(f"no answer within {timeout_s:g} s")
    return codec.decode(plug.recv_multipart())


def ask(endpoint: str, body: object, expect: type[R], *, timeout_s: float = 15.0, keys: MeshKeys | None = None) -> R:
    """Send *body*, wait for its answer, which must be an *expect*. Raises NoAnswer."""
    with dealer(endpoint, keys) as plug:
        plug.send_multipart(codec.encode(body, Envelope(id=MessageId("1"), deadline_s=timeout_s)))
        envelope, answer = receive(plug, timeout_s=timeout_s)
    assert envelope.re == "1", f"an answer to {envelope.re!r}"
    assert isinstance(answer, expect), answer
    return answer


def refused(endpoint: str, body: object, *, timeout_s: float = 15.0) -> Failure:
    """As :func:`ask`, for what must be answered by a Failure."""
    return ask(endpoint, body, Failure, timeout_s=timeout_s)


# --- HTTP -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def _connection(base: str, timeout_s: float = _HTTP_TIMEOUT_S) -> http.client.HTTPConnection:
    parts = urlsplit(base)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)


def request(
    base: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> Answer:
    connection = _connection(base)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        fields = {name.lower(): value for name, value in response.getheaders()}
        return Answer(status=response.status, headers=fields, body=response.read())
    finally:
        connection.close()


def get(base: str, path: str) -> Answer:
    return request(base, "GET", path)


def post(base: str, path: str, fields: dict[str, Any]) -> Answer:
    return request(base, "POST", path, json.dumps(fields).encode(), {"content-type": "application/json"})


def completion_fields(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}


def streamed_request(host: str, prompt: str, max_tokens: int, **fields: Any) -> bytes:
    """A streamed completion as bytes, for those who talk to a socket."""
    body = json.dumps(completion_fields(prompt, max_tokens, stream=True, **fields)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def complete(base: str, prompt: str, max_tokens: int, **fields: Any) -> str:
    """Text of a greedy completion; the request must succeed."""
    answer = post(base, "/v1/completions", completion_fields(prompt, max_tokens, **fields))
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["text"])


def expected_text(prompt: str, max_tokens: int, config: FakeConfig = FAKE) -> str:
    """What a mesh of fake engines answers to a greedy completion, worked out without a mesh."""
    tokenizer = ByteTokenizer()
    return tokenizer.decode(expected_tokens(config, tokenizer.encode(prompt, SpecialTokens.ADD), max_tokens))


@dataclass(slots=True)
class Stream:
    """A streamed completion, read on a thread of its own. A context manager: leaving it closes the connection."""

    base: str
    prompt: str
    max_tokens: int
    fields: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    done_marks: int = 0
    broken: str = ""
    chunks: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_over: bool = False
    _connection: http.client.HTTPConnection | None = None
    _plug: socket.socket | None = None
    _has_left: bool = False
    _thread: threading.Thread | None = None

    def __enter__(self) -> "Stream":
        self._connection = _connection(self.base)
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection, as a client that loses interest or dies; where there is none yet, none is used."""
        with self._changed:
            self._has_left = True
            plug = self._plug
        if plug is not None:
            try:
                plug.shutdown(socket.SHUT_RDWR)
            except OSError:
                self._note(broken="closed before")
        if self._thread is not None:
            self._thread.join()

    def wait_chunks(self, n: int, *, timeout_s: float = 40.0) -> None:
        """Wait until *n* chunks of text are here."""
        with self._changed:
            came = self._changed.wait_for(lambda: self.chunks >= n or self._is_over, timeout_s)
        assert came, f"{self.chunks} of {n} chunks within {timeout_s:g} s"
        assert self.chunks >= n, f"the stream ended after {self.chunks} chunks: {self.errors or self.broken}"

    def result(self, *, timeout_s: float = 40.0) -> str:
        """The whole text of a stream that ended as it should: one finish reason, one [DONE], no error."""
        self.wait_over(timeout_s=timeout_s)
        assert self.status == 200, self.errors
        assert not self.errors, self.errors
        assert not self.broken, self.broken
        assert (len(self.finish_reasons), self.done_marks) == (1, 1)
        return self.text

    def wait_over(self, *, timeout_s: float = 40.0) -> None:
        with self._changed:
            over = self._changed.wait_for(lambda: self._is_over, timeout_s)
        assert over, f"the stream still runs after {timeout_s:g} s, {self.chunks} chunks"

    @property
    def is_over(self) -> bool:
        return self._is_over

    def _run(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            body = json.dumps(completion_fields(self.prompt, self.max_tokens, stream=True, **self.fields)).encode()
            connection.connect()
            with self._changed:
                if self._has_left:
                    return
                self._plug = connection.sock
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            self._note(status=response.status)
            if response.status != 200:
                self._take_error(response.read())
                return
            for line in response:
                if line.startswith(b"data: "):
                    self._take(line.removeprefix(b"data: ").strip())
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._note(broken=f"{type(error).__name__}: {error}")
        finally:
            connection.close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._note(done_marks=self.done_marks + 1)
            return
        event = json.loads(data)
        if "error" in event:
            self._take_error(data)
            return
        for choice in event["choices"]:
            with self._changed:
                self.text += choice["text"]
                self.chunks += bool(choice["text"])
                if choice["finish_reason"]:
                    self.finish_reasons.append(choice["finish_reason"])
                self._changed.notify_all()

    def _take_error(self, body: bytes) -> None:
        with self._changed:
            self.errors.append(json.loads(body)["error"])
            self._changed.notify_all()

    def _note(self, **values: Any) -> None:
        with self._changed:
            for name, value in values.items():
                setattr(self, name, value)
            self._changed.notify_all()
