"""The little of etcd that a leader needs, over its JSON gateway (``/v3/…``, etcd 3.4 and later).

Every call tries the endpoints in turn, first the one that answered last, on a new connection each time: there is a call
or two a second. Numbers travel as text and keys in base64, as protobuf's JSON has it; what is 0 is left out.
"""

import asyncio
import base64
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.errors import ConfigError

_READ_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 1 << 20
_NOT_FOUND: Final = 5
"""gRPC's code for a lease that does not exist (any more)."""


class EtcdError(Exception):
    """No endpoint gave an answer that makes sense; the text says what the last one did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A key that exists: the revision that it was created at, and its value."""

    epoch: int
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    lease: str
    ttl_s: float


class Etcd:
    """Each call raises EtcdError, after *timeout_s* at the latest.

    Making one raises ConfigError for certificates that cannot be used.
    """

    def __init__(self, config: EtcdConfig, *, timeout_s: float) -> None:
        self._urls = list(config.urls)
        self._key = _base64(config.key)
        self._lease_s = config.lease_s
        self._timeout_s = timeout_s
        self._tls = _tls(config)

    async def seat(self) -> Seat | None:
        """Who holds the key; None when it is free."""
        return _seat(await self._ask("/v3/kv/range", {"key": self._key}))

    async def grant(self) -> Grant:
        """A new lease; etcd may make it longer than it was asked for."""
        answer = await self._ask("/v3/lease/grant", {"TTL": str(self._lease_s)})
        return Grant(lease=_text(answer, "ID"), ttl_s=_number(answer, "TTL"))

    async def take(self, lease: str, holder: str) -> Seat | None:
        """Create the key for as long as *lease* lasts, and only where there is none; None when somebody was faster."""
        create = {"key": self._key, "value": _base64(holder), "lease": lease}
        is_free = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        answer = await self._ask("/v3/kv/txn", {"compare": [is_free], "success": [{"requestPut": create}]})
        if not answer.get("succeeded", False):
            return None
        return Seat(epoch=_number(answer.get("header"), "revision"), holder=holder)

    async def keep_alive(self, lease: str) -> float:
        """Renew *lease*; how long it lasts from now on, 0 when it has ended."""
        answer = await self._ask("/v3/lease/keepalive", {"ID": lease})
        return _number(answer.get("result"), "TTL", absent=0)

    async def revoke(self, lease: str) -> None:
        """End *lease*, and the key with it. One that has ended already is fine."""
        await self._ask("/v3/lease/revoke", {"ID": lease}, allow_missing=True)

    async def _ask(self, path: str, body: Mapping[str, Any], *, allow_missing: bool = False) -> dict[str, Any]:
        """The first answer that makes sense; its endpoint comes first from then on. A member of etcd that is cut off
        from the others answers too, so no answer of one endpoint is the last word."""
        payload = json.dumps(body).encode()
        failure = ""
        for _ in range(len(self._urls)):
            url, each_s = self._urls[0], self._timeout_s / len(self._urls)
            try:
                async with asyncio.timeout(each_s):
                    status, text = await _post(url, path, payload, self._tls)
                return _answer(status, text, allow_missing=allow_missing)
            except TimeoutError:
                failure = f"{url}: no answer in {each_s:g} s"
            except (EtcdError, OSError, EOFError, ValueError, httptools.HttpParserError) as error:
                failure = f"{url}: {error or type(error).__name__}"
            self._urls.append(self._urls.pop(0))
        raise EtcdError(failure)


def _answer(status: int, text: bytes, *, allow_missing: bool) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise EtcdError(f"HTTP {status}, and no JSON object")
    if status != HTTPStatus.OK and not (allow_missing and answer.get("code") == _NOT_FOUND):
        raise EtcdError(f"HTTP {int(status)}: {str(answer.get('error', ''))[:200]}")
    return answer


class _Answer:
    """What the parser calls back."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.is_whole = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_whole = True


async def _post(url: str, path: str, payload: bytes, tls: ssl.SSLContext | None) -> tuple[int, bytes]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
    try:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        )
        writer.write(head.encode() + f"content-length: {len(payload)}\r\n\r\n".encode() + payload)
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        while not answer.is_whole:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise EOFError("the connection closed before the answer had ended")
            parser.feed_data(data)
            if len(answer.body) > _MOST_BYTES:
                raise ValueError(f"an answer of more than {_MOST_BYTES} bytes")
        return parser.get_status_code(), bytes(answer.body)
    finally:
        writer.transport.abort()  # the answer is whole, or not wanted: nobody has to agree to the end


def _seat(answer: Mapping[str, Any]) -> Seat | None:
    keys = answer.get("kvs") or []
    if not keys:
        return None
    try:
        holder = base64.b64decode(keys[0].get("value", "")).decode(errors="replace")
    except (AttributeError, ValueError) as error:
        raise EtcdError(f"a key that cannot be read: {error}") from error
    return Seat(epoch=_number(keys[0], "create_revision"), holder=holder)


def _text(answer: Mapping[str, Any], name: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise EtcdError(f"an answer without {name}")
    return value


def _number(answer: object, name: str, *, absent: int | None = None) -> int:
    """Natural numbers only; *absent* is what a missing one means, where it may be missing."""
    value = answer.get(name, absent) if isinstance(answer, dict) else None
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if isinstance(value, int) and value >= 0:
        return value
    raise EtcdError(f"an answer with {name}={value!r}")


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _tls(config: EtcdConfig) -> ssl.SSLContext | None:
    if not any(url.startswith("https://") for url in config.urls):
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca)
        if config.cert is not None:
            context.load_cert_chain(config.cert, config.cert_key)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificates cannot be used: {error}", path="conductor.etcd.ca") from error
    return context
