"""What bench.transfer makes of its samples: grids of figures, aims, and where a missed one's time goes.

RDMA figures come from a program that runs in another kernel: ``scripts/rdma-vm python -m bench.transfer_rdma --json
FILE`` with a FILE in the checkout's ``.cache`` folder. It writes what every benchmark writes, an object whose ``rows``
are :class:`bench.report.Row`; its rows are taken over as they are, aims included.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.report import Report, Row
from bench.transfer_child import SIZES, Answer, Question

BATCH: Final = 16
_CORES: Final = os.cpu_count() or 1
_RDMA_TIMEOUT_S: Final = 600.0
_ROOT: Final = Path(__file__).parent.parent

Measured = dict[tuple[str, Question], dict[int, Answer]]
"""Label of a path and question → answers by round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPath:
    """A line of the grids: ``op`` of the process tree ``rig``, asked for ``sizes``."""

    label: str
    rig: str
    op: str
    sizes: tuple[int, ...] = SIZES


class TransferReport(Report):
    """Grids of all figures, then a table of the aims. The JSON file has both."""

    def __init__(self) -> None:
        super().__init__("transfer", "aims, from medians of interleaved rounds")
        self.figures: list[Row] = []
        self._grids: list[Table] = []

    def grid(self, title: str, columns: Sequence[str], lines: Mapping[str, Sequence[str]]) -> None:
        """A table of ready cells."""
        table = Table(title=title, title_justify="left")
        table.add_column("", justify="left")
        for column in columns:
            table.add_column(column, justify="right")
        for label, cells in lines.items():
            table.add_row(label, *cells)
        self._grids.append(table)

    def finish(self, args: argparse.Namespace) -> None:
        console = Console(width=140)
        for grid in self._grids:
            console.print(grid)
        super().finish(argparse.Namespace(json=None))
        if args.json:
            self.write(args.json, [*self.figures, *self.rows])


