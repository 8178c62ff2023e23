"""Pictures of simulated runs. matplotlib is wanted for them alone, so it is imported here and only when asked for."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.simulator_results import RunResult


class NoMatplotlib(Exception):
    """Pictures were asked for and there is nothing to draw them with."""


def draw_runs(results: Sequence[RunResult], folder: Path) -> list[Path]:
    """Write ``ttft.png``, ``tbt.png`` and ``load.png`` for *results*; their paths. Raises NoMatplotlib."""
    plot = load_pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, title, read in (
        ("ttft", "time to first token (s)", RunResult.ttfts),
        ("tbt", "time between tokens, mean of the longest 10 % (s)", RunResult.tbts),
    ):
        figure, axes = plot.subplots(figsize=(6.4, 4.0), layout="constrained")
        for result in results:
            values = sorted(read(result))
            shares = [(i + 1) / max(1, len(result.records)) for i in range(len(values))]
            axes.plot(values, shares, label=result.name, linewidth=1.4)
        axes.set(xlabel=title, ylabel="share of all requests", xscale="log", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        made.append(save(plot, figure, folder / f"{name}.png"))
    sampled = [result for result in results if result.samples]
    if sampled:
        made.append(_load(plot, sampled, folder / "load.png"))
    return made


def draw_lines(
    lines: dict[str, Sequence[tuple[float, float]]], path: Path, *, title: str, x: str, y: str
) -> list[Path]:
    """One picture of named lines of (x, y) points. Raises NoMatplotlib."""
    plot = load_pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, points in lines.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=name)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return [save(plot, figure, path)]


def _load(plot: Any, results: Sequence[RunResult], path: Path) -> Path:
    figure, all_axes = plot.subplots(len(results), 1, figsize=(7.0, 2.2 * len(results)), squeeze=False, sharex=True)
    for axes, result in zip(all_axes[:, 0], results, strict=True):
        times = [sample.time_s for sample in result.samples]
        axes.plot(times, [s.prefill_busy for s in result.samples], label="prefill instances busy", linewidth=1.0)
        axes.plot(times, [s.prefill_queued for s in result.samples], label="prompts in prefill", linewidth=1.0)
        other = axes.twinx()
        other.plot(times, [s.decode_share for s in result.samples], color="tab:green", linewidth=1.0)
        other.set(ylim=(0, 1), ylabel="fullest decode pool")
        axes.set(title=result.name, ylabel="count")
        axes.legend(frameon=False, loc="upper left")
    all_axes[-1, 0].set(xlabel="time (s)")
    figure.tight_layout()
    return save(plot, figure, path)


def save(plot: Any, figure: Any, path: Path) -> Path:
    """Write *figure* and drop it."""
    figure.savefig(path, dpi=130)
    plot.close(figure)
    return path


def load_pyplot() -> Any:
    """matplotlib without a display. Raises NoMatplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError:
        raise NoMatplotlib("pictures need matplotlib: pip install matplotlib") from None
