"""Keys of the ZeroMQ sockets: CURVE encrypts a connection and proves both ends to each other (docs/security.md).

A process has one identity, as it has one ZeroMQ context: the keys that :func:`using` puts in use. With keys every tcp
socket is secured, without keys none is, so that both ends of a connection always agree; ipc sockets are guarded by the
file system and cost nothing. A bound socket that is secured lets in only whom the process' gatekeeper knows: without
one it lets in nobody.
"""

import enum
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

KEY_CHARS: Final = 40
"""Length of a key as it is written (Z85)."""


class Audience(enum.Enum):
    """Whom a bound socket is for; each audience is an allow-list. Members may come wherever clients may."""

    MEMBERS = "members"
    CLIENTS = "clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """Both keys in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshKeys:
    """``own`` proves this process to those it connects to; ``server_public`` is what they must prove to have.

    All processes of a mesh that bind sockets share the ``server`` pair; an SDK client's folder has only its public
    half. ``folder`` holds the allow-lists.
    """

    folder: Path
    server_public: bytes
    own: KeyPair
    server: KeyPair | None = None


_IN_USE: Final[ContextVar[MeshKeys | None]] = ContextVar("mesh_keys", default=None)


def keys_in_use() -> MeshKeys | None:
    """The identity of this process; None: sockets are not secured."""
    return _IN_USE.get()


@contextmanager
def using(keys: MeshKeys | None) -> Iterator[None]:
    """Secure the tcp sockets that are made inside, by this task and those it starts, with *keys*."""
    token = _IN_USE.set(keys)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def secure_bound(socket: "zmq.Socket[bytes]", bind: str, audience: Audience) -> bool:
    """Let only *audience* in at *bind*, where keys are in use; whether they are. Call before the socket is bound."""
    keys = keys_in_use()
    if keys is None or not is_tcp(bind):
        return False
    if keys.server is None:
        raise ValueError(f"{keys.folder} has no server keys: it is a client's")
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.server.public, keys.server.secret
    socket.setsockopt_string(zmq.ZAP_DOMAIN, audience.value)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no gatekeeper, no entry
    return True


def secure_connected(socket: "zmq.Socket[bytes]", endpoint: str, keys: MeshKeys | None) -> bool:
    """Prove *keys*, or else those in use, at *endpoint*; whether there are any. Call before the socket connects."""
    keys = keys or keys_in_use()
    if keys is None or not is_tcp(endpoint):
        return False
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
    return True


def is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")
