"""What the simulator is fed: the published traces, replayed faster or slower, and seeded synthetic workloads.

Replay speed s: arrival = timestamp / s. The conversation trace has its arrivals in buckets of 3 s; jitter spreads them
(one draw a row, at speed 1, before the division).
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Final

from bench.traces import BLOCK_TOKENS, TraceRequest, read_trace
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

JITTER_S: Final = 3.0

Workload = Sequence[TraceRequest]


def replayed(requests: Workload, *, speed: float = 1.0, jitter_seed: int | None = None) -> list[TraceRequest]:
    """*requests* at *speed* times their rate; with a seed each arrival is moved by U(0, 3 s) first."""
    if not speed > 0:
        raise ValueError(f"speed: must be positive, got {speed}")
    random = None if jitter_seed is None else Random(jitter_seed)
    moved = [
        replace(
            request, arrival_s=(request.arrival_s + (0.0 if random is None else random.random() * JITTER_S)) / speed
        )
        for request in requests
    ]
    return sorted(moved, key=lambda request: request.arrival_s)


def with_outputs(requests: Workload, output_tokens: Callable[[int, TraceRequest], int]) -> list[TraceRequest]:
    """*requests* with other output lengths, as a function of position and request."""
    return [replace(request, output_tokens=output_tokens(i, request)) for i, request in enumerate(requests)]


def named(name: str, *, seed: int = 0) -> list[TraceRequest]:
    """A published trace, or ``tool-agent``, generated to the statistics of the one that is not published in full."""
    if name == "tool-agent":
        return tool_agent(seed=seed)
    return read_trace(name)


class _Keys:
    """Block ids in order of first use, as in the published traces."""

    def __init__(self) -> None:
        self._next = 0

    def fresh(self, n: int) -> list[BlockKey]:
        first, self._next = self._next, self._next + max(n, 0)
        return [BlockKey(i.to_bytes(BLOCK_KEY_BYTES, "big")) for i in range(first, self._next)]


def tool_agent(*, requests: int = 23_608, duration_s: float = 3_537.0, seed: int = 0) -> list[TraceRequest]:
    """A workload with the published statistics of the tool&agent trace.

    23,608 requests, 8,596 tokens in and 182 out on average, 59 % of all blocks seen before: a few hot system prompts
    of several thousand tokens that most requests begin with, agents that come back with their whole history, and the
    rest fresh. Poisson arrivals.
    """
    random = Random(seed)
    keys = _Keys()
    prompts = [keys.fresh(n) for n in (4, 5, 6, 7, 8, 10, 12, 14, 4, 6, 9, 11, 8, 5, 10, 16)]
    cumulative = list(accumulate(1 / (i + 1) ** 1.1 for i in range(len(prompts))))
    sessions: list[list[BlockKey]] = []
    made = []
    at_s = 0.0
    for _ in range(requests):
        at_s += random.expovariate(requests / duration_s)
        if sessions and random.random() < 0.375:
            past = sessions.pop(random.randrange(len(sessions)))
        else:
            past = list(prompts[bisect(cumulative, random.random() * cumulative[-1])])
        new_tokens = min(int(random.lognormvariate(7.47, 1.16)), 90_000)
        input_tokens = len(past) * BLOCK_TOKENS + max(new_tokens, 16)
        chain = past + keys.fresh(-(-input_tokens // BLOCK_TOKENS) - len(past))
        whole = chain[: input_tokens // BLOCK_TOKENS]
        if len(whole) < 150:
            sessions.append(whole)
        if len(sessions) > 400:  # an agent that has been silent for long does not come back
            sessions.pop(0)
        output_tokens = max(2, min(int(random.lognormvariate(4.49, 1.22)), 2_000))
        made.append(
            TraceRequest(arrival_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens, keys=tuple(chain))
        )
    return made


def homogeneous(outputs: Workload, *, rate: float = 17.0, requests: int = 12_000, seed: int = 0) -> list[TraceRequest]:
    """Poisson arrivals of prompts of 8,192 · U(0.8, 1.2) tokens without reuse; outputs drawn from *outputs*."""
    random = Random(seed)
    keys = _Keys()
    made = []
    at_s = 0.0
    for _ in range(requests):
        at_s += random.expovariate(rate)
        input_tokens = int(8192 * random.uniform(0.8, 1.2))
        made.append(
            TraceRequest(
                arrival_s=at_s,
                input_tokens=input_tokens,
                output_tokens=outputs[random.randrange(len(outputs))].output_tokens,
                keys=tuple(keys.fresh(-(-input_tokens // BLOCK_TOKENS))),
            )
        )
    return made


def long_context(
    input_tokens: int, *, rate: float, requests: int = 400, documents: int = 16, seed: int = 0
) -> list[TraceRequest]:
    """Poisson arrivals of *input_tokens* in and 512 out, half of each prompt one of *documents*.

    Each document is asked for once before, at long intervals, so that caches are warm: the first *documents* requests
    are that and not part of a measurement.
    """
    random = Random(seed)
    keys = _Keys()
    n_blocks = input_tokens // BLOCK_TOKENS
    shared = [keys.fresh(n_blocks // 2) for _ in range(documents)]

    def ask(at_s: float, document: int, output_tokens: int) -> TraceRequest:
        chain = shared[document] + keys.fresh(n_blocks - n_blocks // 2)
        return TraceRequest(arrival_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens, keys=tuple(chain))

    made = [ask(100.0 * i, i, 2) for i in range(documents)]
    at_s = 100.0 * documents
    for _ in range(requests):
        at_s += random.expovariate(rate)
        made.append(ask(at_s, random.randrange(documents), 512))
    return made
