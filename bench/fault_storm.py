"""An abort storm: hundreds of streams that leave within two seconds, and what the next client notices of it."""

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final
from urllib.parse import urlsplit

from tests.mesh import clients

STREAMS: Final = 500
WITHIN_S: Final = 2.0
PROBES: Final = 7
STORMS: Final = 3
MOST_RATIO: Final = 1.5
"""Of the TTFT of fresh requests after a storm and before it, also of the very first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StormResult:
    """Times to the first token of fresh requests, one after the other; ``states``: of cancelled streams, whether the
    answer had begun."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    states: dict[str, int]

    @property
    def ratio(self) -> float:
        """Of the medians."""
        return statistics.median(self.after_s) / statistics.median(self.before_s)

    @property
    def first_ratio(self) -> float:
        """Of the very first request after the storm over the median before it."""
        return self.after_s[0] / statistics.median(self.before_s)

    def __str__(self) -> str:
        before, after = (" ".join(f"{1e3 * time_s:.0f}" for time_s in times) for times in (self.before_s, self.after_s))
        states = ", ".join(f"{n} {state}" for state, n in sorted(self.states.items()))
        return (
            f"{sum(self.states.values())} streams left: {states}; TTFT in ms before {before}; after {after}: "
            f"the first {self.first_ratio:.2f}x, medians {self.ratio:.2f}x"
        )


def judged(results: Sequence[StormResult]) -> list[str]:
    """What the median storm of *results* violates."""
    ratios = {
        "the first request": statistics.median(result.first_ratio for result in results),
        "the median request": statistics.median(result.ratio for result in results),
    }
    return [
        f"after a storm the TTFT of {which} is {ratio:.2f} times that before, over {MOST_RATIO:g}"
        for which, ratio in ratios.items()
        if ratio > MOST_RATIO
    ]


async def storm(base: str, rng: random.Random) -> StormResult:
    """Probe, cancel STREAMS streams at random moments within WITHIN_S, probe again at once."""
    before = [await _ttft_s(base, f"before {rng.random()}") for _ in range(PROBES)]
    states = await asyncio.gather(*[_leave(base, rng, number) for number in range(STREAMS)])
    after = [await _ttft_s(base, f"after {rng.random()}") for _ in range(PROBES)]
    return StormResult(
        before_s=tuple(before), after_s=tuple(after), states={state: states.count(state) for state in set(states)}
    )


async def _open(base: str, prompt: str, max_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(base)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(clients.streamed_request(parts.netloc, prompt, max_tokens))
    await writer.drain()
    return reader, writer


async def _leave(base: str, rng: random.Random, number: int) -> str:
    """One stream of the storm: comes in the first second, leaves until the end of the second one."""
    comes_s, stays_s = rng.uniform(0.0, WITHIN_S / 2), rng.uniform(0.0, WITHIN_S / 2)
    await asyncio.sleep(comes_s)
    reader, writer = await _open(base, f"{number} of the storm " + "goes on " * rng.randrange(40), 2000)
    got = b""
    try:
        async with asyncio.timeout(stays_s):
            while part := await reader.read(1 << 16):
                got += part
    except TimeoutError:
        pass
    finally:
        writer.transport.abort()
    if not got:
        return "before the answer"
    return "in the answer" if b" 200 " in got[:20] else "refused"


async def _ttft_s(base: str, prompt: str) -> float:
    began_s = monotonic()
    reader, writer = await _open(base, prompt, 2)
    try:
        async with asyncio.timeout(60.0):
            while line := await reader.readline():
                if line.startswith(b"data: {"):
                    return monotonic() - began_s
    finally:
        writer.close()
        await writer.wait_closed()
    raise AssertionError("a probe ended without a token")
