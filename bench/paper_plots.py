"""Pictures of a report: for each experiment the quantities that have an aim, beside it."""

import math
from collections.abc import Sequence
from pathlib import Path

from bench.report import Row
from bench.simulator_plots import load_pyplot, save


def draw_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write one ``A1.png`` … for each experiment with aims; their paths. Raises NoMatplotlib."""
    made = []
    folder.mkdir(parents=True, exist_ok=True)
    for id_ in sorted({row.metric.split(" ", 1)[0] for row in rows if row.met is not None}):
        chosen = [row for row in rows if row.metric.startswith(f"{id_} ") and row.met is not None]
        made.append(_draw(id_, chosen, folder / f"{id_}.png"))
    return made


def _draw(id_: str, rows: Sequence[Row], path: Path) -> Path:
    """Bars from the top; whiskers span the seeds, and the aim stands at the end of each label."""
    plot = load_pyplot()
    figure, axes = plot.subplots(figsize=(9.0, 0.8 + 0.42 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        value = row.value if math.isfinite(row.value) else 0.0
        axes.barh(place, value, color="#4477aa" if row.met else "#cc6677", height=0.6)
        if row.spread is not None and all(map(math.isfinite, row.spread)):
            axes.plot(row.spread, (place, place), color="black", linewidth=1.2)
        axes.annotate(f" {value:.3g}", (max(value, 0.0), place), va="center", fontsize=8)
    labels = [f"{row.metric.split(' ', 1)[1]}\n{row.aim}" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_title(f"{id_}: blue where the aim is met", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    return save(plot, figure, path)
