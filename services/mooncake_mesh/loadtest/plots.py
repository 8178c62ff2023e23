"""Pictures of a run; matplotlib is imported when they are drawn, and need not be installed."""

import importlib
from collections.abc import Sequence
from pathlib import Path

from mooncake_mesh.loadtest.outcomes import LoadObjectives, RequestResult


class NoMatplotlib(Exception):
    """Pictures were asked for and cannot be drawn."""


def draw(results: Sequence[RequestResult], objectives: LoadObjectives, folder: Path) -> list[Path]:
    """``times.png`` (TTFT and TBT of each request over the run) and ``load.png`` (requests that run, tokens a second).

    Raises NoMatplotlib; makes *folder*.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise NoMatplotlib("no pictures: matplotlib is not installed") from None
    folder.mkdir(parents=True, exist_ok=True)
    times = figures.Figure(figsize=(8, 5), layout="constrained")
    for axes, title, limit_s, points in (
        (times.add_subplot(2, 1, 1), "TTFT, s", objectives.ttft_s, [(r.sent_s, r.ttft_s) for r in results]),
        (times.add_subplot(2, 1, 2), "TBT, s", objectives.tbt_s, [(r.sent_s, r.tbt_s) for r in results]),
    ):
        known = [(at_s, value_s) for at_s, value_s in points if value_s is not None]
        axes.plot([at_s for at_s, _ in known], [value_s for _, value_s in known], ".", markersize=3)
        if limit_s is not None:
            axes.axhline(limit_s, linewidth=0.8, linestyle="--")
        axes.set(xlabel="sent at, s", ylabel=title)
    load = figures.Figure(figsize=(8, 5), layout="constrained")
    n_seconds = int(max((r.ended_s for r in results), default=0.0)) + 1
    running, tokens = [0] * n_seconds, [0] * n_seconds
    for result in results:
        for second in range(int(result.sent_s), int(result.ended_s) + 1):
            running[second] += 1
        for at_s in result.token_s:
            tokens[int(at_s)] += 1
    for place, title, values in ((1, "requests that run", running), (2, "tokens a second", tokens)):
        axes = load.add_subplot(2, 1, place)
        axes.step(range(n_seconds), values, where="post", linewidth=1)
        axes.set(xlabel="s", ylabel=title)
    paths = [folder / "times.png", folder / "load.png"]
    for figure, path in zip((times, load), paths, strict=True):
        figure.savefig(path)
    return paths
