"""A recorded conductor decides the same when it is told the same again, in any process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_mesh.conductor.making import conductor_core, described, replay
from mooncake_mesh.conductor.recording import BadRecording, OpenRecording, about
from mooncake_mesh.config import ConductorConfig
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_proto.ids import Incarnation
from tests.unit.conductor_trace import applied, recorded

N = 30


def record(path: Path, config: ConductorConfig) -> None:
    incarnation = Incarnation("conductor")
    with OpenRecording(path, described(config, incarnation, 0.0)) as recording:
        core = conductor_core(config, incarnation, 0.0, recording)
        for now_s, event in recorded(N):
            applied(core, now_s, event)
            core.orders.take()
            core.expire(now_s)


@pytest.mark.parametrize("placement", [PlacementKind.RANDOM, PlacementKind.ADAPTIVE])
def test_a_recording_replays_to_the_same_digest(tmp_path: Path, placement: PlacementKind) -> None:
    config = ConductorConfig(placement=placement, admission=AdmissionKind.HOLD, ttft_slo_s=4.0, seed=3)
    record(tmp_path / "r", config)
    first, second = replay(tmp_path / "r"), replay(tmp_path / "r")
    assert first.digest == second.digest == first.recorded
    assert len(first.decisions) == N
    assert about(tmp_path / "r")["config"]["placement"] == placement.value


def test_it_does_so_under_another_hash_seed(tmp_path: Path) -> None:
    record(tmp_path / "r", ConductorConfig())
    root = Path(__file__).resolve().parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-m", "bench.replay", str(tmp_path / "r")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_another_answer_gives_another_digest(tmp_path: Path) -> None:
    record(tmp_path / "r", ConductorConfig(seed=1, placement=PlacementKind.RANDOM))
    text = (tmp_path / "r").read_text()
    (tmp_path / "r").write_text(text.replace('"seed": 1', '"seed": 2', 1))
    found = replay(tmp_path / "r")
    assert found.digest != found.recorded


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    record(tmp_path / "r", ConductorConfig())
    text = (tmp_path / "r").read_text()
    (tmp_path / "r").write_text(text[:-40])
    found = replay(tmp_path / "r")
    assert found.digest == found.recorded


def test_another_file_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("{}\n")
    with pytest.raises(BadRecording, match="format"):
        replay(tmp_path / "r")
