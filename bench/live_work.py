"""A trace made small enough for one machine, and the same work as the simulator takes it: pure.

Time stays as it is. Lengths shrink, and with them the blocks that prompts share; where that is not enough, only every
k-th family of prompts is kept, a family being all prompts that share more than the block that all prompts begin with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from bench.traces import TraceRequest
from mooncake_mesh.kv.block_hash import chain, token_bytes
from mooncake_mesh.loadtest.trace_file import TRACE_BLOCK_TOKENS, TraceLine
from mooncake_mesh.loadtest.workloads import LoadRequest, Replay, Segment, traced
from mooncake_mesh.policy.cost_model import PromptAndStepCost
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

_ROOT: Final = BlockKey(bytes(BLOCK_KEY_BYTES))
_BATCH: Final = 8
"""Sequences that are decoded together when the load of decoding is reckoned."""


def every_family(lines: Sequence[TraceLine], k: int) -> list[TraceLine]:
    """The prompts of every *k*-th family of *lines*, in order of first appearance, the first family among them."""
    if k < 1:
        raise ValueError(f"every: must be at least 1, got {k}")
    numbers: dict[tuple[int, ...], int] = {}
    return [line for at, line in enumerate(lines) if numbers.setdefault(_family(line, at), len(numbers)) % k == 0]


def _family(line: TraceLine, at: int) -> tuple[int, ...]:
    """Prompts within the first block have only that in common with others: each is its own family."""
    return (line.block_ids[1],) if len(line.block_ids) > 1 else (-1, at)


def scaled(lines: Sequence[TraceLine], block_tokens: int) -> list[LoadRequest]:
    """*lines* with all lengths times block_tokens / 512."""
    return traced(lines, Replay(length_scale=block_tokens / TRACE_BLOCK_TOKENS))


def block_keys(request: LoadRequest, mesh_block_tokens: int) -> tuple[BlockKey, ...]:
    """Those of the whole blocks of its prompt, as a mesh with such blocks finds them equal or different."""
    return tuple(chain(_ROOT, token_bytes(request.prompt()), mesh_block_tokens))


def as_simulated(
    requests: Sequence[LoadRequest], sent_s: Sequence[float], mesh_block_tokens: int
) -> list[TraceRequest]:
    """*requests*, which were sent at *sent_s*, for the simulator: the first at 0, in order of arrival."""
    first_s = min(sent_s)
    work = [
        TraceRequest(
            arrival_s=at_s - first_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            keys=block_keys(request, mesh_block_tokens),
        )
        for request, at_s in zip(requests, sent_s, strict=True)
    ]
    return sorted(work, key=lambda request: request.arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Work over time, of an instance each: 1 is all that it can do. Of *hit_rate* of the prompt tokens nothing is left
    to be computed, were the pool without end."""

    prefill: float
    decode: float
    hit_rate: float

    @property
    def highest(self) -> float:
        return max(self.prefill, self.decode)


def demand(requests: Sequence[LoadRequest], cost: PromptAndStepCost, seconds: float, mesh_block_tokens: int) -> Demand:
    """What *requests*, which come within *seconds*, ask of one prefill and one decode instance that have *cost*."""
    seen: set[Segment] = set()
    prefill_s, cached_tokens = 0.0, 0
    for request in requests:
        known = sum(segment.tokens for segment in takewhile(seen.__contains__, request.segments))
        cached = min(known, request.input_tokens - 1) // mesh_block_tokens * mesh_block_tokens
        seen.update(request.segments)
        cached_tokens += cached
        prefill_s += cost.prefill_s(request.input_tokens - cached, cached)
    prompts = sum(request.input_tokens for request in requests)
    steps = sum(request.output_tokens - 1 for request in requests)
    context = round(_BATCH * prompts / max(1, len(requests)))
    return Demand(
        prefill=prefill_s / seconds,
        decode=steps * cost.decode_step_s(_BATCH, context) / _BATCH / seconds,
        hit_rate=cached_tokens / max(1, prompts),
    )


def largest_block(
    lines: Sequence[TraceLine], cost: PromptAndStepCost, seconds: float, mesh_block_tokens: int, load: float
) -> int:
    """The most tokens of a block of the trace at which *lines* demand no more than *load*; at least 1."""
    low, high = 1, TRACE_BLOCK_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if demand(scaled(lines, middle), cost, seconds, mesh_block_tokens).highest <= load:
            low = middle
        else:
            high = middle - 1
    return low
