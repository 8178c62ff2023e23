"""TLS 1.3 below a link over TCP: connections that hide what they carry, and know the receiver by its certificate.

A receiver makes a certificate for its life (certificates.py) and tells a sender the SHA-256 of it with the plan of a
transfer, over the mesh's own control channel. The sender speaks to the holder of that certificate and to nobody else,
so no authority is needed, and who stands in between is found out before anything is said. Who the *sender* is, is
proven inside, as without TLS (link_auth.py).

OpenSSL copies every byte, in records of 16 KiB, and keeps a record that was read in part: nobody is woken for the rest.
So who reads on the event loop leaves room for a whole record.
"""

import hashlib
import hmac
import os
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

from mooncake_mesh.messenger.transports.door import Hear, Meet
from mooncake_mesh.messenger.transports.frames import FrameError

RECORD_BYTES: Final = 16 << 10
_MOST_RECORDS: Final = 1 << 24
"""Under one key: the limit of AES-GCM (RFC 8446, 5.5) is at 2**24.5, and Python's ssl cannot ask for another key."""


class TlsSocket(ssl.SSLSocket):
    """An encrypted connection with the words that links, lanes and doors have for a plain one.

    Several threads may use one that does not block. Of those that block, one may send, or one may receive.
    """

    _lock: Lock
    _records_left: int

    def __new__(cls, *args: Any, **kwargs: Any) -> "TlsSocket":
        self = super().__new__(cls, *args, **kwargs)
        self._lock = Lock()  # OpenSSL's object is for one thread at a time
        self._records_left = _MOST_RECORDS
        return self

    def send(self, data: Any, flags: int = 0) -> int:
        """All of *data*, or BlockingIOError: then the same bytes, and perhaps more behind them, have to come again."""
        with self._lock:
            if self._records_left <= 0:
                raise OSError("the key of this TLS connection is used up; a new connection has a new one")
            try:
                sent = self.write(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            self._records_left -= -(-sent // RECORD_BYTES)
            return sent

    def sendmsg(self, buffers: Iterable[Any], *args: Any) -> int:  # type: ignore[override]  # SSLSocket has none
        """As :meth:`send`."""
        return sum(map(self.send, gathered(list(buffers), all_at_once=self.gettimeout() == 0.0)))

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """At most one record, so *buffer* has room for one. Raises BlockingIOError."""
        with self._lock:
            try:
                return int(self.read(nbytes or len(buffer), buffer))
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None

    def recv(self, buflen: int = RECORD_BYTES, flags: int = 0) -> bytes:
        """As :meth:`recv_into`."""
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def recvmsg_into(self, buffers: Iterable[memoryview], *args: Any) -> Any:  # type: ignore[override]  # nor this
        """Waits until all of *buffers* is full, or the other end has closed."""
        received = 0
        for buffer in buffers:
            while buffer:
                got = self.recv_into(buffer)
                if got == 0:
                    return received, [], 0, None
                received += got
                buffer = buffer[got:]
        return received, [], 0, None

    def shutdown(self, how: int) -> None:
        """Of the connection alone: SSLSocket's lets go of TLS first, and who sends meanwhile sends in clear."""
        socket.socket.shutdown(self, how)


def gathered(buffers: "list[Any]", *, all_at_once: bool) -> "list[Any]":
    """What is sent in one go each: small *buffers* that stand together are joined, as each go makes a record."""
    if all_at_once:
        return [b"".join(buffers)]
    parts: list[Any] = []
    small: list[Any] = []
    for buffer in buffers:
        if len(buffer) < RECORD_BYTES:
            small.append(buffer)
            continue
        if small:
            parts.append(b"".join(small))
            small = []
        parts.append(buffer)
    if small:
        parts.append(b"".join(small))
    return parts


# --- the receiver -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a receiver is: what its listener needs, and the SHA-256 of its certificate, which senders are told."""

    context: ssl.SSLContext
    fingerprint: bytes

    def accept(self, connection: socket.socket) -> TlsSocket:
        """*connection*, which is the result's from now on, before the handshake. Raises OSError."""
        accepted = self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        assert isinstance(accepted, TlsSocket), "the context's class"
        return accepted


def identity(certificate_der: bytes, pem: bytes) -> Identity:
    """That of the certificate, given once as DER and once as PEM together with its key, which no disk sees."""
    context = _tls_13(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # nobody comes back to a session
    fd = os.memfd_create("certificate", os.MFD_CLOEXEC)
    with os.fdopen(fd, "wb", buffering=0) as file:
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return Identity(context=context, fingerprint=hashlib.sha256(certificate_der).digest())


class AfterHandshake:
    """How a door hears who speaks TLS: the handshake first, then *meet* and what that hears."""

    def __init__(self, meet: Meet) -> None:
        self._meet = meet
        self._hear: Hear | None = None

    def __call__(self, connection: socket.socket) -> Callable[[], None]:
        """As :data:`Hear`."""
        if self._hear is None:
            _shake_hands(connection)
            self._hear = self._meet(connection)
        return self._hear(connection)


def _shake_hands(connection: socket.socket) -> None:
    assert isinstance(connection, TlsSocket), "accepted by an identity"
    try:
        connection.do_handshake()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        raise BlockingIOError from None
    except ssl.SSLError as error:
        raise FrameError(f"no TLS handshake: {error.reason or error}") from error


# --- the sender -------------------------------------------------------------------------------------------------------


def connect(connection: socket.socket, fingerprint: bytes) -> TlsSocket:
    """*connection* after the handshake with who has the certificate of *fingerprint*. Blocks.

    It is the result's from now on, and closed where this raises: OSError.
    """
    try:
        encrypted = _client_context().wrap_socket(connection)
    except ssl.SSLError as error:
        raise ConnectionRefusedError(f"what answers there does not speak TLS: {error.reason or error}") from error
    certificate = encrypted.getpeercert(binary_form=True) or b""
    if not hmac.compare_digest(hashlib.sha256(certificate).digest(), fingerprint):
        encrypted.close()
        raise ConnectionRefusedError("what answers there has another certificate than the receiver")
    assert isinstance(encrypted, TlsSocket), "the context's class"
    return encrypted


@cache
def _client_context() -> ssl.SSLContext:
    """Asks no authority, as :func:`connect` knows the one certificate that is right.

    OpenSSL checks all the same that the other end has its key.
    """
    context = _tls_13(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _tls_13(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context
