"""The SSD tier at work: tasks and threads around :mod:`mooncake_mesh.messenger.store.tiering`.

One task moves blocks out, ahead of need; reads run two at a time. Nothing here can fail a request: every fault of the
disk ends in a block that is not found, is counted, and is logged the first time of its kind.
"""

import asyncio
import errno
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, Final, TypeVar

import structlog

from mooncake_mesh.kv.block_pool import BlockPool
from mooncake_mesh.mesh.bell import Bell
from mooncake_mesh.messenger.store.block_file import BlockFile, Fault, Mismatch, SlotBytes, slot_bytes_of
from mooncake_mesh.messenger.store.folder import StoreFolder
from mooncake_mesh.messenger.store.records import Namespace, SlotRecord
from mooncake_mesh.messenger.store.slots import SlotTable, SlotWrite
from mooncake_mesh.messenger.store.staging import Staging
from mooncake_mesh.messenger.store.tiering import Coming, Leaving, Target, Tiering
from mooncake_proto.ids import BlockId

log = structlog.get_logger(__name__)

_T = TypeVar("_T")

_READERS: Final = 2
_RATE_WEIGHT: Final = 0.2
_ROOM_S: Final = 0.25
"""Longest time that a job waits for blocks to be copied out; after it the pool drops what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    leaving: Leaving
    write: SlotWrite
    slot: SlotBytes


class SsdTier:
    """The second tier of one pool. *changed* is called after either tier changed. All methods on the event loop."""

    def __init__(
        self,
        pool: BlockPool,
        arena: memoryview,
        folder: StoreFolder,
        namespace: Namespace,
        size_bytes: int,
        *,
        changed: Callable[[], None],
    ) -> None:
        self.slots = SlotTable(max(1, size_bytes // slot_bytes_of(namespace.block_bytes)))
        self.demoted_blocks = 0
        self.promoted_blocks = 0
        self.faults = 0
        self.read_bytes_per_s = 0.0
        self._pool = pool
        self._arena = arena
        self._folder = folder
        self._namespace = namespace
        self._size_bytes = size_bytes
        self._changed = changed
        self._tiering = Tiering(pool, self.slots)
        self._file: BlockFile | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._threads = ThreadPoolExecutor(_READERS + 1, thread_name_prefix="ssd")
        self._readers: asyncio.Queue[Staging] = asyncio.Queue()
        self._wake = asyncio.Event()
        self._passed = Bell()
        self._is_moving = False
        self._asked_free = 0
        self._spare: set[BlockId] = set()
        self._to_save: dict[BlockId, None] = {}
        self._staged = 0
        self._told: set[str] = set()

    async def run(self) -> None:
        """Open the folder, take over what it holds, and move blocks out until cancelled. Reads end with it."""
        try:
            file = await self._on_thread(self._folder.open, self._namespace, self._size_bytes)
            records = await self._on_thread(file.records)
        except OSError as error:
            self.faults += 1
            log.error("ssd_tier_off", path=str(self._folder.path), error=str(error))
            return
        self.slots.found(records)
        for _ in range(_READERS):
            self._readers.put_nowait(Staging(self._namespace.block_bytes))
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks, self._file = tasks, file
                tasks.create_task(self._adopt(file, records))
                await self._keep_moving_out(file, Staging(self._namespace.block_bytes))
        finally:
            self._tasks, self._file = None, None

    def close(self) -> None:
        """Wait for the threads, then give up the folder. Once :meth:`run` has ended."""
        self._threads.shutdown()
        self._folder.close()

    # --- out ----------------------------------------------------------------------------------------------------------

    def pool_changed(self) -> None:
        """More of the pool may be in use than should be."""
        if self._tiering.excess():
            self._wake.set()

    def save(self, blocks: Sequence[BlockId]) -> None:
        """Write *blocks* when nothing else is to be written; they stay in the arena. Free for those that SSD has."""
        if self._file is not None and not self._tiering.has_given_up:
            self._to_save.update(dict.fromkeys(blocks))
            self._wake.set()

    async def make_room(self, n_blocks: int, spare: Collection[BlockId]) -> None:
        """Return when the pool can give *n_blocks* without losing any, or nothing more can be moved, or it takes long.

        Blocks in *spare* are about to be held, and not moved for this.
        """
        if self._file is None or self._pool.free_blocks >= n_blocks or self._tiering.has_given_up:
            return
        self._asked_free = max(self._asked_free, n_blocks)
        self._spare.update(spare)
        self._is_moving = True
        self._wake.set()

        def has_room() -> bool | None:
            return True if self._pool.free_blocks + self._staged >= n_blocks or not self._is_moving else None

        try:
            async with asyncio.timeout(_ROOM_S):
                await self._passed.until(has_room)
        except TimeoutError:
            self._tell("slow", event="ssd_slow", waited_s=_ROOM_S)

    async def _keep_moving_out(self, file: BlockFile, staging: Staging) -> None:
        """What should leave goes first; nobody waits for what is only saved."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                self._is_moving = True
                while await self._move_out(file, staging):
                    continue
                self._asked_free = 0
                self._spare.clear()
                self._is_moving = False
                self._passed.ring()
                if not await self._save_some(file, staging):
                    break

    async def _move_out(self, file: BlockFile, staging: Staging) -> bool:
        """Move out what should leave now; whether anything did."""
        free_before = self._pool.free_blocks
        leaving = self._tiering.leaving(max(self._tiering.excess(), self._asked_free - free_before), spare=self._spare)
        has_freed = self._pool.free_blocks > free_before
        if has_freed:
            self._changed()
        n_written = 0
        for start in range(0, len(leaving), len(staging.slots)):
            n_written += await self._move(leaving[start : start + len(staging.slots)], file, staging)
        return has_freed or n_written > 0

    async def _save_some(self, file: BlockFile, staging: Staging) -> bool:
        """Write the next of the blocks to save; whether there were any."""
        blocks = list(islice(self._to_save, len(staging.slots)))
        if blocks:
            await self._move(self._tiering.saving(blocks), file, staging)
        for block in blocks:
            del self._to_save[block]
        return bool(blocks)

    async def _move(self, leaving: Sequence[Leaving], file: BlockFile, staging: Staging) -> int:
        """Write one batch, which need not leave; how many blocks were written."""
        checksums = await self._on_thread(staging.copy_out, self._arena, [one.block for one in leaving])
        placed = []
        for one, checksum, buffer in zip(leaving, checksums, staging.slots, strict=False):
            write = self._tiering.copied(one)
            if write is not None:
                record = SlotRecord(slot=write.slot, key=write.key, checksum=checksum, seq=write.seq)
                placed.append(_Placed(leaving=one, write=write, slot=SlotBytes(record=record, buffer=buffer)))
        self._staged = len(placed)
        self._passed.ring()
        faults = await self._on_thread(file.write, [item.slot for item in placed])
        self._staged = 0
        for item, fault in zip(placed, faults, strict=True):
            if fault is None:
                self._tiering.written(item.leaving, item.write, item.slot.record.checksum)
            else:
                self._tiering.write_failed(item.write)
                self._fault("write", fault, item.write.slot)
        n_written = sum(fault is None for fault in faults)
        self.demoted_blocks += n_written
        if self._tiering.has_given_up:
            self._tell("given up", event="ssd_writes_stopped", path=str(self._folder.path))
        if n_written:
            self._changed()
        self._passed.ring()
        return n_written

    # --- in -----------------------------------------------------------------------------------------------------------

    async def promote(self, target: Target) -> int:
        """Read the prefix of *target*, as far as it is here, into its blocks; how many of them hold KV now.

        A caller that is cancelled leaves the reading to end by itself: the pool hears of the last byte.
        """
        file, tasks = self._file, self._tasks
        if file is None or tasks is None:
            return 0
        coming = self._tiering.coming(target.blocks, target.keys)
        if not coming:
            return 0
        return await asyncio.shield(tasks.create_task(self._read(target.holder, coming, file)))

    async def _read(self, holder: str, coming: Sequence[Coming], file: BlockFile) -> int:
        began_s = monotonic()
        size = min(Staging.slots_for(self._namespace.block_bytes), -(-len(coming) // _READERS))
        batches = [coming[start : start + size] for start in range(0, len(coming), size)]
        outcomes = await asyncio.gather(*(self._read_batch(batch, file) for batch in batches))
        faults = [fault for batch in outcomes for fault in batch]
        for one, fault in zip(coming, faults, strict=True):
            if fault is not None:
                self._fault("read", fault, one.record.slot)
                await self._erase(file, one.record.slot)
        n_good = self._tiering.came(holder, coming, [fault is None for fault in faults])
        self.promoted_blocks += n_good
        self._note_rate(len(coming) * self._namespace.block_bytes, monotonic() - began_s)
        self._changed()
        return n_good

    def _note_rate(self, n_bytes: int, elapsed_s: float) -> None:
        """Of late, with the time that reads wait for each other: what a job waits for its bytes is what counts."""
        rate = n_bytes / max(elapsed_s, 1e-6)
        known = self.read_bytes_per_s
        self.read_bytes_per_s = rate if not known else known + _RATE_WEIGHT * (rate - known)

    async def _read_batch(self, coming: Sequence[Coming], file: BlockFile) -> list[Fault | None]:
        staging = await self._readers.get()
        try:
            return await self._on_thread(self._fetch, coming, file, staging)
        finally:
            self._readers.put_nowait(staging)

    def _fetch(self, coming: Sequence[Coming], file: BlockFile, staging: Staging) -> list[Fault | None]:
        """On a thread: read and verify, then copy what is whole into the arena."""
        faults = file.read(_into(staging, [one.record for one in coming]))
        for position, (one, fault) in enumerate(zip(coming, faults, strict=True)):
            if fault is None:
                staging.copy_in(self._arena, one.block, position)
        return faults

    async def _adopt(self, file: BlockFile, records: Sequence[SlotRecord]) -> None:
        """Take over, newest first, the blocks of the last life that are still whole."""
        n_torn = 0
        size = Staging.slots_for(self._namespace.block_bytes)
        for start in range(0, len(records), size):
            batch = records[start : start + size]
            staging = await self._readers.get()
            try:
                faults = await self._on_thread(file.read, _into(staging, batch))
            finally:
                self._readers.put_nowait(staging)
            for record, fault in zip(batch, faults, strict=True):
                if fault is None:
                    self.slots.verified(record.slot)
                    continue
                n_torn += 1
                self.slots.torn(record.slot)
                self._fault("read", fault, record.slot)
            self._changed()
        log.info(
            "ssd_adopted",
            path=str(self._folder.path),
            slots=self.slots.n_slots,
            found=len(records),
            torn=n_torn,
        )

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _erase(self, file: BlockFile, slot: int) -> None:
        fault = await self._on_thread(file.erase, slot)
        if fault is not None:
            self._fault("erase", fault, slot)

    def _fault(self, operation: str, fault: Fault, slot: int) -> None:
        """Count a fault; log the first of its kind."""
        self.faults += 1
        if isinstance(fault, Mismatch):
            kind, error = fault.value, "the slot holds other bytes than were written"
        else:
            kind, error = errno.errorcode.get(fault.errno or 0, "EIO"), str(fault)
        self._tell(f"{operation} {kind}", event="ssd_fault", operation=operation, slot=slot, kind=kind, error=error)

    def _tell(self, once: str, *, event: str, **facts: object) -> None:
        if once not in self._told:
            self._told.add(once)
            log.warning(event, **facts)

    async def _on_thread(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _into(staging: Staging, records: Sequence[SlotRecord]) -> list[SlotBytes]:
    return [SlotBytes(record=record, buffer=buffer) for record, buffer in zip(records, staging.slots, strict=False)]
