"""The audit of dependencies: what is a problem, what is no answer, and that neither is taken for the other."""

import datetime
import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from scripts import audit
from scripts.audit import Allowed, Finding, NoAnswer, Report, Source

_TODAY: Final = datetime.date(2026, 6, 15)
_DAY: Final = datetime.timedelta(days=1)
_FINDING: Final = Finding(package="some-lib", version="1.2", ids=("PYSEC-2026-7", "CVE-2026-99"), fixed_in=("1.3",))
_CLEAN: Final = Report(n_audited=3, skipped=(), findings=())
_BAD: Final = Report(n_audited=3, skipped=(), findings=(_FINDING,))


def _allowed(until: datetime.date, *, id: str = "CVE-2026-99", package: str = "some_lib") -> Allowed:
    return Allowed(id=id, package=package, reason="not called here", until=until)


class Sources:
    """Answers for each source: first about an old release, then about the pins."""

    def __init__(self, answers: Mapping[Source, list[Report | NoAnswer]]) -> None:
        self._answers = {source: list(given) for source, given in answers.items()}
        self.asked: list[tuple[Source, str]] = []

    def __call__(self, source: Source, pins: Path, limit_s: float) -> Report | NoAnswer:
        self.asked.append((source, pins.read_text()))
        return self._answers[source].pop(0)


@pytest.fixture
def pins(tmp_path: Path) -> Path:
    path = tmp_path / "pins.txt"
    path.write_text("some-lib==1.2\n")
    return path


# --- the list of what is allowed --------------------------------------------------------------------------------------


def test_a_finding_is_a_problem_that_says_how_to_get_rid_of_it() -> None:
    (line,) = audit.problems([_FINDING], [], _TODAY)
    assert line == "some-lib 1.2: PYSEC-2026-7 = CVE-2026-99, fixed in 1.3"


@pytest.mark.parametrize("until", [_TODAY, _TODAY + _DAY])
def test_what_is_allowed_is_no_problem_up_to_its_last_day(until: datetime.date) -> None:
    assert audit.problems([_FINDING], [_allowed(until)], _TODAY) == []


def test_an_expired_entry_allows_nothing_and_is_quoted() -> None:
    (line,) = audit.problems([_FINDING], [_allowed(_TODAY - _DAY)], _TODAY)
    assert "was allowed until 2026-06-14 (not called here)" in line


def test_an_entry_is_for_one_advisory_of_one_package() -> None:
    others = [_allowed(_TODAY, id="CVE-2026-98"), _allowed(_TODAY, package="other-lib")]
    assert len(audit.problems([_FINDING], others, _TODAY)) == 1
    assert audit.needless([_FINDING], [*others, _allowed(_TODAY)]) == others


def test_the_list_is_read() -> None:
    text = '[[allowed]]\nid = "CVE-2026-99"\npackage = "some_lib"\nreason = "not called here"\nuntil = 2026-06-15\n'
    assert audit.read_allowed(text) == [_allowed(_TODAY)]


@pytest.mark.parametrize("without", ["id", "package", "reason", "until"])
def test_an_entry_that_lacks_something_is_refused(without: str) -> None:
    fields = {"id": '"X"', "package": '"y"', "reason": '"z"', "until": "2026-06-15"}
    blank = {**fields, without: '" "'}
    del fields[without]
    for entry in (fields, blank):
        with pytest.raises(ValueError, match="entry 1"):
            audit.read_allowed("[[allowed]]\n" + "".join(f"{key} = {value}\n" for key, value in entry.items()))


def test_the_list_in_the_checkout_can_be_read() -> None:
    audit.read_allowed(audit.ALLOWED.read_text())


# --- reports ----------------------------------------------------------------------------------------------------------


def test_a_report_of_pip_audit_is_read() -> None:
    advisory = {"id": "PYSEC-2026-7", "fix_versions": ["1.3"], "aliases": ["CVE-2026-99"]}
    packages: list[dict[str, Any]] = [
        {"name": "some-lib", "version": "1.2", "vulns": [advisory]},
        {"name": "fine", "version": "1", "vulns": []},
        {"name": "unheard-of", "skip_reason": "not found"},
    ]
    report = audit.read_report(json.dumps({"dependencies": packages, "fixes": []}))
    assert report == Report(n_audited=2, skipped=("unheard-of",), findings=(_FINDING,))


