"""docs/faults.md and the tests that it names; and that no failure on the list of field reports is missing from it.

The list lies beside the repository, where there is one: elsewhere only the page itself is checked.
"""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).resolve().parents[2]
_PAGE: Final = (_ROOT / "docs" / "faults.md").read_text()
_TESTS: Final = _ROOT / "tests"
_THREAD: Final = re.compile(r"[\w.-]+#\d+")
_CAN_BE_TESTED: Final = re.compile(r"\*\*Y(?:-fi)?\*\*")


def _rows() -> dict[str, str]:
    """Of the page's table of field reports: the rest of each row, by its id."""
    return dict(re.findall(r"^\| ([PS]\d+) \| (.*) \|$", _PAGE, re.MULTILINE))


def _named() -> Iterator[str]:
    """What stands in backticks anywhere on the page and is a test, a file of tests or a benchmark."""
    for name in dict.fromkeys(re.findall(r"`([^`\n]+)`", _PAGE)):
        words = name.removeprefix("python -m ").split()
        if re.fullmatch(r"test_\w+|[\w/]+\.py|bench\.\w+", words[0]):
            yield words[0]


def _functions() -> set[str]:
    pattern = re.compile(r"^\s*(?:async )?def (test_\w+)", re.MULTILINE)
    return {name for path in _TESTS.rglob("*.py") for name in pattern.findall(path.read_text())}


_FUNCTIONS: Final = _functions()


@pytest.mark.parametrize("name", list(_named()))
def test_what_the_page_names_exists(name: str) -> None:
    if name.startswith("bench."):
        assert importlib.util.find_spec(name) is not None
    elif name.endswith(".py"):
        sources = (_ROOT, _TESTS, _ROOT / "services" / "mooncake_mesh")
        assert any((source / name).is_file() for source in sources) or list(_TESTS.glob(f"*/{name}")), name
    else:
        assert name in _FUNCTIONS


@pytest.mark.parametrize(("number", "row"), _rows().items())
def test_each_report_has_a_test_or_the_reason_why_it_cannot_happen(number: str, row: str) -> None:
    failure, _, answer = row.partition(" | ")
    assert _THREAD.search(failure), f"{number} names no thread"
    named = set(re.findall(r"`(test_\w+)`", answer)) & _FUNCTIONS or re.search(r"`[\w/]+\.py`", answer)
    assert named or answer.startswith("cannot happen: "), number


# --- the list beside the repository -----------------------------------------------------------------------------------


def _list() -> str:
    """Section B.1 of the field reports; nothing where the list is not there."""
    for folder in _ROOT.parents[:2]:
        path = folder / "shared" / "field-reports.md"
        if path.is_file():
            section = path.read_text().partition("\n### B.1 ")[2]
            assert section, "the field reports have no section B.1 any more"
            return re.split(r"^##+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
    return ""


_LIST: Final = _list()
needs_the_list = pytest.mark.skipif(not _LIST, reason="no shared/field-reports.md beside this checkout")


def _entries() -> dict[str, set[str]]:
    """Threads of each numbered entry that can be tested."""
    rows = re.findall(r"^\| (P\d+) \| (.*)$", _LIST, re.MULTILINE)
    return {number: set(_THREAD.findall(row.split(" | ")[0])) for number, row in rows if _CAN_BE_TESTED.search(row)}


def _also_seen() -> Iterator[set[str]]:
    """Threads of each entry without a number that can be tested."""
    text = _LIST.partition("Also seen")[2]
    marks = re.split(r"\*\*(Y|Y-fi|P|N)\*\*", text)
    for said, mark in zip(marks[::2], marks[1::2], strict=False):
        if mark.startswith("Y"):
            yield set(_THREAD.findall(said))


@needs_the_list
def test_every_numbered_report_that_can_be_tested_is_on_the_page() -> None:
    entries, rows = _entries(), _rows()
    assert len(entries) >= 40
    assert sorted(set(entries) - set(rows)) == []
    other = [number for number, threads in entries.items() if not threads & set(_THREAD.findall(rows[number]))]
    assert other == [], "these rows cite another thread than the report of their number"


@needs_the_list
def test_the_reports_without_a_number_are_on_the_page_too() -> None:
    seen = list(_also_seen())
    cited = {thread for row in _rows().values() for thread in _THREAD.findall(row)}
    assert len(seen) >= 5
    assert [sorted(threads) for threads in seen if not threads & cited] == []
