"""Eviction of the block that is least likely to be used again soon, learned while the pool works.

What decides is how a block came to be where it is. The next turn of a conversation finds the blocks of the turn before
it; a conversation of many turns goes on more surely than a first prompt; the last block of a prompt is hardly ever
found again; nor is the tail that a continuation left behind. Each of these is a *kind*, and
:mod:`~mooncake_mesh.kv.eviction_rates` learns the rate at which blocks of a kind are used, by their age.

To learn from what it evicted too early, and to recognise a conversation that comes back, the policy remembers the keys
of blocks that have left, up to a bound.

Blocks that were last used together, and are of one kind, are a *run*: they have one age. Of each kind, the oldest run
is the next to go, so a victim is found by comparing one run per kind, and then taken block by block, deepest first.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import Final

from mooncake_mesh.kv.eviction_contract import BlockHistory
from mooncake_mesh.kv.eviction_rates import Circumstance, Kind, ReuseLaw, Tally, Watched
from mooncake_proto.ids import BlockId, BlockKey

REMEMBERED: Final = 1 << 16
"""Keys remembered of blocks that are no candidates: about 27 MiB at most."""
_SHARED_USES: Final = 20
_MOST_TIMES: Final = 16


class _Run(Watched):
    """Blocks of one kind with one age. ``blocks`` counts those known, ``candidates`` has those that may go."""

    __slots__ = ("candidates",)

    def __init__(self, tally: Tally, since: int) -> None:
        super().__init__(tally, since)
        self.candidates: dict[BlockId, BlockKey] = {}


class _Known:
    """A block that is here, or was. ``turn``: how many continuations led to it."""

    __slots__ = ("run", "turn", "uses")

    def __init__(self, run: _Run, turn: int) -> None:
        self.run = run
        self.turn = turn
        self.uses = 1


class ReuseEviction:
    """The lowest expected rate of use first.

    O(1) for each block, and O(kinds) for each run that it starts to evict: there are at most 60 kinds.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """*remembered* bounds the keys that are remembered beside those of the candidates and of one chain."""
        self._law = ReuseLaw()
        self._clock = 0
        self._known: dict[BlockKey, _Known] = {}
        self._absent: OrderedDict[BlockKey, None] = OrderedDict()  # known, but no candidates; oldest first
        self._remembered = remembered
        self._run_of: dict[BlockId, _Run] = {}
        self._runs: dict[Tally, OrderedDict[_Run, None]] = {}  # those with candidates, oldest first
        self._victim: _Run | None = None

    def use(self, chain: Sequence[BlockKey]) -> None:
        if not chain:
            return
        self._forget()
        found = [self._known.get(key) for key in chain]
        kind, turn = _kind_of(found)
        self._clock += len(chain)
        self._victim = None
        run, last, shared = (self._new_run(k) for k in (kind, _LAST, _SHARED))
        taken: dict[_Run, int] = {}
        for key, known in zip(chain, found, strict=True):
            here = last if key is chain[-1] else run
            if known is None:
                self._known[key] = _Known(here, turn)
            else:
                if known.uses >= _SHARED_USES:
                    here = shared
                taken[known.run] = taken.get(known.run, 0) + 1
                known.run.blocks -= 1
                known.run = here
                known.uses += 1
            here.blocks += 1
            self._absent[key] = None
        for old, n in taken.items():
            self._law.used(old, n, self._clock)
            if 0 < old.blocks <= 3 * n and old.tally.kind != _LEFT:
                self._leave(old)
        for new in (last, run, shared):
            if new.blocks:
                self._law.watch(new)
        self._law.advance(self._clock)

    def insert(self, block: BlockId, history: BlockHistory) -> None:
        run = self._known[history.key].run
        self._absent.pop(history.key, None)
        if not run.candidates:
            self._list_of(run)[run] = None
        run.candidates[block] = history.key
        self._run_of[block] = run

    def remove(self, block: BlockId) -> None:
        run = self._run_of.pop(block)
        self._absent[run.candidates.pop(block)] = None
        if not run.candidates:
            del self._list_of(run)[run]

    def evict(self) -> BlockId:
        if self._victim is None or not self._victim.candidates:
            self._victim = min((next(iter(runs)) for runs in self._runs.values() if runs), key=self._rank)
        block = next(iter(self._victim.candidates))
        self.remove(block)
        return block

    def order(self) -> Iterator[BlockId]:
        runs = merge(*self._runs.values(), key=self._rank)  # of each kind the oldest is first, and ranks least
        return (block for run in runs for block in run.candidates)

    def __len__(self) -> int:
        return len(self._run_of)

    def _rank(self, run: _Run) -> tuple[float, int]:
        return self._law.rate(run.tally, self._clock - run.since), run.since

    def _new_run(self, kind: Kind) -> _Run:
        return _Run(self._law.tally(kind), self._clock)

    def _list_of(self, run: _Run) -> OrderedDict[_Run, None]:
        runs = self._runs.get(run.tally)
        if runs is None:
            runs = self._runs[run.tally] = OrderedDict()
        return runs

    def _leave(self, run: _Run) -> None:
        """Most of *run* went on without the rest of it."""
        if run.candidates:
            del self._list_of(run)[run]
        run.tally, run.since, run.exposed = self._law.tally(_LEFT), self._clock, 0.0
        if run.candidates:
            self._list_of(run)[run] = None
        self._law.watch(run)

    def _forget(self) -> None:
        while len(self._absent) > self._remembered:
            key, _ = self._absent.popitem(last=False)
            self._known.pop(key).run.blocks -= 1


_LAST: Final = (Circumstance.LAST, 0)
_LEFT: Final = (Circumstance.LEFT, 0)
_SHARED: Final = (Circumstance.SHARED, 0)


def _kind_of(chain: Sequence[_Known | None]) -> tuple[Kind, int]:
    """Of a chain just used, given what was known of its blocks; and which turn it is."""
    deepest = next((known for known in reversed(chain) if known is not None), None)
    octave = len(chain).bit_length()
    if deepest is None:
        return (Circumstance.OPENING, octave), 1
    turn = deepest.turn + 1
    if deepest.uses >= _SHARED_USES:
        return (Circumstance.BRANCH, octave), turn
    return (Circumstance.CONTINUED, min(deepest.turn + deepest.uses, _MOST_TIMES)), turn
