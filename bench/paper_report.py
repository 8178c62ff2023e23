"""What the experiments on the papers' results say, and how it is written down.

Each experiment has a section: a table of the systems that were run, with shares of requests *and* of tokens, and one
of the quantities that have an aim, each beside the prototype's and the papers' figure. All that has an aim stands
together once more at the top. Rows come from several threads, but those of one experiment from one.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Report, Row


@dataclass(frozen=True, slots=True)
class Measured:
    """One value a seed."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def minus(self, other: "Measured") -> "Measured":
        """Difference, seed by seed."""
        return Measured([a - b for a, b in zip(self.values, other.values, strict=True)])

    def over(self, other: "Measured") -> "Measured":
        """Ratio, seed by seed."""
        return Measured([a / b if b else math.inf for a, b in zip(self.values, other.values, strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One measured quantity. Its aim is met when the mean lies within *least* and *most*; *why* it is not, if not."""

    text: str
    value: Measured
    unit: str
    least: float = -math.inf
    most: float = math.inf
    prototype: str = "-"
    paper: str = "-"
    baseline: Measured | None = None
    why: str = ""

    @property
    def has_aim(self) -> bool:
        return self.least > -math.inf or self.most < math.inf

    @property
    def is_met(self) -> bool:
        return self.least <= self.value.mean <= self.most

    @property
    def band(self) -> str:
        if not self.has_aim:
            return ""
        if self.most == math.inf:
            return f"≥ {self.least:g}"
        return f"≤ {self.most:g}" if self.least == -math.inf else f"{self.least:g} … {self.most:g}"

    @property
    def verdict(self) -> str:
        return "" if not self.has_aim else "met" if self.is_met else "**MISSED**"

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.value.values), max(self.value.values)

    def row(self, id_: str) -> Row:
        """As other benchmarks have it."""
        others = [f"{name} {value}" for name, value in (("prototype", self.prototype), ("paper", self.paper))
                  if value != "-"]  # fmt: skip
        aim = f"{self.band} ({', '.join(others)})".strip() if others else self.band
        baseline = None if self.baseline is None else self.baseline.mean
        return Row(
            metric=f"{id_} {self.text}", value=self.value.mean, unit=self.unit, baseline=baseline,
            ratio=self.value.mean / baseline if baseline else None, aim=aim,
            met=self.is_met if self.has_aim else None, n=len(self.value.values), spread=self.spread,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemRow:
    """One system under one load. ``figures`` are what became of the requests, by column."""

    case: str
    system: str
    admission: str
    figures: Mapping[str, Measured]


@dataclass(slots=True)
class Section:
    """One experiment."""

    title: str = ""
    systems: list[SystemRow] = field(default_factory=list)
    quantities: list[Quantity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class PaperReport:
    """Sections by experiment."""

    def __init__(self, scale: str) -> None:
        self.scale = scale
        self._sections: defaultdict[str, Section] = defaultdict(Section)
        self.general_notes: list[str] = []

    def section(self, id_: str) -> Section:
        return self._sections[id_]

    def title(self, id_: str, experiment: Callable[..., None]) -> None:
        self._sections[id_].title = (experiment.__doc__ or "").splitlines()[0].rstrip(".")

    def note(self, text: str) -> None:
        """A remark on no one experiment, or, where it begins with ids ("A8, B5: …"), on those."""
        head, colon, rest = text.partition(": ")
        ids = head.split(", ")
        if colon and all(len(id_) == 2 and id_[1].isdigit() for id_ in ids):
            for id_ in ids:
                self._sections[id_].notes.append(rest)
        else:
            self.general_notes.append(text)

    @property
    def rows(self) -> list[Row]:
        """All quantities, in order of experiment."""
        return [quantity.row(id_) for id_, section in self._ordered() for quantity in section.quantities]

    def shown(self) -> Report:
        """For the terminal: the quantities."""
        report = Report("paper", self.scale)
        report.rows += self.rows
        report.notes += [f"{id_}: {note}" for id_, section in self._ordered() for note in section.notes]
        report.notes += self.general_notes
        return report

    def plain(self) -> Report:
        """For machines: systems' figures are quantities like others."""
        report = Report("paper", self.scale)
        for id_, section in self._ordered():
            for row in section.systems:
                for name, value in row.figures.items():
                    text = f"{row.case}, {row.system}, {name}"
                    report.rows.append(Quantity(text=text, value=value, unit="").row(id_))
            report.rows += [quantity.row(id_) for quantity in section.quantities]
        return report

    def markdown(self, pictures: Sequence[Path], folder: Path) -> str:
        """The report; *pictures* are linked as seen from *folder*."""
        lines = ["# The papers' experiments, simulated", "", self.scale, "", *self._summary()]
        for id_, section in self._ordered():
            lines += ["", f"## {id_}. {section.title}" if section.title else f"## {id_}"]
            lines += ["", *_systems(section.systems)] if section.systems else []
            lines += ["", *_quantities(section.quantities)] if section.quantities else []
            for note in section.notes:
                lines += ["", note]
            for path in pictures:
                if path.stem == id_:
                    lines += ["", f"![{id_}]({os.path.relpath(path, folder)})"]
        return "\n".join([*lines, "", *self.general_notes, ""])

    def _summary(self) -> list[str]:
        aims = [(id_, q) for id_, section in self._ordered() for q in section.quantities if q.has_aim]
        missed = [(id_, q) for id_, q in aims if not q.is_met]
        lines = [
            f"{len(aims) - len(missed)} of {len(aims)} aims are met. Values are means over the seeds.",
            "",
            "| experiment | quantity | value | aim | | prototype | paper | if missed, why |",
            "|---|---|--:|---|---|---|---|---|",
        ]
        for id_, q in aims:
            why = q.why if not q.is_met else ""
            lines.append(
                f"| {id_} | {q.text} | {_number(q.value.mean)} | {q.band} | {q.verdict} | {q.prototype} | {q.paper} "
                f"| {why} |"
            )
        return lines

    def _ordered(self) -> list[tuple[str, Section]]:
        return sorted(self._sections.items())


def _systems(rows: Sequence[SystemRow]) -> list[str]:
    """One line a system; columns are those that any of them has."""
    columns = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [
        f"| load | system | admission | {' | '.join(columns)} |",
        f"|---|---|---|{'--:|' * len(columns)}",
    ]
    for row in rows:
        cells = [_spread(row.figures[name]) if name in row.figures else "" for name in columns]
        lines.append(f"| {row.case} | {row.system} | {row.admission} | {' | '.join(cells)} |")
    return lines


def _quantities(quantities: Sequence[Quantity]) -> list[str]:
    lines = ["| quantity | value | least … greatest | aim | | prototype | paper |", "|---|--:|---|---|---|---|---|"]
    for q in quantities:
        least, greatest = q.spread
        lines.append(
            f"| {q.text} | {_number(q.value.mean)} {q.unit} | {_number(least)} … {_number(greatest)} | {q.band} "
            f"| {q.verdict} | {q.prototype} | {q.paper} |"
        )
        if q.why and q.has_aim and not q.is_met:
            lines.append(f"| ↳ {q.why} | | | | | | |")
    return lines


def _spread(measured: Measured) -> str:
    """The mean, and half of what the seeds differ by where that shows."""
    half = (max(measured.values) - min(measured.values)) / 2
    text = _number(measured.mean)
    return text if half <= 0.005 * abs(measured.mean) or not math.isfinite(half) else f"{text} ± {_number(half)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
