"""Ways between the processes of one prefill instance, over the transports that KV takes between nodes.

Who receives has a *door*: a listener for shared memory and one for TCP before its memory. Who sends has a *way* there,
out of memory of its own. What comes in goes where the door's *places* say, before its first byte.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

from mooncake_mesh.config_kinds import TransportKind
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.errors import MeshError, SliceLost, TransferError
from mooncake_mesh.mesh.arena_memory import Arena
from mooncake_mesh.mesh.host import host_id
from mooncake_mesh.messenger.identity import identity_for
from mooncake_mesh.messenger.landing import Destination
from mooncake_mesh.messenger.sending import OutgoingSlice
from mooncake_mesh.messenger.transports.api import Incoming, SealedSlice, checksum
from mooncake_mesh.messenger.transports.link_auth import new_secret
from mooncake_mesh.messenger.transports.paths import Connections, LinkPath
from mooncake_mesh.messenger.transports.shm_link import ShmListener, shm_connections
from mooncake_mesh.messenger.transports.tcp import tcp_connections
from mooncake_mesh.messenger.transports.tcp_listener import TcpListener
from mooncake_mesh.messenger.transports.tls import Identity
from mooncake_proto.pipeline import StageDoor

_TCP_LANES: Final = 1


class Places(Protocol):
    """Where what comes through a door goes: Landings (transports/api.py) for who has shown the door's token."""

    def begin(self, incoming: Sequence[Incoming]) -> list[Destination]:
        """Places for the slices that are new. Raises SliceLost for a slice that has none."""

    def end(self, destinations: Sequence[Destination], error: TransferError | None) -> None:
        """The writes that *begin* allowed are over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How other processes reach the doors of this one: by a socket in *run_dir*, or over TCP at *host*.

    With an *identity* TCP is encrypted, and no way leads to a door without one. *transport* is what ways take.
    """

    run_dir: Path
    listen: str
    host: str
    identity: Identity | None = None
    transport: TransportKind = TransportKind.AUTO

    @classmethod
    def of(cls, config: PipelineConfig) -> Self:
        """Raises ConfigError where it cannot be encrypted."""
        return cls(
            run_dir=config.run_dir,
            listen=config.data_host,
            host=config.advertise_host or config.data_host,
            identity=identity_for("prefill.pipeline.tcp_tls") if config.tcp_tls else None,
            transport=config.transport,
        )


class Door:
    """Takes slices into *memory*. Create on the loop."""

    def __init__(self, reach: Reach, name: str, memory: memoryview, places: Places) -> None:
        """Its socket is called *name*. Raises MeshError where it cannot listen."""
        token, secret = secrets.token_bytes(16), new_secret()
        landings = _ForToken(token, places)
        path = reach.run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.unlink(missing_ok=True)  # of a former life that was killed
        self._memory = memory[:]
        self._shm = ShmListener(path, self._memory, landings)
        self._tcp = TcpListener(reach.listen, 0, self._memory, landings, secret=secret, identity=reach.identity)
        self.address = StageDoor(
            host_id=host_id(),
            shm_path=str(path),
            tcp_host=reach.host,
            tcp_port=self._tcp.port,
            token=token.hex(),
            link_secret=secret.hex(),
            tls_fingerprint="" if reach.identity is None else reach.identity.fingerprint.hex(),
        )

    async def close(self) -> None:
        """Take nothing any more. Returns when nothing is written into the memory, and nothing here has a view of it."""
        await self._shm.close()
        await self._tcp.close()
        self._memory.release()  # links that have ended have it until they are collected


class _ForToken:
    """Landings of a door, for those who were told its token."""

    def __init__(self, token: bytes, places: Places) -> None:
        self._token = token
        self._places = places

    def begin(self, token: bytes, incoming: Sequence[Incoming]) -> list[Destination]:
        if not secrets.compare_digest(token, self._token):
            raise SliceLost("these slices are for another pipeline")
        return self._places.begin(incoming)

    def end(self, token: bytes, destinations: Sequence[Destination], error: TransferError | None) -> None:
        self._places.end(destinations, error)


class Way:
    """The way out of *memory* to a *door*. Create on the loop."""

    def __init__(self, door: StageDoor, memory: Arena, reach: Reach) -> None:
        """Raises MeshError for a door that no transport leads to, or only one in clear where it is to be encrypted."""
        self._memory = memory.view
        self._connections = _connections(door, memory, reach)
        self._path = LinkPath(self._connections, bytes.fromhex(door.token), memory.view)
        self.transport = self._connections.name

    async def send(self, pieces: Sequence[OutgoingSlice]) -> None:
        """Return when all are at the other end, their checksums compared. Raises TransferError.

        The memory is free again then, however it ended.
        """
        await self._path.send([self._sealed(piece) for piece in pieces])

    def _sealed(self, piece: OutgoingSlice) -> SealedSlice:
        data = self._memory[piece.offset : piece.offset + piece.size_bytes]
        return SealedSlice(piece=piece, checksum=checksum(data))

    def close(self) -> None:
        """End what is under way."""
        self._connections.close()


def _connections(door: StageDoor, memory: Arena, reach: Reach) -> Connections:
    is_here = door.host_id == host_id() and Path(door.shm_path).is_socket()
    if is_here and reach.transport is not TransportKind.TCP:
        return shm_connections(Path(door.shm_path), memory.fd)
    if reach.transport is TransportKind.SHM:
        raise MeshError("a stage of this instance shares no memory with the one before: see pipeline.transport")
    if reach.identity is not None and not door.tls_fingerprint:
        raise MeshError("a stage of this instance takes nothing encrypted: pipeline.tcp_tls is for all of them or none")
    return tcp_connections(
        door.tcp_host,
        door.tcp_port,
        bytes.fromhex(door.link_secret),
        _TCP_LANES,
        fingerprint=bytes.fromhex(door.tls_fingerprint),
    )
