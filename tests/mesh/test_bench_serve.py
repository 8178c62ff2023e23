"""``mooncake bench serve`` against a running mesh."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh


def _bench(mesh: Mesh, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mooncake_mesh", "bench", "serve", f"--base-url={mesh.http}", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def _report(mesh: Mesh, *flags: str) -> dict[str, Any]:
    done = _bench(mesh, "--json", *flags)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


def test_lengths_are_exact_and_the_mesh_counts_the_same_requests(fake_mesh: Mesh) -> None:
    report = _report(fake_mesh, "--requests=12", "--input-len=40", "--output-len=6", "--max-concurrency=4")
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (12, 480, 72)
    assert report["max_concurrent_requests"] <= 4
    assert report["mesh"]["ended"] == report["mesh"]["placed"] == 12
    assert report["good_share"] == 1.0
    assert 0 < report["mean_ttft_ms"] <= report["mean_e2el_ms"]
    assert report["mean_itl_ms"] > 0


def test_shared_prefixes_come_from_the_pool(fake_mesh: Mesh) -> None:
    flags = ("--workload=shared-prefix", "--requests=10", "--prefixes=1", "--prefix-len=64", "--input-len=16")
    report = _report(fake_mesh, *flags, "--output-len=2", "--max-concurrency=1", "--seed=5")
    assert report["cached_tokens"] == 9 * 64
    assert report["hit_rate"] == pytest.approx(0.72)


def test_a_trace_is_replayed_with_its_prefixes(fake_mesh: Mesh, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    ids = ([1, 2, 3], [1, 2, 4], [1, 2, 3])
    lines = [
        {"timestamp": 4000 * n, "input_length": 1536, "output_length": 64, "hash_ids": blocks}
        for n, blocks in enumerate(ids)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = (
        "--workload=trace",
        f"--trace={trace}",
        "--length-scale=0.0625",
        "--seconds=20",
    )  # one is over before the next
    report = _report(fake_mesh, *flags)
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (3, 3 * 96, 3 * 4)
    assert report["cached_tokens"] == 64 + 80  # of a prompt that is known whole the last block is computed


def test_an_objective_that_nobody_meets_makes_prefill_wasted(fake_mesh: Mesh) -> None:
    done = _bench(fake_mesh, "--requests=3", "--input-len=32", "--output-len=2", "--ttft=0.000001", "--seed=9")
    assert done.returncode == 0, done.stderr
    assert "Good requests of all:                      0 (0.0%)" in done.stdout
    assert "Wasted prefill, by this client (tok):      96" in done.stdout
    assert "3/3" in done.stderr
