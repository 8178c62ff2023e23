"""The command that replays a trace: what it prints, what it writes, and what it says of nonsense."""

import json
from pathlib import Path

import pytest

from bench.simulate import main as simulate
from mooncake_mesh.cli.app import main as mooncake


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "tiny_trace.jsonl"
    lines = [
        {"timestamp": 500 * i, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 10 + i]} for i in range(12)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_systems_run_side_by_side(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = simulate(["--trace", str(trace), "--nodes", "2P1D", "s2:3", "--csv", str(tmp_path / "csv")])
    out = capsys.readouterr().out
    assert code == 0
    assert "2P1D" in out
    assert "s2:3" in out
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {"2P1D.csv", "s2-3.csv"}
    assert len((tmp_path / "csv" / "2P1D.csv").read_text().splitlines()) == 13


def test_mooncake_simulate_is_the_same_program(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mooncake(["simulate", "--trace", str(trace), "--nodes", "1P1D", "--requests", "3"]) == 0
    assert "1P1D" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--nodes", "4Q"], "neither like 8P8D"),
        (["--nodes", "0P1D"], "needs prefill instances"),
        (["--nodes", "sglang:4"], "there are vllm"),
        (["--speed", "0"], "speed"),
        (["--trace", "/nowhere/no_trace.jsonl"], "no trace at"),
        (["--trace", "/nowhere/x.jsonl"], "named NAME_trace.jsonl"),
    ],
)
def test_nonsense_is_refused_in_one_line(
    flags: list[str], complaint: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(["--trace", str(trace), *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1
