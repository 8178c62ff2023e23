"""Which chunk was in which stage when, as text and as a picture; and how long it would have taken undisturbed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.simulator_plots import load_pyplot

_COLUMNS: Final = 100
_SIGNS: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRun:
    """One chunk in one stage; ``began_s`` is on the machine's monotonic clock."""

    start: int
    n_tokens: int
    began_s: float
    compute_s: float
    cpu_s: float


Stages = Sequence[Sequence[ChunkRun]]


def undisturbed_s(stages: Stages) -> float:
    """From the first chunk's begin to the last one's end if every chunk took its CPU time, and nothing else any.

    A chunk begins when the stage before is done with it, and this stage with the chunk before.
    """
    before = [0.0] * len(stages[0])
    for runs in stages:
        ends: list[float] = []
        for index, run in enumerate(runs):
            ends.append(max(before[index], ends[-1] if ends else 0.0) + run.cpu_s)
        before = ends
    return before[-1]


def text_chart(stages: Stages) -> str:
    """A line for each stage; a sign for the chunk it computed at that moment, a dot where it waited."""
    first_s = min(run.began_s for runs in stages for run in runs)
    last_s = max(run.began_s + run.compute_s for runs in stages for run in runs)
    step_s = (last_s - first_s) / _COLUMNS
    lines = []
    for stage, runs in enumerate(stages):
        signs = ["·"] * _COLUMNS
        busy_s = sum(run.compute_s for run in runs)
        for index, run in enumerate(runs):
            begin = int((run.began_s - first_s) / step_s)
            end = max(begin + 1, int((run.began_s + run.compute_s - first_s) / step_s))
            for column in range(begin, min(end, _COLUMNS)):
                signs[column] = _SIGNS[index % len(_SIGNS)]
        lines.append(f"stage {stage} |{''.join(signs)}| {100 * busy_s / (last_s - first_s):3.0f} % busy")
    lines.append(f"{'':8}0 s{'':{_COLUMNS - 10}}{last_s - first_s:.2f} s")
    return "\n".join(lines)


def plot(stages: Stages, file: Path) -> None:
    """The same as a picture. Raises SystemExit without matplotlib."""
    plt = load_pyplot()
    file.parent.mkdir(parents=True, exist_ok=True)
    first_s = min(run.began_s for runs in stages for run in runs)
    figure, axes = plt.subplots(figsize=(10, 1 + 0.6 * len(stages)))
    for stage, runs in enumerate(stages):
        spans = [(run.began_s - first_s, run.compute_s) for run in runs]
        colours = [plt.get_cmap("tab20")(index % 20) for index in range(len(runs))]
        axes.broken_barh(spans, (stage - 0.4, 0.8), facecolors=colours)
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axes.invert_yaxis()
    axes.set_xlabel("s; a colour is a chunk")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
