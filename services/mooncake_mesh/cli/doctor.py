"""``mooncake doctor``: what this machine offers a messenger, what is missing, and how to mend it.

Exit codes: 0 when the transport that was asked for can work here, 1 when it cannot.
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from mooncake_mesh.cli.checkup import Facts, Finding, Verdict, examine
from mooncake_mesh.config import DoctorConfig
from mooncake_mesh.mesh.arena_memory import free_huge_pages
from mooncake_mesh.messenger.transports.rdma.devices import SYSFS, read_devices

_STYLES: Final = {Verdict.GOOD: "green", Verdict.HINT: "yellow", Verdict.PROBLEM: "red"}
_IMPORT_TIMEOUT_S: Final = 20.0


def run(config: DoctorConfig) -> int:
    findings = examine(
        probe(), transport=config.transport, arena_bytes=config.arena_bytes, pages=config.pages, rdma=config.rdma
    )
    if config.json:
        lines = [dataclasses.asdict(finding) | {"verdict": finding.verdict.value} for finding in findings]
        sys.stdout.write(json.dumps(lines, ensure_ascii=False, indent=1) + "\n")
    else:
        show(findings, Console() if sys.stdout.isatty() else Console(width=200))
    return int(any(finding.verdict is Verdict.PROBLEM for finding in findings))


def show(findings: list[Finding], console: Console) -> None:
    """A line for each finding, its remedy below it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(finding.subject, f"[{style}]{finding.verdict.value}[/]", finding.text)
        if finding.remedy:
            table.add_row("", "", f"→ {finding.remedy}")
    console.print(table, highlight=False)


def probe(sysfs: Path = SYSFS, proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> Facts:
    """Look at this machine; nothing is changed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_free = limit == resource.RLIM_INFINITY or os.geteuid() == 0  # root may lock what it likes (CAP_IPC_LOCK)
    return Facts(
        available_bytes=_available_bytes(proc / "meminfo"),
        shm_bytes=_free_bytes(shm),
        huge_pages=_chosen(sysfs / "kernel/mm/transparent_hugepage/shmem_enabled"),
        free_huge_pages=free_huge_pages(sysfs / "kernel/mm/hugepages/hugepages-2048kB"),
        memlock_bytes=None if is_free else limit,
        numa_nodes=len(list((sysfs / "devices/system/node").glob("node[0-9]*"))),
        devices=read_devices(sysfs),
        verbs_error=_verbs_error(),
    )


def _available_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0


def _free_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def _chosen(path: Path) -> str | None:
    """The word in brackets: ``always within_size advise [never] deny force``."""
    if not path.exists():
        return None
    return path.read_text().partition("[")[2].partition("]")[0] or None


def _verbs_error() -> str | None:
    """Why pyverbs cannot be imported. Tried in a process of its own: only one module of ours may import it."""
    command = [sys.executable, "-c", "import pyverbs.device, pyverbs.qp, pyverbs.mr"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S, check=False)
    return None if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["it does not load"])[-1]
