"""Memory that is registered with every NIC of an engine, once for its whole life."""

from collections.abc import Mapping

import numpy as np

from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports.rdma.api import RdmaAccess
from mooncake_mesh.messenger.transports.rdma.topology import Affinity
from mooncake_mesh.messenger.transports.rdma.verbs import Adapter, Region
from mooncake_proto.rdma import NicKey, RdmaMemory


class LocalMemory:
    """Registered memory of this process. It stays pinned, and *memory* exported, until :meth:`close`."""

    def __init__(
        self, memory: memoryview, adapters: Mapping[str, Adapter], affinity: Affinity, access: RdmaAccess
    ) -> None:
        self._array = np.frombuffer(memory, np.uint8)
        self.address: int = self._array.ctypes.data
        self.size_bytes = len(memory)
        self.affinity = affinity
        self._regions: dict[str, Region] = {}
        try:
            for name in (*affinity.preferred, *affinity.secondary):
                self._regions[name] = adapters[name].register(self.address, self.size_bytes, access)
        except TransferError:
            self.close()
            raise

    def lkey(self, nic: str) -> int:
        return self._regions[nic].lkey

    def describe(self, engine: str, endpoint: str) -> RdmaMemory:
        """What the other end has to know. *endpoint* is where *engine* answers ConnectQp."""

        def keys(names: tuple[str, ...]) -> tuple[NicKey, ...]:
            return tuple(NicKey(nic=name, rkey=self._regions[name].rkey) for name in names)

        return RdmaMemory(
            engine=engine,
            endpoint=endpoint,
            address=self.address,
            size_bytes=self.size_bytes,
            preferred=keys(self.affinity.preferred),
            secondary=keys(self.affinity.secondary),
        )

    def close(self) -> None:
        """Let go of the memory. No transfer may use it any more."""
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._array = np.empty(0, np.uint8)


def affinity_of(memory: RdmaMemory) -> Affinity:
    """The NICs of the other end's memory."""
    return Affinity(
        preferred=tuple(key.nic for key in memory.preferred), secondary=tuple(key.nic for key in memory.secondary)
    )
