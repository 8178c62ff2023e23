"""Measurements for ``mooncake profile``: synthetic requests through the gateway, times from the workers' own reports.

Prompts are random tokens under a cache salt of this run, so nothing of them is in the pool. One prompt runs at a time,
alone and behind shares of a prefix that was computed before, all lengths in turn; decoding runs batches of several
sizes and contexts, and counts from when the last one of a batch has joined. What ran beside something else is left out:
on one machine it takes that much longer. Medians are what is fitted, as one stop of the machine must not count.
A copy between nodes cannot be ordered from here; what messengers report of those that came about is taken.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from math import log2
from statistics import median
from typing import Any, Final, TypeVar
from uuid import uuid4

from mooncake_mesh.client import MooncakeClient
from mooncake_mesh.errors import CallTimeout, MooncakeError, Rejected
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.policy.cost_fit import PrefillSample, StepSample, TransferSample
from mooncake_proto.control import Load, Role, StatusQuery, StatusReport

_ASK_S: Final = 0.1
_CALL_TIMEOUT_S: Final = 5.0
_SHARES: Final = (0.5, 0.9)
_LONGEST_ANSWER: Final = 4096
_FILLING: Final = 4
"""After so many times the steps that are wanted, a batch that has not filled up is taken as it is."""

_TOKENS: Final = range(10, 100)
"""Ids that every tokenizer has, and that end no text."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Samples:
    """What was measured of one kind of instance."""

    prefills: list[PrefillSample] = field(default_factory=list)
    steps: list[StepSample] = field(default_factory=list)

    def medians(self) -> "Samples":
        """One sample for each kind of prompt, and for each batch size with about equal contexts (half an octave)."""
        prompts: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for prefill in self.prefills:
            prompts[prefill.uncached_tokens, prefill.cached_tokens].append(prefill.elapsed_s)
        batches: defaultdict[tuple[int, int], list[StepSample]] = defaultdict(list)
        for step in self.steps:
            batches[step.batch, round(2 * log2(max(1.0, step.context_tokens / max(1, step.batch))))].append(step)
        return Samples(
            prefills=[
                PrefillSample(uncached_tokens=n, cached_tokens=p, elapsed_s=median(times_s))
                for (n, p), times_s in prompts.items()
            ],
            steps=[
                StepSample(
                    batch=batch,
                    context_tokens=round(median(step.context_tokens for step in steps)),
                    elapsed_s=median(step.elapsed_s for step in steps),
                )
                for (batch, _), steps in batches.items()
            ],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``prompt_tokens`` are lengths, ``batches`` pairs of (sequences, prompt tokens of each); everything ``repeats``
    times. A batch is decoded until ``steps`` more steps were reported."""

    prompt_tokens: Sequence[int]
    batches: Sequence[tuple[int, int]]
    repeats: int
    steps: int = 12
    longest_s: float = 60.0


def plan_for(longest_prompt_tokens: int, largest_batch: int, repeats: int) -> Plan:
    """Lengths and sizes that double up to the largest; batches with short and with long contexts."""
    lengths = _doubling(32, longest_prompt_tokens)
    sizes = _doubling(1, largest_batch)
    contexts = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    return Plan(
        prompt_tokens=lengths, batches=[(size, context) for size in sizes for context in contexts], repeats=repeats
    )


class Measurement:
    """One run over a mesh that does nothing else. ``samples`` by kind of instance, ``copies`` of the whole mesh."""

    def __init__(self, client: MooncakeClient, conductor: RpcClient, *, model: str | None, seed: int = 0) -> None:
        self.samples: defaultdict[str, Samples] = defaultdict(Samples)
        self.copies: list[TransferSample] = []
        self._client = client
        self._conductor = conductor
        self._model = model
        self._salt = uuid4().hex
        self._random = random.Random(seed)
        self._seen: dict[str, int] = {}
        self._context_tokens = 1 << 30
        self._decoders = 1

    async def run(self, plan: Plan, tell: Callable[[str], None]) -> None:
        """Prompts and batches that the mesh refuses are left out. Raises the other errors of MooncakeClient, and
        CallTimeout when workers do not report what they did."""
        await self._collect()
        lengths = sorted({min(n_tokens, self._context_tokens // 2) for n_tokens in plan.prompt_tokens})
        await _admitted(self._warm_up(lengths[0], plan), tell)
        for number in range(1, plan.repeats + 1):
            for n_tokens in lengths:
                tell(f"prefill: {n_tokens} tokens ({number} of {plan.repeats})")
                await _admitted(self._prefill(n_tokens, plan), tell)
        for size, context in sorted({(size, min(n, self._context_tokens // 2)) for size, n in plan.batches}):
            tell(f"decode: {size} sequences behind {context} tokens each")
            await _admitted(self._decode(size, context, plan), tell)

    async def _warm_up(self, n_tokens: int, plan: Plan) -> None:
        """The first prompt of an engine takes longer than any other like it, so it does not count."""
        counts = self._counts()
        await self._prefill(n_tokens, plan)
        self._forget_since(counts)

    async def _prefill(self, n_tokens: int, plan: Plan) -> None:
        """A prompt of its own, then others that share a part of it."""
        first = self._prompt(n_tokens)
        prompts = [first, *(first[: int(share * n_tokens)] + self._prompt(n_tokens)[: -int(share * n_tokens)]
                            for share in _SHARES)]  # fmt: skip
        for prompt in prompts:
            wanted = self._prefills + 1
            await self._client.generate(
                prompt, model=self._model, max_tokens=1, cache_salt=self._salt, ignore_eos=True, temperature=0
            )
            await self._until(partial(self._has_prefills, wanted), plan)

    async def _decode(self, size: int, context: int, plan: Plan) -> None:
        """*size* sequences for each decode instance, which would go on for long, until enough steps of all of them were
        reported. Steps beside prompts do not count, and neither do these prompts.

        How they are spread is up to the conductor: each step tells how many sequences it had.
        """
        n_tokens = min(_LONGEST_ANSWER, self._context_tokens - context - 1)
        before, begun = self._counts(), self._steps
        joined: set[int] = set()
        n_streams = size * self._decoders
        try:
            async with asyncio.TaskGroup() as tasks:
                streams = [
                    tasks.create_task(self._stream(self._prompt(context), n_tokens, partial(joined.add, number)))
                    for number in range(n_streams)
                ]

                def over() -> bool:
                    return all(one.done() for one in streams)

                enough = begun + _FILLING * plan.steps
                await self._until(lambda: len(joined) == n_streams or self._steps >= enough or over(), plan)
                self._forget_since(before)
                wanted = self._steps + plan.steps * plan.repeats
                await self._until(lambda: self._steps >= wanted or over(), plan)
                for stream in streams:
                    stream.cancel()
        except* MooncakeError as group:
            raise group.exceptions[0] from None

    async def _stream(self, prompt: list[int], n_tokens: int, joined: Callable[[], None]) -> None:
        stream = self._client.stream(
            prompt, model=self._model, max_tokens=n_tokens, cache_salt=self._salt, ignore_eos=True, temperature=0
        )
        async with aclosing(stream) as chunks:
            async for _ in chunks:
                joined()

    def _counts(self) -> dict[str, tuple[int, int]]:
        """How many samples there are by now, by kind."""
        return {kind: (len(samples.prefills), len(samples.steps)) for kind, samples in self.samples.items()}

    def _forget_since(self, counts: dict[str, tuple[int, int]]) -> None:
        """Drop the samples that came after *counts* were taken."""
        for kind, samples in self.samples.items():
            prefills, steps = counts.get(kind, (0, 0))
            del samples.prefills[prefills:], samples.steps[steps:]

    # --- what workers report ------------------------------------------------------------------------------------------

    def _has_prefills(self, wanted: int) -> bool:
        return self._prefills >= wanted

    @property
    def _prefills(self) -> int:
        return sum(len(samples.prefills) for samples in self.samples.values())

    @property
    def _steps(self) -> int:
        return sum(len(samples.steps) for samples in self.samples.values())

    async def _until(self, holds: Callable[[], bool], plan: Plan) -> None:
        deadline_s = asyncio.get_running_loop().time() + plan.longest_s
        while True:
            await self._collect()
            if holds():
                return
            if asyncio.get_running_loop().time() > deadline_s:
                raise CallTimeout(f"no worker reported within {plan.longest_s:g} s what it had done")
            await asyncio.sleep(_ASK_S)

    async def _collect(self) -> None:
        report = await self._conductor.call(StatusQuery(), StatusReport, timeout_s=_CALL_TIMEOUT_S)
        is_first = not self._seen
        members = report.cluster.members
        self._decoders = max(1, sum(state.member.role is Role.DECODE and state.takes_work for state in members))
        for state in members:
            name, load, kind = str(state.member.instance_id), state.load, state.member.kind
            if state.member.model is not None:
                self._context_tokens = min(self._context_tokens, state.member.model.max_context_tokens)
            if state.member.role is Role.PREFILL:
                fresh = self._fresh(name, load.prefills, load.recent_prefills)
                if not is_first:
                    self.samples[kind].prefills += [
                        PrefillSample(uncached_tokens=n, cached_tokens=p, elapsed_s=s) for n, p, s in fresh
                    ]
            elif state.member.role is Role.DECODE:
                fresh = self._fresh(name, load.steps, load.recent_steps)
                if not is_first:
                    self.samples[kind].steps += [
                        StepSample(batch=b, context_tokens=t, elapsed_s=s) for b, t, s in fresh
                    ]
            elif state.member.role is Role.MESSENGER:
                self._note_copies(name, load)

    def _note_copies(self, name: str, load: Load) -> None:
        """Copies of before this run count too: they are rare."""
        for n_bytes, elapsed_s in self._fresh(name, load.copies, load.recent_copies):
            if n_bytes and elapsed_s > 0:
                self.copies.append(TransferSample(n_bytes=n_bytes, elapsed_s=elapsed_s))

    def _fresh(self, name: str, count: int, recent: Sequence[_T]) -> Sequence[_T]:
        fresh = count - self._seen.get(name, 0)
        self._seen[name] = count
        return recent[-fresh:] if fresh > 0 else ()

    def _prompt(self, n_tokens: int) -> list[int]:
        return self._random.choices(_TOKENS, k=n_tokens)


async def _admitted(work: Coroutine[Any, Any, None], tell: Callable[[str], None]) -> None:
    """What the mesh lets in of *work*: its admission goes by times that are not known yet."""
    try:
        await work
    except Rejected as refused:
        tell(f"left out: the mesh lets no more in ({refused.reason})")


def _doubling(first: int, last: int) -> list[int]:
    """*first*, doubled up to *last*, which is the last of them."""
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return sorted({min(first, last), *found[1:], last})
