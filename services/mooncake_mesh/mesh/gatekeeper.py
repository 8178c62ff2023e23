"""Says who comes in: answers ZeroMQ's question about each client key (ZAP, RFC 27), and logs who was refused.

One gatekeeper serves all secured sockets of a process. The allow-list is read again when it has changed, so a new entry
counts at once, and a revoked one from the next connection on.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog
import zmq
from zmq.utils import z85

from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.curve import Audience, MeshKeys
from mooncake_mesh.mesh.endpoint import Channel
from mooncake_mesh.mesh.log_allowance import LogAllowance

log = structlog.get_logger(__name__)

_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_ZAP_VERSION: Final = b"1.0"


class Gatekeeper:
    """Answers for the sockets of this process' ZeroMQ context. Create inside a running loop, before they are bound."""

    def __init__(self, keys: MeshKeys) -> None:
        self._folder = keys.folder
        self._state: tuple[int, ...] = ()
        self._allowed: Mapping[Audience, Mapping[bytes, str]] = {}
        self._allowance = LogAllowance()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)
        self._channel = Channel(self._socket, self._answer)

    def close(self) -> None:
        """From now on nobody comes in."""
        self._socket.unbind(_ZAP_ENDPOINT)  # at once: closing alone leaves that to another thread
        self._channel.close()

    def name_of(self, domain: bytes, public: bytes) -> str | None:
        """Whom *public* belongs to, if they may come in."""
        state = key_folder.allowed_state(self._folder)
        if state != self._state:
            self._allowed, self._state = key_folder.allowed(self._folder), state
        try:
            audience = Audience(domain.decode(errors="replace"))
        except ValueError:
            return None
        return self._allowed[audience].get(public)

    def _answer(self, frames: list[bytes]) -> None:
        """Frames: routing id, empty, version, request id, domain, address, identity, mechanism, credentials."""
        route, _, version, request, domain, address, _, mechanism, *credentials = frames
        public = z85.encode(credentials[0]) if mechanism == b"CURVE" and credentials else b""
        name = self.name_of(domain, public)
        if name is None:
            self._tell(domain, address, public)
        status, text = (b"400", b"this key is not on the allow-list") if name is None else (b"200", b"OK")
        assert version == _ZAP_VERSION
        self._channel.send_now([route, b"", _ZAP_VERSION, request, status, text, (name or "").encode(), b""])

    def _tell(self, domain: bytes, address: bytes, public: bytes) -> None:
        unsaid = self._allowance.take(asyncio.get_running_loop().time())
        if unsaid is not None:
            log.warning(
                "key_refused",
                key=public.decode(),
                address=address.decode(errors="replace"),
                audience=domain.decode(errors="replace"),
                unsaid=unsaid,
            )
