"""The sending end of TCP: a control connection and a few lanes to each receiver (see frames.py for the bytes)."""

import secrets
import socket
from functools import partial
from typing import Final

from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.frames import Hello, Kind
from mooncake_mesh.messenger.transports.paths import Connections, Sockets
from mooncake_mesh.messenger.transports.streams import receive_exactly, tune

_CONNECT_TIMEOUT_S: Final = 5.0
_STALL_TIMEOUT_S: Final = 30.0


def tcp_connections(host: str, port: int, n_lanes: int) -> Connections:
    """Connections to the TcpListener at *host*, *port*, with *n_lanes* lanes."""
    sender = secrets.token_bytes(16)
    return Connections("tcp", f"{host}:{port}", partial(_open_all, (host, port), sender, n_lanes))


def _open_all(address: tuple[str, int], sender: bytes, n_lanes: int, epoch: int) -> Sockets:
    hellos = [Hello(kind=Kind.CONTROL, sender=sender, epoch=epoch, lane=0, n_lanes=n_lanes)]
    hellos += [Hello(kind=Kind.LANE, sender=sender, epoch=epoch, lane=i, n_lanes=n_lanes) for i in range(n_lanes)]
    opened: list[socket.socket] = []
    try:
        opened.extend(_open(address, hello) for hello in hellos)
    except OSError:
        for connection in opened:
            connection.close()
        raise
    return opened[0], opened[1:]


def _open(address: tuple[str, int], hello: Hello) -> socket.socket:
    connection = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
    try:
        connection.sendall(hello.pack())
        if receive_exactly(connection, 1) != frames.WELCOME:
            raise ConnectionRefusedError("the receiver answered what no receiver would")
        tune(connection, timeout_s=_STALL_TIMEOUT_S)
    except BaseException:
        connection.close()
        raise
    return connection
