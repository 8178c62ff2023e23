"""What bench.transfer makes of samples: ratios round by round, missed aims with a reason, peers that are not there."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest

from bench.peers import environments
from bench.transfer_child import Answer, Question, offsets
from bench.transfer_rows import Measured, MeasuredPath, TransferReport, add_grids, judge, rdma_rows

MiB = 1 << 20


def _answer(gb_per_s: float, p50_us: float = 100.0) -> Answer:
    return Answer(calls=10, moved_bytes=10**9, seconds=1 / gb_per_s, cpu_s=0.5, p50_us=p50_us, p99_us=2 * p50_us)


def _asked(size_bytes: int, batch: int) -> Question:
    return Question(op="any", size_bytes=size_bytes, batch=batch, seconds=0.0)


def test_an_aim_is_judged_by_the_ratios_of_the_rounds_that_have_both_sides() -> None:
    measured: Measured = {
        ("tcp", _asked(MiB, 16)): {0: _answer(4.0), 1: _answer(1.0), 2: _answer(4.0)},
        ("bare sockets, 2 connections", _asked(MiB, 16)): {1: _answer(1.0), 2: _answer(5.0)},
        ("Mooncake engine, tcp write", _asked(MiB, 16)): {0: _answer(1.0), 1: _answer(0.1), 2: _answer(1.0)},
    }
    report = TransferReport()
    judge(measured, report)
    met = {row.metric.split(" / ")[1]: row.met for row in report.rows}
    assert met == {
        "bare sockets, 2 connections, 1 MiB x 16": True,  # 1.0 and 0.8: their median is the aim itself
        "Mooncake engine, tcp write, 1 MiB x 16": True,
    }
    assert report.notes == []


def test_a_missed_aim_says_where_the_time_goes() -> None:
    measured: Measured = {
        ("shm, one copy", _asked(4 * MiB, 16)): {0: _answer(2.0)},
        ("memory copy, 1 thread", _asked(4 * MiB, 16)): {0: _answer(8.0)},
        ("shm, hand-off", _asked(4 * MiB, 16)): {0: _answer(900.0, p50_us=31.0)},
    }
    report = TransferReport()
    judge(measured, report)
    assert [row.met for row in report.rows] == [False, False]
    (note,) = report.notes
    assert "0.25 x" in note
    assert "0.50 CPU s/GB" in note


def test_every_figure_reaches_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = MeasuredPath(label="tcp", rig="links", op="tcp")
    measured: Measured = {
        ("tcp", _asked(64 << 10, 1)): {0: _answer(1.0), 1: _answer(3.0)},
        ("tcp", _asked(64 << 10, 16)): {0: _answer(4.0)},
    }
    report = TransferReport()
    add_grids(measured, [path], report)
    report.finish(Namespace(json=tmp_path / "rows.json"))
    rows = {row["metric"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert rows["tcp, 64 KiB x 1"]["value"] == 2.0
    assert rows["tcp, 64 KiB x 1"]["spread"] == [1.0, 3.0]
    assert rows["tcp, 64 KiB x 1"]["cpu_s_per_gb"] == 0.5
    assert rows["tcp, lone 64 KiB p99"]["value"] == 200.0
    assert "2 (0.5)" in capsys.readouterr().out


def test_blocks_of_all_calls_walk_the_pool_in_order() -> None:
    question = Question(op="any", size_bytes=4 * MiB, batch=16, seconds=0.0)
    walked = [offset for call in range(5) for offset in offsets(question, call)]
    assert walked == [i * 4 * MiB for i in [*range(64), *range(16)]]


def test_a_peer_that_cannot_be_installed_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "a first line\nERROR: No matching distribution found\n")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(environments.NotInstalled, match="No matching distribution"):
        environments.install(environments.NIXL)


def test_rdma_rows_that_are_not_there_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.transfer_rows._ROOT", tmp_path)
    report = TransferReport()
    rdma_rows(report)
    assert report.rows == []
    assert report.notes == ["rdma: not measured, rdma-vm is not in this checkout"]