def name_of(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


# --- figures ----------------------------------------------------------------------------------------------------------


def add_grids(measured: Measured, paths: Sequence[MeasuredPath], report: TransferReport) -> None:
    """GB/s with CPU seconds per GB, by size, and latencies; every figure also as a row."""
    questions = sorted({question for _, question in measured}, key=lambda q: (q.batch, q.size_bytes))
    for batch, how in ((1, "one block a call"), (BATCH, f"{BATCH} blocks a call")):
        sizes = sorted({q.size_bytes for q in questions if q.batch == batch and q.size_bytes in SIZES})
        lines: dict[str, list[str]] = {}
        for path in paths:
            cells = [_throughput(measured, path, size, batch, report) for size in sizes]
            if any(cells):
                lines[path.label] = cells
        report.grid(f"{how}: GB/s (CPU seconds per GB)", [name_of(size) for size in sizes], lines)
    lines = {}
    for path in paths:
        cells = [cell for size in (4 << 10, 64 << 10) for cell in _latency(measured, path, size, report)]
        if any(cells):
            lines[path.label] = cells
    report.grid("a lone transfer: µs", ["4 KiB p50", "p99", "64 KiB p50", "p99"], lines)


def answers_of(measured: Measured, label: str, size_bytes: int, batch: int) -> list[Answer]:
    return list(_by_round(measured, label, size_bytes, batch).values())


def _by_round(measured: Measured, label: str, size_bytes: int, batch: int) -> dict[int, Answer]:
    for (name, question), answers in measured.items():
        if name == label and question.size_bytes == size_bytes and question.batch == batch:
            return answers
    return {}


def _throughput(measured: Measured, path: MeasuredPath, size: int, batch: int, report: TransferReport) -> str:
    answers = answers_of(measured, path.label, size, batch)
    if not answers:
        return ""
    values = [answer.gb_per_s for answer in answers]
    cpu = median(answer.cpu_s_per_gb for answer in answers)
    report.figures.append(
        Row(
            metric=f"{path.label}, {name_of(size)} x {batch}",
            value=median(values),
            unit="GB/s",
            n=sum(answer.calls for answer in answers),
            spread=(min(values), max(values)),
            cpu_s_per_gb=cpu,
        )
    )
    return f"{median(values):.3g} ({cpu:.2g})"


def _latency(measured: Measured, path: MeasuredPath, size: int, report: TransferReport) -> list[str]:
    answers = answers_of(measured, path.label, size, 1)
    if not answers:
        return ["", ""]
    cells = []
    for name, values in (("p50", [a.p50_us for a in answers]), ("p99", [a.p99_us for a in answers])):
        report.figures.append(
            Row(
                metric=f"{path.label}, lone {name_of(size)} {name}",
                value=median(values),
                unit="µs",
                n=sum(answer.calls for answer in answers),
                spread=(min(values), max(values)),
            )
        )
        cells.append(f"{median(values):.0f}")
    return cells


# --- aims -------------------------------------------------------------------------------------------------------------


def judge(measured: Measured, report: TransferReport) -> None:
    """The aims of the issue, as far as this run measured both sides of them."""
    _judge_hand_off(measured, report)
    versus = _Versus(measured, report)
    for size in (1 << 20, 4 << 20, 16 << 20):
        versus.aim("shm, one copy", "memory copy, 1 thread", size, BATCH, 0.9)
        versus.aim("shm, one copy, 2 MiB pages", "shm, one copy", size, BATCH, None)
    for batch in (1, BATCH):
        for size in (1 << 20, 4 << 20, 16 << 20):
            versus.aim("tcp", "Mooncake engine, tcp write", size, batch, 2.2)
            versus.aim("tcp, checksums", "Mooncake engine, tcp write", size, batch, None)
            versus.aim("tcp", "bare sockets, 2 connections", size, batch, 0.9)
    for batch in (1, BATCH):
        for transport in ("auto", "tcp"):
            for op in ("put", "get"):
                theirs = f"Mooncake Store, {op}"
                versus.aim(f"pool {op}, {transport}", theirs, 1 << 20, batch, 2.0)
                versus.aim(f"pool {op}, {transport}, checksums", theirs, 1 << 20, batch, None)
            from_ssd = f"pool get from SSD, {transport}"
            versus.aim(from_ssd, "Mooncake Store, get from SSD", 1 << 20, batch, 2.0)
            versus.aim(from_ssd, "disk, direct reads, 2 threads", 1 << 20, batch, None)


def _judge_hand_off(measured: Measured, report: TransferReport) -> None:
    for size in SIZES:
        answers = answers_of(measured, "shm, hand-off", size, BATCH)
        if answers:
            values = [answer.p50_us for answer in answers]
            report.row(
                f"hand-off of {BATCH} blocks of {name_of(size)}, p50",
                median(values),
                "µs",
                aim="≤ 30",
                met=median(values) <= 30,
                n=sum(answer.calls for answer in answers),
                spread=(min(values), max(values)),
            )


class _Versus:
    """Ratios of two paths of the same rounds."""

    def __init__(self, measured: Measured, report: TransferReport) -> None:
        self._measured = measured
        self._report = report

    def aim(self, ours: str, theirs: str, size: int, batch: int, least_ratio: float | None) -> None:
        """One row, if both were measured; the median of the rounds' own ratios decides. None: only shown beside it."""
        of_ours = _by_round(self._measured, ours, size, batch)
        of_theirs = _by_round(self._measured, theirs, size, batch)
        rounds = of_ours.keys() & of_theirs.keys()
        if not rounds:
            return
        mine, other = list(of_ours.values()), list(of_theirs.values())
        values = [answer.gb_per_s for answer in mine]
        ratio = median(of_ours[number].gb_per_s / of_theirs[number].gb_per_s for number in rounds)
        self._report.row(
            f"{ours} / {theirs}, {name_of(size)} x {batch}",
            median(values),
            "GB/s",
            baseline=median(answer.gb_per_s for answer in other),
            aim="" if least_ratio is None else f"≥ {least_ratio:g} x",
            met=None if least_ratio is None else ratio >= least_ratio,
            n=sum(answer.calls for answer in mine),
            spread=(min(values), max(values)),
            cpu_s_per_gb=median(answer.cpu_s_per_gb for answer in mine),
        )
        if least_ratio is not None and ratio < least_ratio:
            self._report.note(
                f"missed: {ours}, {name_of(size)} x {batch} ({ratio:.2f} x, round by round): {_where(mine)}; "
                f"{theirs}: {_where(other)}"
            )


def _where(answers: Sequence[Answer]) -> str:
    """Where the time goes, as far as CPU clocks tell: copying and system calls, or waiting."""
    busy = median(answer.cpu_s / answer.seconds for answer in answers)
    cpu = median(answer.cpu_s_per_gb for answer in answers)
    return f"{cpu:.2f} CPU s/GB, {busy:.2f} of {_CORES} cores busy, {median(a.p50_us for a in answers):,.0f} µs a call"


# --- RDMA -------------------------------------------------------------------------------------------------------------


def rdma_rows(report: TransferReport) -> None:
    """Rows from the Soft-RoCE kernel; a note says why when there are none."""
    script = _ROOT / "scripts" / "rdma-vm"
    module = _ROOT / "bench" / "transfer_rdma.py"
    if not script.exists() or not module.exists():
        report.note(
            f"rdma: not measured, {script.name if not script.exists() else module.name} is not in this checkout"
        )
        return
    file = _ROOT / ".cache" / "transfer_rdma.json"
    file.parent.mkdir(exist_ok=True)
    try:
        done = subprocess.run(
            [str(script), "python", "-m", "bench.transfer_rdma", "--json", str(file)],
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=_RDMA_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        report.note(f"rdma: not measured, no answer in {_RDMA_TIMEOUT_S:g} s")
        return
    if done.returncode:
        report.note(f"rdma: not measured, {(done.stderr or done.stdout).strip()[-300:]}")
        return
    report.rows += [Row(**row) for row in json.loads(file.read_text())["rows"]]
