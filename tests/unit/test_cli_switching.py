"""A worker of two roles: what each of them is configured with, and who cannot be one."""

from dataclasses import replace
from pathlib import Path

import pytest

from mooncake_mesh.cli import roles
from mooncake_mesh.cli.app import main
from mooncake_mesh.cli.switching import BothRoles
from mooncake_mesh.config import DecodeConfig, PrefillConfig
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_proto.control import Role

PREFILL = PrefillConfig(instance_id="w0", bind="ipc:///tmp/w0", threads=3, chunk_tokens=64, switchable=True)
DECODE = DecodeConfig(instance_id="d7", threads=9, max_batch=5)


def test_what_both_tables_have_is_as_in_the_one_it_starts_with() -> None:
    both = BothRoles.of(PREFILL, DECODE)
    assert both.first is Role.PREFILL
    assert both.prefill is PREFILL
    assert both.decode == replace(DECODE, instance_id="w0", bind="ipc:///tmp/w0", threads=3, switchable=True)
    other_way = BothRoles.of(replace(DECODE, switchable=True), PREFILL)
    assert other_way.first is Role.DECODE
    assert (other_way.prefill.instance_id, other_way.prefill.threads, other_way.prefill.chunk_tokens) == ("d7", 9, 64)


def test_two_of_one_role_are_refused() -> None:
    with pytest.raises(ValueError, match="two roles"):
        BothRoles.of(PREFILL, PREFILL)


def test_an_instance_of_stages_cannot_switch() -> None:
    with pytest.raises(ValueError, match="switchable"):
        PrefillConfig(switchable=True, pipeline=PipelineConfig(stages=2, endpoints="ipc:///tmp/s1"))


def test_the_command_reads_the_other_table_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, object, object]] = []

    def run_switchable(role: str, config: object, other: object) -> int:
        started.append((role, config, other))
        return 0

    monkeypatch.setattr(roles, "run_switchable", run_switchable)
    file = tmp_path / "mesh.toml"
    file.write_text("[prefill]\nchunk_tokens = 32\n[decode]\nmax_batch = 7\n")
    assert main(["prefill", "--switchable", f"--config={file}"], {"MOONCAKE_DECODE_MAX_WAITING_JOBS": "3"}) == 0
    assert main(["decode", "--switchable", "--max-batch=2", f"--config={file}"], {}) == 0
    (_, prefill, decode), (role, own, other) = started
    assert isinstance(prefill, PrefillConfig)
    assert isinstance(decode, DecodeConfig)
    assert (prefill.chunk_tokens, decode.max_batch, decode.max_waiting_jobs) == (32, 7, 3)
    assert isinstance(own, DecodeConfig)
    assert isinstance(other, PrefillConfig)
    assert (role, own.max_batch, other.chunk_tokens) == ("decode", 2, 32)
