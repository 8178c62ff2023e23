"""The sending end of TCP: a control connection and a few lanes to each receiver (see frames.py for the bytes)."""

import secrets
import socket
from dataclasses import dataclass
from functools import partial
from typing import Final

from mooncake_mesh.messenger.transports import link_auth, tls
from mooncake_mesh.messenger.transports.api import TcpKind
from mooncake_mesh.messenger.transports.frames import FrameError, Hello, Kind
from mooncake_mesh.messenger.transports.paths import Connections, Sockets
from mooncake_mesh.messenger.transports.streams import receive_exactly, tune

_CONNECT_TIMEOUT_S: Final = 5.0
_STALL_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A listener, and what it is known by."""

    address: tuple[str, int]
    secret: bytes
    fingerprint: bytes


def tcp_connections(host: str, port: int, secret: bytes, n_lanes: int, *, fingerprint: bytes = b"") -> Connections:
    """Connections to the TcpListener at *host*, *port* that has *secret*, with *n_lanes* lanes.

    Where it has an identity (tls.py), *fingerprint* is that of its certificate.
    """
    name = (TcpKind.TLS if fingerprint else TcpKind.CLEAR).value
    target = _Target(address=(host, port), secret=secret, fingerprint=fingerprint)
    return Connections(name, f"{host}:{port}", partial(_open_all, target, secrets.token_bytes(16), n_lanes))


def _open_all(target: _Target, sender: bytes, n_lanes: int, epoch: int) -> Sockets:
    hellos = [Hello(kind=Kind.CONTROL, sender=sender, epoch=epoch, lane=0, n_lanes=n_lanes)]
    hellos += [Hello(kind=Kind.LANE, sender=sender, epoch=epoch, lane=i, n_lanes=n_lanes) for i in range(n_lanes)]
    opened: list[socket.socket] = []
    try:
        opened.extend(_open(target, hello) for hello in hellos)
    except OSError:
        for connection in opened:
            connection.close()
        raise
    return opened[0], opened[1:]


def _open(target: _Target, hello: Hello) -> socket.socket:
    connection = socket.create_connection(target.address, timeout=_CONNECT_TIMEOUT_S)
    try:
        if target.fingerprint:
            connection = tls.connect(connection, target.fingerprint)
        answer = link_auth.answer(target.secret, _challenge(connection), hello)
        connection.sendall(answer.said)
        if not answer.is_welcome(receive_exactly(connection, link_auth.WELCOME_BYTES)):
            raise ConnectionRefusedError("what answers there does not know the receiver's secret")
        tune(connection, timeout_s=_STALL_TIMEOUT_S)
    except FrameError as error:
        connection.close()
        raise ConnectionRefusedError(str(error)) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _challenge(connection: socket.socket) -> bytes:
    try:
        return receive_exactly(connection, link_auth.CHALLENGE_BYTES)
    except TimeoutError:
        raise ConnectionRefusedError("what answers there waits for something else, such as TLS") from None
