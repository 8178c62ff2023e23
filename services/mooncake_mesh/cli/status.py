"""``mooncake status``: who is in the mesh and how they fare, as the conductor sees it.

Exit codes: 0 when the mesh is healthy, 1 when it is not, 2 when the conductor cannot be reached.
"""

import asyncio
import dataclasses
import enum
import json
import sys
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from mooncake_mesh.cli.drain_state import drain_state
from mooncake_mesh.config_commands import StatusConfig
from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.conductors import Conductors, standing
from mooncake_proto.control import (
    ClassReport,
    Health,
    Latency,
    LeaderReport,
    Load,
    MemberState,
    Role,
    StatusQuery,
    StatusReport,
)

HEALTHY: Final = 0
NOT_HEALTHY: Final = 1
UNREACHABLE: Final = 2

_ORDER: Final = (Role.CONDUCTOR, Role.GATEWAY, Role.PREFILL, Role.STAGE, Role.DECODE, Role.MESSENGER)
_STYLES: Final = {Health.ALIVE: "green", Health.SUSPECT: "yellow", Health.DEAD: "red"}
_PLAIN_WIDTH: Final = 160  # a pipe has no width; rich would cut the table at 80


def run(config: StatusConfig) -> int:
    return asyncio.run(_run(config))


async def _run(config: StatusConfig) -> int:
    keys = None if config.keys is None else key_folder.load(config.keys)
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    while True:
        try:
            async with Conductors(config.conductor, keys=keys) as conductors:
                standings = await _standings(conductors)
                await conductors.follow()
                report = await conductors.leader.call(StatusQuery(), StatusReport, timeout_s=config.timeout_s)
        except MooncakeError as error:
            sys.stderr.write(f"mooncake status: no answer from the conductor at {config.conductor}: {error}\n")
            code = UNREACHABLE
        else:
            code = HEALTHY if report.healthy else NOT_HEALTHY
            if config.watch_s is not None and sys.stdout.isatty():
                console.clear()
            if config.json:
                sys.stdout.write(as_json(report) + "\n")
                sys.stdout.flush()
            else:
                show(report, console)
                for line in standings:
                    console.print(line, highlight=False)
        if config.watch_s is None:
            return code
        await asyncio.sleep(config.watch_s)


async def _standings(conductors: Conductors) -> list[str]:
    """What each of several conductors says of itself; of the only one there is nothing to say."""
    if not conductors.are_several:
        return []
    reports = await conductors.reports()
    return [
        f"conductor at {endpoint}: {standing(said) if isinstance(said, LeaderReport) else f'no answer ({said})'}"
        for endpoint, said in reports
    ]


def as_json(report: StatusReport) -> str:
    """The whole report as one JSON object, fields named as in the protocol."""
    return json.dumps(dataclasses.asdict(report), default=_plain, ensure_ascii=False)


def show(report: StatusReport, console: Console) -> None:
    """A table of the members, one of the classes of requests, and a line with the verdict."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("role", "instance", "node", "health"):
        table.add_column(name, no_wrap=True)
    for name in ("queue", "running", "blocks free", "cached", "total", "on ssd"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("transports", "pages"):
        table.add_column(name, no_wrap=True)
    for state in sorted(report.cluster.members, key=_sort_key):
        table.add_row(*_row(state))
    console.print(table)
    for state in report.cluster.members:
        if any(state.load.tenants):  # without names there is but one tenant, who has all that is in use
            used = ", ".join(f"{tenant or '(none)'} {blocks}" for tenant, blocks in state.load.tenants.items())
            console.print(f"blocks of tenants on {state.member.node_id}: {used}", highlight=False)
    if report.classes:
        console.print(_classes(report.classes))
    facts = f"up {report.uptime_s:.0f} s, {report.placed_total} placed, {report.rejected_total} rejected"
    if report.healthy:
        console.print(f"[green]healthy[/green]: {facts}", highlight=False)
    else:
        console.print(f"[red]not healthy[/red]: {'; '.join(report.reasons)} ({facts})", highlight=False)


def _classes(classes: Sequence[ClassReport]) -> Table:
    """Quantiles stand beside their objective: met, or not."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("class", no_wrap=True)
    for name in ("ended", "refused", "failed", "good", "good/s", "TTFT p50", "p90", "TBT p50", "p90", "wasted tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in classes:
        ended = one.requests - one.cancelled
        share = f"{one.good} ({one.good / ended:.0%})" if ended else "-"
        table.add_row(
            one.name,
            str(ended),
            str(one.refused),
            str(one.failed),
            share,
            f"{one.good_per_s:.2f}",
            *_times(one.ttft),
            *_times(one.tbt),
            str(one.wasted_tokens),
        )
    return table


def _times(latency: Latency) -> tuple[str, str]:
    limit_s = latency.objective_s
    mark = "" if limit_s is None or latency.p90_s <= limit_s else f" > {limit_s:g}"
    return f"{latency.p50_s:.3f} s", f"{latency.p90_s:.3f} s{mark}"


def _sort_key(state: MemberState) -> tuple[int, str]:
    return _ORDER.index(state.member.role), state.member.instance_id


def _row(state: MemberState) -> tuple[str, ...]:
    member, load = state.member, state.load
    is_drained = load.draining and state.health is Health.ALIVE
    health = drain_state(state).value if is_drained else state.health.value
    return (
        member.role.value,
        member.instance_id,
        member.node_id,
        f"[{_STYLES[state.health]}]{health}[/]",
        *_work(member.role, load),
        *_pool(load),
        load.transports or "-",
        load.pages or "-",
    )


def _work(role: Role, load: Load) -> tuple[str, str]:
    """Queued and running jobs; a role without jobs of its own has none to show."""
    if role in (Role.CONDUCTOR, Role.MESSENGER):
        return ("-", "-")
    return (str(load.queued_jobs), str(load.running_jobs))


def _pool(load: Load) -> tuple[str, ...]:
    """Only who reports a pool has one, and an SSD tier only who was given a folder for it."""
    ssd = f"{load.ssd_blocks}/{load.ssd_slots}" if load.ssd_slots else "-"
    if load.ssd_faults:
        ssd += f" ({load.ssd_faults} faults)"
    if not load.blocks_total:
        return ("-", "-", "-", ssd)
    return (str(load.blocks_free), str(load.blocks_cached), str(load.blocks_total), ssd)


def _plain(value: object) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    raise TypeError(f"a report holds no {type(value).__name__}")
