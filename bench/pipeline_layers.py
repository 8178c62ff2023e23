"""What each layer of a model costs in prefill, and how it is best split: `python -m bench.pipeline --layers`.

A layer's time is from the moment that its K and V are written to the same moment of the next one, in CPU time of the
engine's thread; the last one's is taken to be the others' median, and what is left over is the embedding and the norm.
The head is none of it: it draws once for each prompt, not for each chunk.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time
from typing import Final

import numpy as np

from bench.report import Report
from mooncake_mesh.engine.api import Engine, PrefillChunk
from mooncake_mesh.policy.chunking import split_layers

TOKENS: Final = 1024
_ROUNDS: Final = 5
_STAGES: Final = (2, 3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """``layer_s`` of each layer, ``besides_s`` of what comes before and after them."""

    layer_s: tuple[float, ...]
    besides_s: float

    def slowest_s(self, split: Sequence[int]) -> float:
        """Time of the slowest stage; the first one has the embedding."""
        times, first = [], 0
        for count in split:
            times.append(sum(self.layer_s[first : first + count]))
            first += count
        times[0] += self.besides_s
        return max(times)


def layer_times(began_s: float, written_s: Sequence[float], ended_s: float) -> LayerTimes:
    """From the moments at which a forward began, had written each layer, and ended. At least two layers."""
    layers = [after - before for before, after in itertools.pairwise(written_s)]
    layers.append(median(layers))
    return LayerTimes(layer_s=tuple(layers), besides_s=max(0.0, ended_s - began_s - sum(layers)))


def measure(engine: Engine) -> LayerTimes:
    """The medians of some forwards of *engine*, which is bound to an arena of enough blocks."""
    layout = engine.spec.layout
    tokens = np.random.default_rng(1).integers(0, 256, TOKENS).astype(np.int32)
    found = []
    for turn in range(_ROUNDS + 1):  # the first one touches the memory
        written_s: list[float] = []
        began_s = thread_time()
        chunk = PrefillChunk(sequence=str(turn), tokens=tokens, start=0, blocks=range(layout.blocks_for(TOKENS)))
        engine.prefill(chunk, lambda _, written_s=written_s: written_s.append(thread_time()))  # type: ignore[misc]
        found.append(layer_times(began_s, written_s, thread_time()))
    del found[0]
    return LayerTimes(
        layer_s=tuple(median(each) for each in zip(*(times.layer_s for times in found), strict=True)),
        besides_s=median(times.besides_s for times in found),
    )


def tell(report: Report, times: LayerTimes) -> None:
    """Rows for the layers, and for the best split into some numbers of stages beside the even one."""
    layers_ms = [1e3 * time_s for time_s in times.layer_s]
    report.row("a layer", median(layers_ms), "ms", n=len(layers_ms), spread=(min(layers_ms), max(layers_ms)))
    report.row("besides: embedding, norm", 1e3 * times.besides_s, "ms")
    for stages in _STAGES:
        if stages > len(layers_ms):
            continue
        split = split_layers(times.layer_s, stages=stages, first_s=times.besides_s)
        whole_s = sum(times.layer_s) + times.besides_s
        balance = whole_s / stages / times.slowest_s(split)
        report.row(f"--prefill-split {','.join(map(str, split))}: balance", 100 * balance, "%")
    report.note("balance: mean time of the stages over that of the slowest one")
