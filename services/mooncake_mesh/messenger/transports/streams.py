"""Blocking sockets: whole lists of memory in and out, options, and closing under a blocked thread."""

import socket
import ssl
import struct
from typing import Final

import structlog

log = structlog.get_logger(__name__)

_IOV_MAX: Final = 64
_PIECE_BYTES: Final = 1 << 20
_SAME_HOST_BUFFER_BYTES: Final = 256 << 10
_KEEPALIVE_S: Final = 10


def tune(connection: socket.socket, *, timeout_s: float) -> None:
    """Blocking mode with timeouts, no Nagle, the silent end of an idle connection noticed, buffers to measure.

    On loopback a large buffer only means that the bytes have left the cache before they are copied out again; across a
    network the kernel's own tuning stays on, which must cover bandwidth times delay.
    """
    _limit_waits(connection, timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connection.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1000))
    if connection.getsockname()[0] == connection.getpeername()[0]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SAME_HOST_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SAME_HOST_BUFFER_BYTES)


def _limit_waits(connection: socket.socket, timeout_s: float) -> None:
    """By the kernel, which costs no call of its own; under TLS by Python, as its ssl goes on after the kernel's end."""
    if isinstance(connection, ssl.SSLSocket):
        connection.settimeout(timeout_s)
        return
    connection.settimeout(None)
    whole_s = int(timeout_s)
    limit = struct.pack("ll", whole_s, int((timeout_s - whole_s) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def shut(connection: socket.socket) -> None:
    """End the connection, also under a thread that is blocked in it. The descriptor stays open until close()."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # the peer was faster
        log.debug("already_shut", error=str(error))


def pieces_of(views: list[memoryview], limit: int = _PIECE_BYTES) -> list[list[memoryview]]:
    """*views* as groups for one system call each: at most *limit* bytes, and no more views than the kernel takes."""
    groups: list[list[memoryview]] = []
    group: list[memoryview] = []
    room = limit
    for view in views:
        start = 0
        while start < len(view):
            part = view[start : start + room]
            group.append(part)
            start += len(part)
            room -= len(part)
            if room == 0 or len(group) == _IOV_MAX:
                groups.append(group)
                group, room = [], limit
    if group:
        groups.append(group)
    return groups


def send_group(connection: socket.socket, group: list[memoryview]) -> None:
    """Send all bytes of *group*. Raises OSError."""
    while group:
        group = _after(group, connection.sendmsg(group))


def receive_group(connection: socket.socket, group: list[memoryview]) -> None:
    """Fill all views of *group*. Raises OSError; ConnectionResetError when the peer has closed."""
    while group:
        got = connection.recvmsg_into(group, 0, socket.MSG_WAITALL)[0]  # one wait, not one for each arrival
        if got == 0:
            raise ConnectionResetError("the connection was closed in the middle of a frame")
        group = _after(group, got)


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Raises OSError."""
    data = bytearray(size)
    receive_group(connection, [memoryview(data)])
    return bytes(data)


def _after(group: list[memoryview], n_bytes: int) -> list[memoryview]:
    """What is left of *group* behind its first *n_bytes* bytes."""
    for index, view in enumerate(group):
        if n_bytes < len(view):
            return [view[n_bytes:], *group[index + 1 :]]
        n_bytes -= len(view)
    return []
