"""The node's SSD tier as the messenger's service uses it: also where there is none, or not yet."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from mooncake_mesh.config import MessengerConfig
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.core import MessengerCore
from mooncake_mesh.messenger.store.folder import StoreFolder
from mooncake_mesh.messenger.store.records import Namespace
from mooncake_mesh.messenger.store.tier import SsdTier
from mooncake_mesh.messenger.store.tiering import Target
from mooncake_proto.control import Load
from mooncake_proto.ids import BlockId
from mooncake_proto.transfer import Acquire, Acquired

log = structlog.get_logger(__name__)


class NodeSsd:
    """Locks the configured folder at once; there are blocks to keep once :meth:`start` was called.

    ``refusal`` says why the process must end: the folder's blocks are not this model's, and only its user can say which
    of the two is wrong. That is known as late as when the first worker has said what its blocks are.
    """

    def __init__(self, config: MessengerConfig) -> None:
        """Raises ConfigError where another messenger has the folder."""
        self._size_bytes = config.ssd_bytes
        self._folder = _lock(config.ssd_dir)
        self._tier: SsdTier | None = None
        self._running: asyncio.Task[None] | None = None
        self.refusal: ConfigError | None = None

    def check(self, namespace: Namespace) -> None:
        """Raise ConfigError, and keep it as ``refusal``, if the folder holds other blocks than *namespace* has."""
        if self._folder is None:
            return
        try:
            self._folder.check(namespace)
        except ConfigError as error:
            self.refusal = error
            raise

    def start(
        self,
        core: MessengerCore,
        arena: memoryview,
        namespace: Namespace,
        tasks: asyncio.TaskGroup,
        *,
        changed: Callable[[], None],
    ) -> None:
        """The arena is cut: move blocks of *core* from now on. *changed* is called after either tier changed."""
        if self._folder is None:
            return
        self._tier = SsdTier(core.pool, arena, self._folder, namespace, self._size_bytes, changed=changed)
        core.slots = self._tier.slots
        self._running = tasks.create_task(self._tier.run())

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if self._tier is not None:
            self._tier.close()
        elif self._folder is not None:
            self._folder.close()

    def pool_changed(self) -> None:
        """The arena may have become too full."""
        if self._tier is not None:
            self._tier.pool_changed()

    def save(self, blocks: Sequence[BlockId]) -> None:
        """Have a copy of *blocks*, which stay where they are: a killed messenger's successor finds it."""
        if self._tier is not None:
            self._tier.save(blocks)

    async def make_room(self, core: MessengerCore, request: Acquire) -> None:
        """Let blocks leave for *request*, rather than be dropped; waits for that a moment at most."""
        if self._tier is not None:
            cached = core.cached_prefix(request)
            await self.make_room_for(request.n_blocks - len(cached), cached)

    async def make_room_for(self, n_blocks: int, spare: Sequence[BlockId]) -> None:
        """As :meth:`make_room`, for *n_blocks* beside those in *spare*."""
        if self._tier is not None:
            await self._tier.make_room(n_blocks, spare=spare)

    async def promoted(self, core: MessengerCore, request: Acquire, acquired: Acquired) -> Acquired:
        """What was acquired, with the blocks that SSD has read into it."""
        if self._tier is None:
            return acquired
        n_blocks = await self._tier.promote(core.promotion(request, acquired))
        return replace(acquired, cached_blocks=acquired.cached_blocks + n_blocks)

    async def read(self, target: Target) -> None:
        """Fill *target* as far as SSD can."""
        if self._tier is not None:
            await self._tier.promote(target)

    def counted(self, load: Load) -> Load:
        """*load* with what this tier has to report."""
        if self._tier is None:
            return load
        slots = self._tier.slots
        return replace(
            load,
            ssd_blocks=slots.held_blocks,
            ssd_slots=slots.n_slots,
            ssd_faults=self._tier.faults,
            ssd_bytes_per_s=self._tier.read_bytes_per_s,
        )


def _lock(ssd_dir: Path | None) -> StoreFolder | None:
    """Without a disk that works the node serves on."""
    if ssd_dir is None:
        return None
    try:
        return StoreFolder.lock(ssd_dir)
    except OSError as error:
        log.error("ssd_tier_off", path=str(ssd_dir), error=str(error))
        return None
