"""What bench.serving measures of each server, and what it aims at.

A measure yields samples; one round takes a measure's samples from every server in turn, so that a ratio compares what
lies seconds apart. Across rounds the median of these ratios counts, which is less disturbed than the ratio of medians
on a machine that is not quiet.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

from bench.report import Report
from bench.serving_client import Prompts, Target, closed_loop, complete

OUTPUT_TOKENS: Final = 64
_TPOT_TOKENS: Final = 96
_THROUGHPUT_PROMPT_TOKENS: Final = 256
_CACHED_TOKENS: Final = 2048
_NEXT_TURN_TOKENS: Final = 64
_CONVERSATIONS: Final = 3
_WAVES: Final = 2  # so that the second requests of some clients meet the first ones of others


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The ratio to a peer that is at most, or at least, ``ratio``."""

    peer: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """``take`` gives samples in ``unit``; ``more_is_better`` says which way the aims point."""

    name: str
    unit: str
    take: Callable[[Target, Prompts], Awaitable[list[float]]]
    more_is_better: bool
    aims: tuple[Aim, ...] = ()


def measures(lengths: Sequence[int], concurrencies: Sequence[int]) -> list[Measure]:
    """In the order in which a round takes them."""
    llamacpp_ttft = Aim(peer="llamacpp", ratio=0.7)
    found = [
        Measure(
            name=f"TTFT, {length} tokens",
            unit="ms",
            take=_ttft_of(length),
            more_is_better=False,
            aims=(Aim(peer="vllm", ratio=1.0), llamacpp_ttft),
        )
        for length in lengths
    ]
    found.append(
        Measure(
            name="TPOT, concurrency 1",
            unit="ms",
            take=_tpot,
            more_is_better=False,
            aims=(Aim(peer="vllm", ratio=0.9), Aim(peer="llamacpp", ratio=1.5)),
        )
    )
    found += [
        Measure(
            name=f"output, concurrency {concurrency}",
            unit="tok/s",
            take=_throughput_at(concurrency),
            more_is_better=True,
            aims=(Aim(peer="vllm", ratio=1.0),) if concurrency >= 4 else (),
        )
        for concurrency in concurrencies
    ]
    found.append(
        Measure(
            name=f"TTFT of a second turn, {_CACHED_TOKENS} tokens cached",
            unit="ms",
            take=_second_turn,
            more_is_better=False,
            aims=(Aim(peer="vllm", ratio=0.6),),
        )
    )
    return found


def _ttft_of(length: int) -> Callable[[Target, Prompts], Awaitable[list[float]]]:
    repeats = 5 if length < 100 else 2 if length < 1000 else 1

    async def take(target: Target, prompts: Prompts) -> list[float]:
        return [1e3 * (await complete(target, prompts.text(length), 2)).ttft_s for _ in range(repeats)]

    return take


async def _tpot(target: Target, prompts: Prompts) -> list[float]:
    return [1e3 * (await complete(target, prompts.text(32), _TPOT_TOKENS)).tpot_s]


def _throughput_at(concurrency: int) -> Callable[[Target, Prompts], Awaitable[list[float]]]:
    async def take(target: Target, prompts: Prompts) -> list[float]:
        texts = [prompts.text(_THROUGHPUT_PROMPT_TOKENS) for _ in range(_WAVES * concurrency)]
        began_s = perf_counter()
        replies = await closed_loop(target, texts, OUTPUT_TOKENS, concurrency)
        elapsed_s = perf_counter() - began_s
        return [sum(reply.output_tokens for reply in replies) / elapsed_s]

    return take


async def _second_turn(target: Target, prompts: Prompts) -> list[float]:
    samples = []
    for _ in range(_CONVERSATIONS):
        first = prompts.text(_CACHED_TOKENS)
        await complete(target, first, 4)
        samples.append(1e3 * (await complete(target, first + prompts.text(_NEXT_TURN_TOKENS), 2)).ttft_s)
    return samples


Samples = Mapping[str, Sequence[Sequence[float]]]
"""By server: the samples of each round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One server beside another in one measure; ``ratios`` has one for each round that both took part in."""

    value: float
    baseline: float
    ratio: float
    ratios: tuple[float, ...]


def compare(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Comparison | None:
    """Samples by round; None where they have no round in common. A round that failed has no samples."""
    pairs = [(median(a), median(b)) for a, b in zip(ours, theirs, strict=False) if a and b]
    if not pairs:
        return None
    ratios = tuple(a / b if b else math.inf for a, b in pairs)
    return Comparison(
        value=median(a for a, _ in pairs),
        baseline=median(b for _, b in pairs),
        ratio=median(ratios),
        ratios=ratios,
    )


def is_met(measure: Measure, aim: Aim, ratio: float) -> bool:
    return ratio >= aim.ratio if measure.more_is_better else ratio <= aim.ratio


def tell(report: Report, measure: Measure, samples: Samples, ours: str) -> None:
    """One row for each peer, or one without a baseline where there is none."""
    own = samples.get(ours, ())
    peers = [name for name in samples if name != ours]
    compared = [(peer, found) for peer in peers if (found := compare(own, samples[peer]))]
    if not compared and any(own):
        report.row(measure.name, median(median(one) for one in own if one), measure.unit, n=sum(map(bool, own)))
    for peer, found in compared:
        aim = next((aim for aim in measure.aims if aim.peer == peer), None)
        report.row(
            f"{measure.name}, beside {peer}",
            found.value,
            measure.unit,
            baseline=found.baseline,
            ratio=found.ratio,
            aim="" if aim is None else f"{'≥' if measure.more_is_better else '≤'} {aim.ratio:g}×",
            met=None if aim is None else is_met(measure, aim, found.ratio),
            n=len(found.ratios),
            spread=(min(found.ratios), max(found.ratios)),
        )
