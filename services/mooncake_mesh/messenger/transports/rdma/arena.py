"""A messenger's use of RDMA: its arena, registered once for others to read, and reads from theirs into it.

As with shared memory, the receiver fetches what the sender offers, so that an arena is written only by its own node;
the arena is registered for remote reading only.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import ChecksumMismatch, SliceLost
from mooncake_mesh.mesh.crew import Crew
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.messenger.transports.api import checksum
from mooncake_mesh.messenger.transports.rdma.batch import Piece, joined
from mooncake_mesh.messenger.transports.rdma.engine import RdmaEngine
from mooncake_mesh.messenger.transports.shm import Copy
from mooncake_proto.ids import Incarnation
from mooncake_proto.rdma import ConnectQp, QpConnected, RdmaMemory

_CONNECT_TIMEOUT_S: Final = 5.0


class RdmaArena:
    """*view* registered with the NICs of *config*. Raises TransferError; needs a running event loop.

    *endpoint* is where the messenger answers ConnectQp.
    """

    def __init__(
        self,
        config: RdmaConfig,
        view: memoryview,
        peers: Phonebook,
        crew: Crew,
        *,
        incarnation: Incarnation,
        endpoint: str,
    ) -> None:
        self._view = view
        self._peers = peers
        self._crew = crew
        self.engine = RdmaEngine(config, engine_id=incarnation, connect=self._connect)
        self._local = self.engine.register(view)
        self.memory: RdmaMemory = self._local.describe(incarnation, endpoint)

    async def read_in(self, copies: Sequence[Copy], source: RdmaMemory) -> None:
        """Fetch all of *copies* from *source*. Raises TransferError, SliceLost or ChecksumMismatch.

        Returns, also when cancelled, only after the last byte was written.
        """
        for copy in copies:
            if not 0 <= copy.source_offset <= source.size_bytes - copy.destination.size_bytes:
                raise SliceLost(
                    f"source offset {copy.source_offset} lies outside the arena of {source.size_bytes} bytes"
                )
        pieces = [
            Piece(
                local_offset=copy.destination.offset,
                remote_offset=copy.source_offset,
                size_bytes=copy.destination.size_bytes,
            )
            for copy in copies
        ]
        await self.engine.read(self._local, source, joined(pieces))
        await self._crew.run(partial(_verify, copies, self._view))

    def close(self) -> None:
        self.engine.close()

    async def _connect(self, owner: RdmaMemory, request: ConnectQp) -> QpConnected:
        return await self._peers.get(owner.endpoint).call(request, QpConnected, timeout_s=_CONNECT_TIMEOUT_S)


def _verify(copies: Sequence[Copy], view: memoryview) -> None:
    for copy in copies:
        place = copy.destination
        if copy.checksum is not None:
            found = checksum(view[place.offset : place.offset + place.size_bytes])
            if found != copy.checksum:
                raise ChecksumMismatch(f"{place.span} arrived damaged")