@pytest.mark.parametrize("text", ["", "Traceback", "{}", "[]", '{"dependencies": [{"name": "x"}]}'])
def test_anything_else_is_no_report(text: str) -> None:
    with pytest.raises(ValueError):
        audit.read_report(text)


def test_a_command_that_crashes_is_no_answer() -> None:
    error = "requests.exceptions.ConnectionError: HTTPSConnectionPool(...)"
    answer = audit.run([sys.executable, "-c", f"raise SystemExit({error!r})"], 30.0)
    assert answer == NoAnswer(why="cannot be reached (ConnectionError)")


def test_a_command_that_hangs_is_ended() -> None:
    assert audit.run([sys.executable, "-c", "input()"], 0.0) == NoAnswer(why="no answer in time")


class _OsvStandIn(BaseHTTPRequestHandler):
    """Knows one advisory."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_bad = query["package"]["name"] == "some-lib"
        affected = {"package": query["package"], "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "1.3"}]}]}
        advisory = {"id": "PYSEC-2026-7", "aliases": ["CVE-2026-99"], "summary": "bad", "affected": [affected]}
        body = json.dumps({"vulns": [advisory]} if is_bad else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to say."""


def test_pip_audit_itself_finds_what_a_source_knows(pins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins.write_text("some-lib==1.2\nfine==1\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), _OsvStandIn) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("PIP_AUDIT_OSV_URL", f"http://127.0.0.1:{server.server_port}/")
        report = audit.run_pip_audit(Source.OSV, pins, 30.0)
        server.shutdown()
    assert report == Report(n_audited=2, skipped=(), findings=(_FINDING,))


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_source_that_knows_advisories_is_asked_about_the_pins(pins: Path) -> None:
    sources = Sources({Source.INDEX: [_BAD, _CLEAN]})
    lines, status = audit.audit(sources, pins, [], _TODAY)
    assert (lines, status) == (["3 packages audited, 0 vulnerabilities that nothing allows"], 0)
    assert [text for _, text in sources.asked] == ["jinja2==2.4.1\n", "some-lib==1.2\n"]


def test_a_known_vulnerability_fails(pins: Path) -> None:
    lines, status = audit.audit(Sources({Source.INDEX: [_BAD, _BAD]}), pins, [], _TODAY)
    assert status == 1
    assert lines[0].startswith("VULNERABLE: some-lib 1.2")


def test_a_source_without_advisories_finds_nothing_and_is_not_believed(pins: Path) -> None:
    """As an index that is a mirror: pip-audit skips every package there and says that none is vulnerable."""
    skipped = Report(n_audited=0, skipped=("jinja2",), findings=())
    sources = Sources({Source.INDEX: [skipped], Source.OSV: [_BAD, _BAD]})
    assert audit.audit(sources, pins, [], _TODAY)[1] == 1
    assert [source for source, _ in sources.asked] == [Source.INDEX, Source.OSV, Source.OSV]


def test_without_any_source_it_says_why_and_does_not_fail(pins: Path) -> None:
    sources = Sources({Source.INDEX: [_CLEAN], Source.OSV: [_BAD, NoAnswer(why="no answer in time")]})
    (line,), status = audit.audit(sources, pins, [], _TODAY)
    assert status == 0
    assert line.startswith("not audited: pypi: has no advisories")
    assert line.endswith("osv: no answer in time")


def test_packages_that_the_source_does_not_know_are_named(pins: Path) -> None:
    partly = Report(n_audited=2, skipped=("unheard-of",), findings=())
    lines, status = audit.audit(Sources({Source.INDEX: [_BAD, partly]}), pins, [_allowed(_TODAY)], _TODAY)
    assert status == 0
    assert lines == [
        "allowed, but not found: CVE-2026-99 of some_lib",
        "not audited: the source does not know unheard-of",
        "2 packages audited, 0 vulnerabilities that nothing allows",
    ]


def test_pins_that_cannot_be_read_are_no_matter_of_the_source(pins: Path) -> None:
    assert audit.what_is_wrong_here(pins) == ""
    pins.write_text("some-lib>=1.2\n")
    assert "some-lib" in audit.what_is_wrong_here(pins)
