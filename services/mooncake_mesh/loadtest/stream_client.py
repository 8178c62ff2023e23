"""Completions over HTTP, streamed, with the arrival time of every token.

It reads just enough of HTTP and server-sent events, so that on a small machine it is the server that is measured. One
connection carries one request at a time and is used again after it.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from mooncake_mesh.loadtest.outcomes import Ending, RequestResult

_MAX_HEAD_BYTES: Final = 1 << 16
_REASON_HEADER: Final = "x-mooncake-reject-reason"
_BUSY: Final = (429, 503)


class NoServer(Exception):
    """Nobody answers at the URL as a server of this kind does; the text says what happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go. ``base_url`` is that of the server, without ``/v1``."""

    base_url: str
    api_key: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not the URL of a server: {self.base_url!r}")

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    def head(self, method: str, path: str, body_bytes: int) -> bytes:
        parts = urlsplit(self.base_url)
        lines = [
            f"{method} {parts.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {parts.netloc.rpartition('@')[2]}",
            f"content-length: {body_bytes}",
            "content-type: application/json",
        ]
        if self.api_key:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()

    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if urlsplit(self.base_url).scheme == "https" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    status: int
    headers: Mapping[str, str]


class StreamClient:
    """Connections to one server. *clock_s* is the run's clock; connections that are free wait for the next request."""

    def __init__(self, target: Target, clock_s: Callable[[], float]) -> None:
        self._target = target
        self._clock_s = clock_s
        self._tls = target.tls()
        self._free: list[_Connection] = []

    async def complete(self, body: Mapping[str, Any], result: RequestResult) -> None:
        """POST the completion *body*, streamed, and note in *result* what comes. Never raises but when cancelled."""
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        result.sent_s = self._clock_s()
        connection = None
        try:
            connection = self._open_one() or await self._connect()
            await self._complete(connection, payload, result)
            self._free.append(connection)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            result.reason = result.reason or f"{type(error).__name__}: {error}"[:200]
            if connection is not None:
                connection.close()
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        finally:
            result.ended_s = self._clock_s()

    async def get(self, path: str) -> bytes:
        """The body of GET *path*. Raises NoServer."""
        try:
            connection = await self._connect()
            try:
                head = await connection.ask(self._target.head("GET", path, 0))
                body = await connection.body(head)
            finally:
                await connection.closed()
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise NoServer(f"{self._target.base_url}{path}: {error or type(error).__name__}") from error
        if head.status != 200:
            raise NoServer(f"{self._target.base_url}{path}: HTTP {head.status}: {_error_text(body)}")
        return body

    async def aclose(self) -> None:
        """Close the connections that are free."""
        while self._free:
            await self._free.pop().closed()

    def _open_one(self) -> "_Connection | None":
        """One that is free, if the server has not closed them all meanwhile, as servers do with those that idle."""
        while self._free:
            connection = self._free.pop()
            if connection.is_open:
                return connection
            connection.close()
        return None

    async def _connect(self) -> "_Connection":
        host, port = self._target.address
        return _Connection(*await asyncio.open_connection(host, port, ssl=self._tls, limit=_MAX_HEAD_BYTES))

    async def _complete(self, connection: "_Connection", payload: bytes, result: RequestResult) -> None:
        head = await connection.ask(self._target.head("POST", "/v1/completions", len(payload)) + payload)
        if head.status != 200:
            body = await connection.body(head)
            result.ending = Ending.REFUSED if head.status in _BUSY else Ending.FAILED
            result.reason = head.headers.get(_REASON_HEADER) or f"HTTP {head.status}: {_error_text(body)}"
            return
        is_done = False
        async for event in connection.events(head):
            if event == b"[DONE]":
                is_done = True
            else:
                self._note(json.loads(event), result)
        if not is_done:
            result.reason = result.reason or "the stream ended without [DONE]"
        result.ending = Ending.FAILED if result.reason else Ending.OK

    def _note(self, chunk: dict[str, Any], result: RequestResult) -> None:
        if "error" in chunk:
            result.reason = str(chunk["error"].get("message", "error"))[:200]
        for choice in chunk.get("choices") or ():
            tokens = choice.get("token_ids")
            n = (1 if choice.get("text") else 0) if tokens is None else len(tokens)
            result.token_s.extend([self._clock_s()] * n)
        usage = chunk.get("usage")
        if usage:
            result.input_tokens = usage["prompt_tokens"]
            result.output_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            result.cached_tokens = details.get("cached_tokens")


class _Connection:
    """One request at a time, and one response read to its end before the next."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def is_open(self) -> bool:
        """Whether the server has not ended it, as far as we have heard."""
        return not self._reader.at_eof() and self._reader.exception() is None

    async def ask(self, request: bytes) -> _Head:
        """Send *request*, read the head of its answer. Raises OSError, EOFError or ValueError."""
        self._writer.write(request)
        await self._writer.drain()
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdecimal():
            raise ValueError(f"not an HTTP response: {first[:80]!r}")
        pairs = (line.partition(":") for line in lines if line)
        return _Head(status=int(words[1]), headers={name.strip().lower(): value.strip() for name, _, value in pairs})

    async def body(self, head: _Head) -> bytes:
        """The whole body behind *head*."""
        return b"".join([part async for part in self._parts(head)])

    async def events(self, head: _Head) -> AsyncIterator[bytes]:
        """The data of each server-sent event."""
        rest = b""
        async for part in self._parts(head):
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data:"):
                    yield event[5:].strip()

    async def _parts(self, head: _Head) -> AsyncIterator[bytes]:
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int(await self._line(), 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            while await self._line():  # trailers
                pass
        else:
            yield await self._reader.readexactly(int(head.headers.get("content-length", "0")))

    async def _line(self) -> bytes:
        return (await self._reader.readuntil(b"\r\n"))[:-2]

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Close, and wait until it is."""
        self._writer.close()
        with suppress(OSError):  # whatever ended it, it is over
            await self._writer.wait_closed()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])[:160]
    except (ValueError, LookupError, TypeError):
        return body[:160].decode(errors="replace")
