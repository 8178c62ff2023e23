"""What a stress run does to its messengers from outside: no hook in them helps.

The first node is never killed, and its disk never refuses a write: it has to live through all that happens to the
others, with as many descriptors and as much memory at the end as at the start.
"""

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from bench.stress_books import Ledger
from bench.stress_nodes import N_SLOTS, SLOT_BYTES, Node, Worker
from mooncake_mesh.messenger.store.records import PAGE_BYTES, RECORD_BYTES, record_offset

_STALL_S: Final = 1.0
_FULL_S: Final = 1.0
_DOWN_S: Final = (0.0, 0.0, 0.3)


_T = TypeVar("_T")


class _Deck(Generic[_T]):
    """Deals every card once in random order, then all again: no run is without some kind of fault by chance.

    The cards in *first* come before all others, in their order.
    """

    def __init__(self, rng: random.Random, cards: Sequence[_T], *, first: Sequence[_T] = ()) -> None:
        self._rng = rng
        self._cards = cards
        self._left = list(reversed(first))

    def deal(self) -> _T:
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


class Harm:
    """Injects faults, one at a time. *replace* starts a new worker in the place of a dead one."""

    def __init__(
        self, rng: random.Random, nodes: Sequence[Node], ledger: Ledger, replace: Callable[[Worker], None]
    ) -> None:
        self.rng = rng
        self._nodes = nodes
        self._ledger = ledger
        self._replace = replace
        self._faults = _Deck(
            rng,
            [
                *[self.kill] * 4,
                *[self.stall] * 3,
                *[self.lose_worker] * 3,
                *[self.flip_bytes] * 2,
                *[self.fill_disk] * 2,
                self.swap_blocks,
                self.cut_off_blocks,
                self.punch_hole,
            ],
            first=[self.stall, self.lose_worker, self.flip_bytes, self.fill_disk, self.kill],
        )
        self._folder_harms: _Deck[tuple[str, Callable[[Path], None]]] = _Deck(
            rng,
            [
                *[("", _nothing)] * 3,
                ("bytes flipped in the block file", self._flip_many),
                ("slot table torn", self._tear_table),
                ("records of the slot table copied to others", self._copy_records),
                ("superblock damaged", self._flip_superblock),
                ("block file truncated", _truncate),
                ("block file cannot be opened", _make_unreadable),
                ("slot table cannot be opened", _make_table_unreadable),
            ],
        )

    async def step(self) -> None:
        """One fault, to its end."""
        await self._faults.deal()()

    # --- processes ----------------------------------------------------------------------------------------------------

    async def kill(self) -> None:
        """SIGKILL in the middle of anything, perhaps harm to the folder, and a new life on it."""
        node = self._mortal()
        node.check_alive()
        self._begin(node, "kill -9")
        node.kill()
        self._harm_folder(node)
        await asyncio.sleep(self.rng.choice(_DOWN_S))
        node.start()
        await node.answers()
        self._end(node, "restarted")

    async def stall(self) -> None:
        node = self.rng.choice(self._nodes)
        self._begin(node, "SIGSTOP")
        os.kill(node.pid, signal.SIGSTOP)
        await asyncio.sleep(_STALL_S)
        os.kill(node.pid, signal.SIGCONT)
        self._end(node, "SIGCONT")

    async def lose_worker(self) -> None:
        """A worker dies with all its jobs, in the middle of whatever they do; another takes its place."""
        node = self.rng.choice(self._nodes)
        worker = self.rng.choice(node.workers)
        self._begin(node, "a worker dies")
        worker.die()
        self._replace(worker)
        self._end(node, "a worker takes its place")

    # --- disks --------------------------------------------------------------------------------------------------------

    async def flip_bytes(self) -> None:
        """Some bits of a few blocks change on the medium."""
        node = self.rng.choice(self._nodes)
        if not _is_whole(node.ssd):
            return
        self._begin(node, "bytes flipped in the block file")
        for _ in range(self.rng.randint(1, 3)):
            _flip(node.ssd / "blocks.dat", self.rng.randrange(N_SLOTS * SLOT_BYTES))
        self._end(node, "")

    async def swap_blocks(self) -> None:
        """Two blocks change places: each is whole, and wrong."""
        node = self._mortal()
        if not _is_whole(node.ssd):
            return
        self._begin(node, "two blocks swapped in the file")
        one, two = self.rng.sample(range(N_SLOTS), 2)
        with (node.ssd / "blocks.dat").open("r+b") as file:
            contents = [_read(file.fileno(), slot * SLOT_BYTES, SLOT_BYTES) for slot in (one, two)]
            os.pwrite(file.fileno(), contents[1], one * SLOT_BYTES)
            os.pwrite(file.fileno(), contents[0], two * SLOT_BYTES)
        self._end(node, "")

    async def cut_off_blocks(self) -> None:
        """Reads beyond the new end of the file fail, writes there extend it again."""
        node = self._mortal()
        if not _is_whole(node.ssd):
            return
        self._begin(node, "block file truncated")
        os.truncate(node.ssd / "blocks.dat", self.rng.randrange(N_SLOTS * SLOT_BYTES))
        self._end(node, "")

    async def punch_hole(self) -> None:
        """A range of the file reads as zeros."""
        node = self._mortal()
        if not _is_whole(node.ssd):
            return
        self._begin(node, "zeros over a range of the block file")
        first = self.rng.randrange(N_SLOTS)
        with (node.ssd / "blocks.dat").open("r+b") as file:
            os.pwrite(file.fileno(), bytes(4 * SLOT_BYTES), first * SLOT_BYTES)
        self._end(node, "")

    async def fill_disk(self) -> None:
        """Writes beyond some place fail for a while: in the block file, or in the slot table as well."""
        node = self._mortal()
        most = self.rng.choice([N_SLOTS * SLOT_BYTES, record_offset(N_SLOTS)])
        self._begin(node, "writes fail")
        node.limit_files(self.rng.randrange(most))
        await asyncio.sleep(_FULL_S)
        node.limit_files(-1)
        self._end(node, "writes succeed again")

    def _harm_folder(self, node: Node) -> None:
        """While its messenger is down."""
        _mend(node.ssd)
        what, harm = self._folder_harms.deal()
        if what and _is_whole(node.ssd):
            harm(node.ssd)
            self._count(node, f"{what}, at a restart")

    def _flip_superblock(self, ssd: Path) -> None:
        _flip(ssd / "slots.tbl", self.rng.randrange(8, PAGE_BYTES))

    def _flip_many(self, ssd: Path) -> None:
        for _ in range(40):
            _flip(ssd / "blocks.dat", self.rng.randrange(N_SLOTS * SLOT_BYTES))

    def _tear_table(self, ssd: Path) -> None:
        """The end is lost in the middle of a record, some records before it are half written."""
        with (ssd / "slots.tbl").open("r+b") as file:
            for _ in range(10):
                at = record_offset(self.rng.randrange(N_SLOTS)) + RECORD_BYTES // 2
                os.pwrite(file.fileno(), self.rng.randbytes(RECORD_BYTES // 2), at)
            file.truncate(record_offset(self.rng.randrange(N_SLOTS)) + 17)

    def _copy_records(self, ssd: Path) -> None:
        with (ssd / "slots.tbl").open("r+b") as file:
            for _ in range(10):
                record = _read(file.fileno(), record_offset(self.rng.randrange(N_SLOTS)), RECORD_BYTES)
                os.pwrite(file.fileno(), record, record_offset(self.rng.randrange(N_SLOTS)))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _mortal(self) -> Node:
        return self.rng.choice(self._nodes[1:])

    def _begin(self, node: Node, what: str) -> None:
        node.harm += 1
        self._count(node, what)

    def _count(self, node: Node, what: str) -> None:
        self._ledger.counts[f"fault: {what}"] += 1
        self._ledger.harmed(f"{node.name}: {what}")

    def _end(self, node: Node, what: str) -> None:
        node.harm += 1
        if what:
            self._ledger.harmed(f"{node.name}: {what}")


def _is_whole(ssd: Path) -> bool:
    """Both files are there: no messenger has to make them anew, or works without them."""
    return (ssd / "blocks.dat").is_file() and (ssd / "slots.tbl").is_file()


def _read(fd: int, offset: int, n_bytes: int) -> bytes:
    return os.pread(fd, n_bytes, offset)


def _flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        byte = _read(file.fileno(), offset, 1)
        if byte:  # else the file was cut off before
            os.pwrite(file.fileno(), bytes([byte[0] ^ 0x40]), offset)


def _nothing(_: Path) -> None:
    """Nothing happens to the folder."""


def _truncate(ssd: Path) -> None:
    os.truncate(ssd / "blocks.dat", N_SLOTS * SLOT_BYTES // 3)


def _make_unreadable(ssd: Path) -> None:
    """Permissions do not stop every user; a folder in the place of a file does."""
    (ssd / "blocks.dat").unlink()
    (ssd / "blocks.dat").mkdir()


def _make_table_unreadable(ssd: Path) -> None:
    (ssd / "slots.tbl").unlink()
    (ssd / "slots.tbl").mkdir()


def _mend(ssd: Path) -> None:
    """Take away what an earlier harm put in the place of files."""
    for name in ("blocks.dat", "slots.tbl"):
        if (ssd / name).is_dir():
            shutil.rmtree(ssd / name)
