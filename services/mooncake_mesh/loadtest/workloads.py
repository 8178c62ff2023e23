"""What is asked of the server, and when: pure, and equal for equal arguments.

Prompts are token ids, so that their lengths are exact whatever the model's tokenizer. A prompt is a row of segments;
equal segments have equal tokens, which is how prefixes come to be shared. Tokens are made when a request is sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Final

from mooncake_mesh.loadtest.trace_file import TRACE_BLOCK_TOKENS, TraceLine

JITTER_S: Final = 3.0
"""The published conversation trace has its arrivals in buckets of this size."""

_TOKEN_IDS: Final = range(32, 127)
"""Plain text in every vocabulary that begins with bytes or characters; markers are elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of a prompt: the first ``tokens`` of the endless row of tokens that ``name`` stands for."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One completion of exactly ``output_tokens``, to be asked for ``arrival_s`` after the start."""

    arrival_s: float
    segments: tuple[Segment, ...]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def prompt(self) -> list[int]:
        """Its token ids."""
        return [token for segment in self.segments for token in segment_tokens(segment)]


def segment_tokens(segment: Segment) -> list[int]:
    return Random(segment.name).choices(_TOKEN_IDS, k=segment.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Uniform around ``mean`` within ``± spread * mean``, at least 1."""

    mean: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.mean < 1 or not 0 <= self.spread < 1:
            raise ValueError(f"a length is at least 1 and its spread below 1, got {self.mean} ± {self.spread}")

    def draw(self, random: Random) -> int:
        return max(1, round(random.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """``rate`` requests a second, all at once for infinity; gamma intervals, Poisson arrivals at ``burstiness`` 1."""

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not self.rate > 0 or not self.burstiness > 0:
            raise ValueError(f"rate and burstiness must be positive, got {self.rate} and {self.burstiness}")

    def times_s(self, random: Random) -> Iterator[float]:
        at_s = 0.0
        while True:
            yield at_s
            if self.rate != float("inf"):
                at_s += random.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))


def random_lengths(arrivals: Arrivals, inputs: Lengths, outputs: Lengths, *, seed: int) -> Iterator[LoadRequest]:
    """Prompts that share nothing, without end."""
    times, random = Random(f"times {seed}"), Random(f"lengths {seed}")
    for number, at_s in enumerate(arrivals.times_s(times)):
        prompt = Segment(name=f"{seed} request {number}", tokens=inputs.draw(random))
        yield LoadRequest(arrival_s=at_s, segments=(prompt,), output_tokens=outputs.draw(random))


def shared_prefixes(
    arrivals: Arrivals, inputs: Lengths, outputs: Lengths, *, prefixes: int, prefix_tokens: int, seed: int
) -> Iterator[LoadRequest]:
    """Each prompt begins with one of *prefixes*, drawn evenly, and goes on with tokens of its own, without end."""
    if prefixes < 1 or prefix_tokens < 1:
        raise ValueError("there must be at least one prefix of at least one token")
    choice = Random(f"prefixes {seed}")
    for request in random_lengths(arrivals, inputs, outputs, seed=seed):
        prefix = Segment(name=f"{seed} prefix {choice.randrange(prefixes)}", tokens=prefix_tokens)
        yield LoadRequest(
            arrival_s=request.arrival_s,
            segments=(prefix, *request.segments),
            output_tokens=request.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a trace is replayed: its first ``seconds``, ``speed`` times faster, all lengths times ``length_scale``.

    Each arrival is moved by U(0, JITTER_S) before, with a ``jitter_seed``; ``seed`` names the tokens.
    """

    seconds: float = float("inf")
    speed: float = 1.0
    length_scale: float = 1.0
    jitter_seed: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.speed > 0 and self.length_scale > 0):
            raise ValueError("seconds, speed and length scale must be positive")

    @property
    def block_tokens(self) -> int:
        return max(1, round(TRACE_BLOCK_TOKENS * self.length_scale))


def traced(lines: Iterable[TraceLine], replay: Replay) -> list[LoadRequest]:
    """*lines*, in order of arrival, as *replay* says. Blocks are scaled too, so prompts share as much as before."""
    random = None if replay.jitter_seed is None else Random(replay.jitter_seed)
    requests = [
        LoadRequest(
            arrival_s=(line.arrival_s + (random.random() * JITTER_S if random else 0.0)) / replay.speed,
            segments=_blocks(line, replay),
            output_tokens=max(1, round(line.output_tokens * replay.length_scale)),
        )
        for line in takewhile(lambda line: line.arrival_s < replay.seconds, lines)
    ]
    return sorted(requests, key=lambda request: request.arrival_s)


def _blocks(line: TraceLine, replay: Replay) -> tuple[Segment, ...]:
    whole, rest = divmod(line.input_tokens, TRACE_BLOCK_TOKENS)
    last = [max(1, round(rest * replay.length_scale))] if rest else []
    sizes = [replay.block_tokens] * whole + last
    names = (f"{replay.seed} block {block}" for block in line.block_ids)
    return tuple(Segment(name=name, tokens=size) for name, size in zip(names, sizes, strict=True))


def first_of(requests: Iterable[LoadRequest], *, n: int, seconds: float) -> list[LoadRequest]:
    """The first *n* that come within *seconds*."""
    within = takewhile(lambda request: request.arrival_s < seconds, requests)
    return [request for _, request in zip(range(n), within, strict=False)]


def fitting(requests: Sequence[LoadRequest], max_context_tokens: int) -> list[LoadRequest]:
    """Those whose prompt and answer fit into the model's context."""
    return [r for r in requests if r.input_tokens + r.output_tokens <= max_context_tokens]
