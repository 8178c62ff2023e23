"""One-sided transfers between registered memories, over any number of NICs; everything on one event loop.

A transfer is cut into slices that are spread over the paths to the other end; one that fails is tried on another path.
Queue pairs are made when a path is first used and kept for the next transfer. A failure closes the queue pair at once:
that is what makes it safe to return, as no NIC touches memory for a queue pair that is gone. What else it carried is
tried again, over a new one.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path as FilePath
from time import monotonic
from typing import Final
from weakref import WeakValueDictionary

import structlog

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import MooncakeError, TransferError
from mooncake_mesh.messenger.transports.rdma.api import Connect, Notice, RdmaAccess, Verb
from mooncake_mesh.messenger.transports.rdma.batch import Batch, Blame, Piece, Slice, cut
from mooncake_mesh.messenger.transports.rdma.devices import SYSFS, read_devices
from mooncake_mesh.messenger.transports.rdma.endpoint import Endpoint, Numbers, Transfer
from mooncake_mesh.messenger.transports.rdma.memory import LocalMemory, affinity_of
from mooncake_mesh.messenger.transports.rdma.paths import Path, PathHealth, tiers
from mooncake_mesh.messenger.transports.rdma.selection import choose_nics
from mooncake_mesh.messenger.transports.rdma.sieve import SieveMap
from mooncake_mesh.messenger.transports.rdma.topology import from_file, from_numa, location_of
from mooncake_mesh.messenger.transports.rdma.verbs import RECEIVES, Adapter, Completion, QueuePair
from mooncake_proto.rdma import ConnectQp, QpConnected, RdmaMemory

log = structlog.get_logger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0
_DRAIN_S: Final = 1.0


class RdmaEngine:
    """Opens the NICs of *config* and needs a running event loop. Raises TransferError (NoUsableNic, BadTopology).

    *engine_id* must be new for every engine that ever talks to the same others. *access* is what others may do with
    memory registered here at most; *on_notice* hears of their notices.
    """

    def __init__(
        self,
        config: RdmaConfig,
        *,
        engine_id: str,
        connect: Connect,
        access: RdmaAccess = RdmaAccess.READ,
        on_notice: Callable[[Notice], None] | None = None,
        sysfs: FilePath = SYSFS,
    ) -> None:
        self.engine_id = engine_id
        self._config = config
        self._connect = connect
        self._access = access
        self._on_notice = on_notice
        nics = choose_nics(read_devices(sysfs), config)
        self._topology = from_numa(nics) if config.topology is None else from_file(config.topology, nics)
        self._location = config.location or location_of(os.sched_getaffinity(0), sysfs)
        self._health = PathHealth(config.path_rest_s)
        self._numbers = Numbers()
        self._connecting: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()
        self._endpoints: SieveMap[Path, Endpoint] = SieveMap(
            config.max_queue_pairs, may_evict=lambda endpoint: endpoint.is_idle
        )
        self._answering: SieveMap[tuple[str, str, str], QueuePair] = SieveMap(config.max_queue_pairs)
        self._is_closed = False
        self._memories: list[LocalMemory] = []
        self._adapters: dict[str, Adapter] = {}
        depth = config.max_queue_pairs * (config.window + RECEIVES)
        for nic in nics:
            adapter = self._adapters[nic.name] = Adapter(nic, config, max_outstanding=depth)
            asyncio.get_running_loop().add_reader(adapter.fd, self._on_completions, adapter)
        self.nics = nics

    def register(self, memory: memoryview, access: RdmaAccess = RdmaAccess.READ) -> LocalMemory:
        """Pin *memory* for the NICs near it and those that may stand in. Takes time: once for an arena, not a transfer.

        Raises TransferError, mostly for the limit of locked memory.
        """
        local = LocalMemory(memory, self._adapters, self._topology.near(self._location), access)
        self._memories.append(local)
        return local

    def accept(self, request: ConnectQp) -> QpConnected:
        """Make our end of a connection that another engine reads or writes through. Raises TransferError.

        Its former end between the same two NICs is closed. The oldest of all is, when there are too many; its owner
        connects again.
        """
        adapter = self._adapters.get(request.peer_nic)
        if adapter is None:
            raise TransferError(f"no NIC {request.peer_nic} here; there are {', '.join(self._adapters)}")
        pair = adapter.queue_pair(self._access, depth=1)
        try:
            pair.connect(request.end)
            if self._on_notice is not None:
                pair.post_receives(RECEIVES)
        except TransferError:
            pair.close()
            raise
        for old in self._answering.put((request.engine, request.nic, request.peer_nic), pair):
            old.close()
        return QpConnected(end=pair.end)

    async def read(self, local: LocalMemory, remote: RdmaMemory, pieces: Sequence[Piece]) -> None:
        """Fetch *pieces* of *remote* into *local*. Raises TransferError; what has arrived then is undefined.

        Returns, also when it fails or is cancelled, only when no NIC writes into *local* any more.
        """
        await self._move(Verb.READ, local, remote, pieces)

    async def write(
        self, local: LocalMemory, remote: RdmaMemory, pieces: Sequence[Piece], *, notice: int | None = None
    ) -> None:
        """Put *pieces* of *local* into *remote*; then, with *notice*, tell its owner that number (32 bits).

        The notice is sent when everything has arrived. Raises TransferError, also for a notice that may be lost.
        """
        await self._move(Verb.WRITE, local, remote, pieces)
        if notice is not None:
            sign = [Slice(number=0, local_offset=0, remote_offset=0, size_bytes=0)]
            await self._run(Verb.WRITE_WITH_IMM, local, remote, sign, attempts=1, immediate=notice)

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Connected queue pairs that our transfers go out on."""
        return tuple(self._endpoints)

    def close(self) -> None:
        """End everything; running transfers fail."""
        self._is_closed = True
        for endpoint in self.endpoints:
            self._break(endpoint, "the engine was closed")
        for pair in self._answering:
            pair.close()
        for local in self._memories:
            local.close()
        for adapter in self._adapters.values():
            asyncio.get_running_loop().remove_reader(adapter.fd)
            adapter.close()
        self._adapters.clear()

    # --- a transfer ---------------------------------------------------------------------------------------------------

    async def _move(self, verb: Verb, local: LocalMemory, remote: RdmaMemory, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if not (
                0 <= piece.local_offset <= local.size_bytes - piece.size_bytes
                and 0 <= piece.remote_offset <= remote.size_bytes - piece.size_bytes
            ):
                raise TransferError(f"rdma: {piece} lies outside the memories")
        slices = cut(pieces, self._config.slice_bytes)
        await self._run(verb, local, remote, slices, attempts=self._config.attempts)

    async def _run(
        self,
        verb: Verb,
        local: LocalMemory,
        remote: RdmaMemory,
        slices: Sequence[Slice],
        *,
        attempts: int,
        immediate: int = 0,
    ) -> None:
        paths = tiers(remote.engine, local.affinity, affinity_of(remote))
        batch = Batch(slices, paths, self._health, window=self._config.window, attempts=attempts)
        transfer = Transfer(verb=verb, batch=batch, local=local, remote=remote, immediate=immediate)
        try:
            await self._drive(transfer)
        finally:
            await self._settle(transfer)
        if batch.failure is not None:
            raise TransferError(f"rdma: {batch.failure}")

    async def _drive(self, transfer: Transfer) -> None:
        batch = transfer.batch
        while True:
            transfer.wake.clear()
            for path, slices in batch.take(monotonic()):
                try:
                    endpoint = await self._endpoint(path, transfer.remote)
                except TransferError as error:
                    log.warning("rdma_path_failed", path=path, error=str(error))
                    for piece in slices:
                        batch.failed(piece.number, path, Blame.PATH, str(error), monotonic())
                    transfer.wake.set()
                    continue
                endpoint.add(transfer, slices)
                self._pump(endpoint)
                if batch.all_sent:  # a small one may be done already; a large one has to let others run
                    self._finish(self._adapters[path.local_nic].poll())
            if batch.is_over:
                return
            await transfer.wake.wait()

    async def _settle(self, transfer: Transfer) -> None:
        """After an interrupted transfer: wait a little for what is on its way, then cut it off."""
        for endpoint in transfer.endpoints:
            endpoint.withdraw(transfer)
        if not transfer.in_flight:
            return
        transfer.batch.give_up("interrupted")
        try:
            async with asyncio.timeout(_DRAIN_S):
                while transfer.in_flight:
                    transfer.wake.clear()
                    await transfer.wake.wait()
        except TimeoutError:
            log.warning("rdma_drain_timeout", peer=transfer.remote.engine)
        finally:
            for endpoint in transfer.endpoints:
                if endpoint.carries(transfer):
                    self._break(endpoint, "a transfer was interrupted")

    def _pump(self, endpoint: Endpoint) -> None:
        try:
            endpoint.pump(self._numbers)
        except TransferError as error:
            self._break(endpoint, str(error), Blame.PATH)

    # --- connections --------------------------------------------------------------------------------------------------

    async def _endpoint(self, path: Path, remote: RdmaMemory) -> Endpoint:
        """The connection of a path, made when it is missing. Raises TransferError."""
        endpoint = self._endpoints.get(path)
        if endpoint is not None:
            return endpoint
        lock = self._connecting.setdefault(path, asyncio.Lock())
        async with lock:
            endpoint = self._endpoints.get(path)
            if endpoint is None:
                endpoint = await self._open(path, remote)
                for old in self._endpoints.put(path, endpoint):
                    self._break(old, "evicted")
            return endpoint

    async def _open(self, path: Path, remote: RdmaMemory) -> Endpoint:
        if self._is_closed:
            raise TransferError("the engine was closed")
        pair = self._adapters[path.local_nic].queue_pair(RdmaAccess.NONE, depth=self._config.window)
        request = ConnectQp(engine=self.engine_id, nic=path.local_nic, peer_nic=path.remote_nic, end=pair.end)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                answer = await self._connect(remote, request)
            pair.connect(answer.end)
        except TimeoutError as error:
            pair.close()
            raise TransferError(f"{remote.endpoint} did not connect within {_CONNECT_TIMEOUT_S:g} s") from error
        except MooncakeError as error:
            pair.close()
            raise TransferError(f"{remote.endpoint}: {error}") from error
        except BaseException:
            pair.close()
            raise
        log.info("rdma_connected", peer=path.peer, nic=path.local_nic, peer_nic=path.remote_nic, qp_num=pair.qp_num)
        return Endpoint(path, pair, self._config.window)

    def _break(self, endpoint: Endpoint, why: str, blame: Blame = Blame.NEIGHBOUR) -> None:
        """Close a connection; what it still carried has failed, for *blame*."""
        if endpoint.is_broken:
            return
        if self._endpoints.get(endpoint.path) is endpoint:
            self._endpoints.pop(endpoint.path)
        numbers, left = endpoint.abandon()
        for number in numbers:
            self._numbers.take(number)
        for transfer, piece in left:
            transfer.batch.failed(piece.number, endpoint.path, blame, why, monotonic())
            transfer.wake.set()

    # --- completions --------------------------------------------------------------------------------------------------

    def _on_completions(self, adapter: Adapter) -> None:
        self._finish(adapter.completions())

    def _finish(self, completions: Iterable[Completion]) -> None:
        """What has completed, and then what there is room for now."""
        touched: dict[Endpoint, None] = {}
        for completion in completions:
            if completion.immediate is not None:
                self._noticed(completion)
                continue
            endpoint = self._numbers.take(completion.number)
            if endpoint is None:
                continue
            self._completed(endpoint, completion)
            touched[endpoint] = None
        for endpoint in touched:
            if not endpoint.is_broken:
                self._pump(endpoint)

    def _completed(self, endpoint: Endpoint, completion: Completion) -> None:
        transfer, piece = endpoint.finished(completion.number)
        if not completion.error:
            transfer.batch.arrived(piece.number, endpoint.path)
        else:
            log.warning("rdma_failed", path=endpoint.path, error=completion.error)
            blame = Blame.REQUEST if completion.is_refusal else Blame.PATH
            transfer.batch.failed(piece.number, endpoint.path, blame, completion.error, monotonic())
            self._break(endpoint, completion.error)
        transfer.wake.set()

    def _noticed(self, completion: Completion) -> None:
        for (engine, _, _), pair in self._answering.items():
            if pair.qp_num == completion.qp_num:
                pair.post_receives(1)
                if self._on_notice is not None and completion.immediate is not None:
                    self._on_notice(Notice(engine=engine, number=completion.immediate))
                return
