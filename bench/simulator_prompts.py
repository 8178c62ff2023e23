"""The prompts that a simulated decode instance computes itself: the line of the live worker, its blocks, its books."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from bench.simulator_flight import Flight
from bench.simulator_node import SimNode
from bench.simulator_window import Window
from mooncake_mesh.decode.prompt_line import InlinePrompt, PromptLine
from mooncake_mesh.decode.sequences import DecodeSequence
from mooncake_mesh.kv.block_hash import split_keys
from mooncake_proto.ids import JobId
from mooncake_proto.transfer import Acquire, Acquired


class InlineShell:
    """``on_first`` is called when somebody is in line and nobody was."""

    def __init__(
        self, node: SimNode, holders: Mapping[str, SimNode], *, block_tokens: int, on_first: Callable[[], None]
    ) -> None:
        self._line = PromptLine(block_tokens=block_tokens)
        self._node = node
        self._holders = holders
        self._block_tokens = block_tokens
        self._on_first = on_first
        self._flights: dict[JobId, Flight] = {}

    def waiting(self) -> tuple[tuple[int, int], ...]:
        """As the line says; chunks of the window that is running are not counted."""
        return self._line.waiting()

    def submit(self, flight: Flight, sequence: DecodeSequence, request: Acquire) -> None:
        """Have its blocks, and as much of its prefix as it was placed for, here; then it is in line."""
        placement = flight.placement
        request = replace(
            request,
            max_cached_blocks=(flight.prompt_tokens - 1) // self._block_tokens,
            fetch_from=placement.fetch_from,
            fetch_blocks=placement.fetch_prefix_blocks,
        )
        self._flights[flight.job_id] = flight

        def acquired(got: Acquired) -> None:
            self._line.add(sequence, got.blocks, got.cached_blocks)
            if len(self._line) == 1:
                self._on_first()

        source = self._holders[placement.fetch_from] if placement.fetch_from else None
        if source is None or not self._node.fetch(source, request, lambda: self._node.acquire(request, acquired)):
            self._node.acquire(request, acquired)

    def begin(self, sequences: int, context_tokens: int, waited_s: float) -> InlinePrompt | None:
        """Whose chunks are computed from now on with such steps, if anybody's."""
        if not self._line:
            return None
        return self._line.begin(self._node.clock.now_s, sequences, context_tokens, waited_s)

    @property
    def is_due(self) -> bool:
        return bool(self._line)

    def computed(self, window: Window, chunks: int) -> InlinePrompt | None:
        """The chunks of *window* are: the prompt, if that was its end. All its blocks can be found then."""
        prompt = self._line.oldest
        flight = self._flights[prompt.sequence.job.job_id]
        if prompt.computed_tokens == prompt.cached_tokens:
            flight.prompt_begun(
                cached_tokens=prompt.cached_tokens,
                queue_s=prompt.started_s - prompt.sequence.admitted_s,
                block_tokens=self._block_tokens,
            )
        flight.record.prefill_s += window.chunks_s(chunks, self._node.kind)
        self._line.computed(chunks)
        if prompt.left_tokens:
            return None
        self._line.pop()
        del self._flights[flight.job_id]
        cached = prompt.cached_tokens // self._block_tokens
        self._node.messenger.seal(flight.job_id, cached, list(split_keys(flight.keys))[cached:])
        return prompt
