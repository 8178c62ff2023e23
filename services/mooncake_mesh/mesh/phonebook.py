"""Connections to peers by endpoint, made on demand and kept."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Ping, Pong

_MAX_PEERS: Final = 1024


class Phonebook:
    """One RpcClient for each endpoint; the longest unused one is closed when there are too many."""

    def __init__(self, *, on_lost: Callable[[str], None] | None = None, max_peers: int = _MAX_PEERS) -> None:
        self._clients: OrderedDict[str, RpcClient] = OrderedDict()
        self._on_lost = on_lost
        self._max_peers = max_peers

    def get(self, endpoint: str) -> RpcClient:
        """The client for *endpoint*. Raises MeshError for an address ZeroMQ does not take."""
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = RpcClient(endpoint, on_lost=lambda: self._lost(endpoint))
            if len(self._clients) > self._max_peers:
                self._clients.popitem(last=False)[1].close()
        self._clients.move_to_end(endpoint)
        return client

    async def reach(self, endpoint: str, *, timeout_s: float = 2.0) -> RpcClient:
        """As :meth:`get`, once the connection stands, so that a ``post`` will not fail for want of it.

        Raises PeerUnreachable or CallTimeout.
        """
        client = self.get(endpoint)
        if not client.is_connected:
            await client.call(Ping(), Pong, timeout_s=timeout_s)
        return client

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _lost(self, endpoint: str) -> None:
        if self._on_lost is not None:
            self._on_lost(endpoint)
