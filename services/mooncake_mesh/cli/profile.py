"""``mooncake profile``: measure the instances of an idle mesh and write the cost profile that a conductor reads.

Exit codes: 0 when the profile was written, 1 when measuring failed, 2 when the gateway or conductor is not there.
"""

import asyncio
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from rich.console import Console
from rich.table import Table

from mooncake_mesh.cli.profile_measure import Measurement, Samples, plan_for
from mooncake_mesh.client import MooncakeClient
from mooncake_mesh.config_commands import ProfileConfig
from mooncake_mesh.errors import MooncakeError, PeerUnreachable
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.policy.cost_fit import PolynomialCost, TransferSample, fit_cost
from mooncake_mesh.policy.cost_profile import dump_kinds, load_kinds

_UNMEASURED_COPIES: Final = (
    TransferSample(n_bytes=1 << 20, elapsed_s=0.002 + (1 << 20) / 2e9),
    TransferSample(n_bytes=1 << 28, elapsed_s=0.002 + (1 << 28) / 2e9),
)
"""Loopback TCP, where no copy came about: the conductor corrects it by what it sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """How well a fit meets the medians of one kind of work; errors are shares of the measured times.

    ``single`` is the mean error over all ``samples``: more than ``mean`` by the noise of the machine.
    """

    work: str
    samples: int
    mean: float
    worst: float
    single: float


def run(config: ProfileConfig) -> int:
    try:
        return asyncio.run(_run(config))
    except PeerUnreachable as error:
        sys.stderr.write(f"mooncake profile: {error}\n")
        return 2
    except MooncakeError as error:
        sys.stderr.write(f"mooncake profile: {error.code}: {error}\n")
        return 1


async def _run(config: ProfileConfig) -> int:
    keys = None if config.keys is None else key_folder.load(config.keys)
    async with (
        Conductors(config.conductor, keys=keys) as conductors,
        MooncakeClient(config.gateway, keys=config.keys) as client,
    ):
        await conductors.follow()
        measurement = Measurement(client, conductors.leader, model=config.model)
        plan = plan_for(config.longest_prompt_tokens, config.largest_batch, config.repeats)
        await measurement.run(plan, _tell)
    costs = fitted(measurement)
    if not costs:
        sys.stderr.write("mooncake profile: nothing to fit: no prompt, or no decode step, was measured\n")
        return 1
    known = load_kinds(config.output.read_text()) if config.output.exists() else {}
    config.output.write_text(dump_kinds(known | costs))
    show(measurement, costs, Console(width=None if sys.stdout.isatty() else 120))
    if config.plot is not None:
        plot(measurement, costs, config.plot)
    sys.stdout.write(f"wrote {config.output}: {', '.join(sorted(costs))}\n")
    return 0


def _tell(what: str) -> None:
    sys.stderr.write(f"{what}\n")


def fitted(measurement: Measurement) -> dict[str, PolynomialCost]:
    """A model for each kind; one that only computes or only decodes has the other half from all kinds together."""
    typical = {kind: samples.medians() for kind, samples in measurement.samples.items()}
    everybody = Samples(
        prefills=[one for samples in typical.values() for one in samples.prefills],
        steps=[one for samples in typical.values() for one in samples.steps],
    )
    if not everybody.prefills or not everybody.steps:
        return {}
    return {
        kind: fit_cost(
            samples.prefills or everybody.prefills,
            samples.steps or everybody.steps,
            measurement.copies or _UNMEASURED_COPIES,
        )
        for kind, samples in typical.items()
    }


def error_rows(cost: PolynomialCost, samples: Samples, copies: Sequence[TransferSample]) -> list[ErrorRow]:
    raw, typical = _modelled(cost, samples, copies), _modelled(cost, samples.medians(), copies)
    rows = []
    for work, times in typical.items():
        errors = [abs(modelled_s - measured_s) / measured_s for modelled_s, measured_s in times]
        if errors:
            single = mean(abs(modelled_s - measured_s) / measured_s for modelled_s, measured_s in raw[work])
            rows.append(
                ErrorRow(work=work, samples=len(raw[work]), mean=mean(errors), worst=max(errors), single=single)
            )
    return rows


def _modelled(
    cost: PolynomialCost, samples: Samples, copies: Sequence[TransferSample]
) -> dict[str, list[tuple[float, float]]]:
    """(modelled, measured) times by kind of work."""
    return {
        "prefill": [(cost.prefill_s(s.uncached_tokens, s.cached_tokens), s.elapsed_s) for s in samples.prefills],
        "decode step": [(cost.decode_step_s(s.batch, s.context_tokens), s.elapsed_s) for s in samples.steps],
        "copy": [(cost.transfer_s(s.n_bytes), s.elapsed_s) for s in copies],
    }


def show(measurement: Measurement, costs: dict[str, PolynomialCost], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "work"):
        table.add_column(name, no_wrap=True)
    for name in ("samples", "mean error", "worst error", "single samples"):
        table.add_column(name, justify="right", no_wrap=True)
    for kind, cost in sorted(costs.items()):
        for row in error_rows(cost, measurement.samples[kind], measurement.copies):
            table.add_row(kind, row.work, str(row.samples), f"{row.mean:.1%}", f"{row.worst:.1%}", f"{row.single:.1%}")
    console.print(table)
    if not measurement.copies:
        console.print("no copy between nodes was seen: its terms are those of loopback TCP", highlight=False)


def plot(measurement: Measurement, costs: dict[str, PolynomialCost], path: Path) -> None:
    """Measured over modelled times of prefill and decode steps. Without matplotlib a line that says so."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        sys.stderr.write("mooncake profile: no plot: matplotlib is not installed\n")
        return
    figure = figures.Figure(figsize=(8, 4), layout="constrained")
    prefill, step = figure.subplots(1, 2)
    for kind, cost in sorted(costs.items()):
        samples = measurement.samples[kind]
        prefill.plot(
            [cost.prefill_s(s.uncached_tokens, s.cached_tokens) for s in samples.prefills],
            [s.elapsed_s for s in samples.prefills],
            ".",
            label=kind,
        )
        step.plot(
            [cost.decode_step_s(s.batch, s.context_tokens) for s in samples.steps],
            [s.elapsed_s for s in samples.steps],
            ".",
            label=kind,
        )
    for axes, title in ((prefill, "prefill"), (step, "decode step")):
        axes.axline((0, 0), slope=1, linewidth=0.8)
        axes.set(title=title, xlabel="modelled, s", ylabel="measured, s")
        axes.legend()
    figure.savefig(path)
