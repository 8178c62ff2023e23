"""What every benchmark prints: a table for people, rows for machines (design: one row is one measured quantity).

An aim that is missed is printed as missed; the exit code says only that the measurement was made.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import strftime

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``baseline`` was measured in the same run; ``ratio`` is value / baseline; ``spread`` is (least, greatest)."""

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None
    aim: str = ""
    met: bool | None = None
    n: int | None = None
    spread: tuple[float, float] | None = None
    cpu_s_per_gb: float | None = None


def say(text: str) -> None:
    """How a long run goes, on stderr, with the time of day."""
    print(f"{strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Report:
    """Rows of one benchmark run."""

    def __init__(self, name: str, title: str) -> None:
        self.name = name
        self.title = title
        self.rows: list[Row] = []
        self.notes: list[str] = []

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        """The flags that all benchmarks share."""
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
        parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures, where a benchmark has any")

    def row(
        self,
        metric: str,
        value: float,
        unit: str,
        *,
        baseline: float | None = None,
        ratio: float | None = None,
        aim: str = "",
        met: bool | None = None,
        n: int | None = None,
        spread: tuple[float, float] | None = None,
        cpu_s_per_gb: float | None = None,
    ) -> None:
        """Add one quantity. Its ratio to the baseline is computed here, unless *ratio* was taken pair by pair and so is
        not that of the two medians; *spread* is then the ratio's."""
        if ratio is None and baseline:
            ratio = value / baseline
        self.rows.append(
            Row(
                metric=metric,
                value=value,
                unit=unit,
                baseline=baseline,
                ratio=ratio,
                aim=aim,
                met=met,
                n=n,
                spread=spread,
                cpu_s_per_gb=cpu_s_per_gb,
            )
        )

    def note(self, text: str) -> None:
        """A line under the table."""
        self.notes.append(text)

    def finish(self, args: argparse.Namespace) -> None:
        """Print the table; write the files that *args* asks for."""
        console = Console(width=140)
        console.print(self._table())
        for note in self.notes:
            console.print(note, highlight=False)
        if args.json:
            self.write(args.json, self.rows)

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """*rows* as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": self.name, "machine": platform.platform(), "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(content, indent=1) + "\n")

    def _table(self) -> Table:
        table = Table(title=f"{self.name}: {self.title}", title_justify="left")
        for name in ("metric", "value", "unit", "baseline", "ratio", "aim", "met", "n", "spread"):
            table.add_column(name, justify="left" if name in ("metric", "unit", "aim") else "right")
        for row in self.rows:
            table.add_row(
                row.metric,
                _number(row.value),
                row.unit,
                _number(row.baseline),
                _number(row.ratio),
                row.aim,
                "" if row.met is None else "yes" if row.met else "MISSED",
                "" if row.n is None else f"{row.n:,}",
                "" if row.spread is None else f"{_number(row.spread[0])} … {_number(row.spread[1])}",
            )
        return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
