"""Are any of the pinned dependencies known to be vulnerable? (scripts/audit)

pip-audit asks the advisories' sources: the package index, or OSV ($PIP_AUDIT_OSV_URL names a mirror of it). By itself
it says "no known vulnerabilities" also of a package that the source does not know, and so of all packages where the
source, say a mirror of the index, has no advisories. So a source first has to find the vulnerability of an old
release; one that does not is not asked, and a package that it does not know is named as not audited. That pip-audit
runs and reads the pins is seen beforehand, without any source, so that what fails later is one.
"""

import datetime
import enum
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[1]
PINS: Final = _ROOT / "constraints.txt"
ALLOWED: Final = _ROOT / "scripts/audit_allowed.toml"
_KNOWN_BAD: Final = "jinja2==2.4.1\n"
"""Advisories since 2014."""
_LIMIT_S: Final = 120.0
"""For all that is asked together."""
_SOCKET_LIMIT_S: Final = 10


class Source(enum.StrEnum):
    """Where pip-audit finds advisories."""

    INDEX = "pypi"
    OSV = "osv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A decision to live with an advisory, up to and including the day *until*."""

    id: str
    package: str
    reason: str
    until: datetime.date


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One advisory, under all its *ids*, that a pinned version falls under."""

    package: str
    version: str
    ids: tuple[str, ...]
    fixed_in: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    n_audited: int
    skipped: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    why: str


Ask = Callable[[Source, Path, float], Report | NoAnswer]
"""Asks a source about a file of pins, for so many seconds at most."""


# --- what counts ------------------------------------------------------------------------------------------------------


def read_allowed(text: str) -> list[Allowed]:
    """Raises ValueError for an entry that is not complete: one without a reason or an end is no decision."""
    entries = []
    for number, entry in enumerate(tomllib.loads(text).get("allowed", []), start=1):
        texts = [entry.get(key) for key in ("id", "package", "reason")]
        until = entry.get("until")
        if not all(isinstance(t, str) and t.strip() for t in texts) or type(until) is not datetime.date:
            raise ValueError(f"entry {number} of the allowed advisories needs id, package, reason and until (a date)")
        entries.append(Allowed(id=entry["id"], package=entry["package"], reason=entry["reason"], until=until))
    return entries


def read_report(text: str) -> Report:
    """pip-audit's report in JSON. Raises ValueError for anything else."""
    try:
        packages = json.loads(text)["dependencies"]
        skipped = tuple(p["name"] for p in packages if "skip_reason" in p)
        audited = [p for p in packages if "skip_reason" not in p]
        findings = tuple(_finding(p, advisory) for p in audited for advisory in p["vulns"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a report of pip-audit: {error!r}") from error
    return Report(n_audited=len(audited), skipped=skipped, findings=findings)


def _finding(package: dict[str, Any], advisory: dict[str, Any]) -> Finding:
    ids = (advisory["id"], *advisory.get("aliases", []))
    return Finding(
        package=package["name"], version=package["version"], ids=ids, fixed_in=tuple(advisory.get("fix_versions", []))
    )


def problems(findings: Sequence[Finding], allowed: Sequence[Allowed], today: datetime.date) -> list[str]:
    """A line for each finding that nothing allows today."""
    lines = []
    for finding in findings:
        entries = [entry for entry in allowed if _is_about(entry, finding)]
        if any(today <= entry.until for entry in entries):
            continue
        line = f"{finding.package} {finding.version}: {' = '.join(finding.ids)}"
        line += f", fixed in {', '.join(finding.fixed_in)}" if finding.fixed_in else ", no release is without it"
        line += "".join(f"; was allowed until {entry.until} ({entry.reason})" for entry in entries)
        lines.append(line)
    return lines


def needless(findings: Sequence[Finding], allowed: Sequence[Allowed]) -> list[Allowed]:
    """Entries about which there is nothing left to decide."""
    return [entry for entry in allowed if not any(_is_about(entry, finding) for finding in findings)]


def _is_about(entry: Allowed, finding: Finding) -> bool:
    return entry.id in finding.ids and _plain(entry.package) == _plain(finding.package)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


# --- asking -----------------------------------------------------------------------------------------------------------


def run_pip_audit(source: Source, pins: Path, limit_s: float) -> Report | NoAnswer:
    """As :data:`Ask`."""
    command = [*_pip_audit(pins), "--vulnerability-service", source, "--timeout", str(_SOCKET_LIMIT_S)]
    return run([*command, "--format", "json", "--desc", "off", "--aliases", "on"], limit_s)


def what_is_wrong_here(pins: Path) -> str:
    """Why pip-audit could audit *pins* with no source at all; empty if it could."""
    command = [*_pip_audit(pins), "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return "" if done.returncode == 0 else _last_line(done.stderr)


def _pip_audit(pins: Path) -> list[str]:
    given = ["--requirement", str(pins), "--no-deps", "--disable-pip"]
    return [sys.executable, "-m", "pip_audit", *given, "--progress-spinner", "off"]


def run(command: Sequence[str], limit_s: float) -> Report | NoAnswer:
    """Run *command*, which prints a report. Its exit status says nothing: it is the same for a finding and a crash."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit_s, 0.0), check=False)
    except subprocess.TimeoutExpired:
        return NoAnswer(why="no answer in time")
    try:
        return read_report(done.stdout)
    except ValueError:
        return NoAnswer(why=_last_line(done.stderr))


def _last_line(text: str) -> str:
    """Of a traceback the error's name alone: what follows of an HTTP error is long and says no more."""
    line = (text.strip() or "nothing was said").splitlines()[-1]
    error = re.match(r"requests\.exceptions\.(\w+)", line)
    return f"cannot be reached ({error[1]})" if error else line[:200]


def first_report(ask: Ask, pins: Path, limit_s: float = _LIMIT_S) -> Report | NoAnswer:
    """That of the first source that has advisories and answers. Returns within *limit_s*."""
    end_s = time.monotonic() + limit_s
    reasons = []
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as known_bad:
        known_bad.write(_KNOWN_BAD)
        known_bad.flush()
        for source in Source:
            answer = ask(source, Path(known_bad.name), end_s - time.monotonic())
            if isinstance(answer, Report) and not answer.findings:
                answer = NoAnswer(why=f"has no advisories (does not know that of {_KNOWN_BAD.strip()})")
            elif isinstance(answer, Report):
                answer = ask(source, pins, end_s - time.monotonic())
            if isinstance(answer, Report):
                return answer
            reasons.append(f"{source}: {answer.why}")
    return NoAnswer(why="; ".join(reasons))


def audit(ask: Ask, pins: Path, allowed: Sequence[Allowed], today: datetime.date) -> tuple[list[str], int]:
    """What to print, and the exit status."""
    report = first_report(ask, pins)
    if isinstance(report, NoAnswer):
        return [f"not audited: {report.why}"], 0
    found = problems(report.findings, allowed, today)
    lines = [f"VULNERABLE: {line}" for line in found]
    lines += [f"allowed, but not found: {entry.id} of {entry.package}" for entry in needless(report.findings, allowed)]
    if report.skipped:
        lines.append(f"not audited: the source does not know {', '.join(report.skipped)}")
    lines.append(f"{report.n_audited} packages audited, {len(found)} vulnerabilities that nothing allows")
    return lines, int(bool(found))


def main() -> int:
    allowed = read_allowed(ALLOWED.read_text())
    if wrong := what_is_wrong_here(PINS):
        sys.stdout.write(f"audit: FAILED before any source was asked: {wrong}\n")
        return 1
    lines, status = audit(run_pip_audit, PINS, allowed, datetime.date.today())
    sys.stdout.write("".join(f"audit: {line}\n" for line in lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
