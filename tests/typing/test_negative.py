"""The type checker refuses what the identifiers' types are there to prevent."""

import re
from pathlib import Path

import pytest
from mypy import api

REPOSITORY = Path(__file__).parents[2]
NEGATIVE = Path(__file__).with_name("negative") / "identifiers.py"


def test_one_kind_of_identifier_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    expected = {
        (number, found[1])
        for number, line in enumerate(NEGATIVE.read_text().splitlines(), 1)
        if (found := re.search(r"# rejected: ([a-z-]+)$", line))
    }
    report, errors, _ = api.run(["--no-pretty", "--show-error-codes", str(NEGATIVE.relative_to(REPOSITORY))])
    refused = {
        (int(found[1]), found[2])
        for found in re.finditer(r"identifiers\.py:(\d+): error: .*\[([a-z-]+)\]$", report, re.M)
    }
    assert errors == ""
    assert refused == expected, report
