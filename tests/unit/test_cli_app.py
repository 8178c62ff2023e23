"""The command line: what it prints, its exit codes, and that it starts without heavy imports."""

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import structlog

from mooncake_mesh import telemetry
from mooncake_mesh.cli import roles, up
from mooncake_mesh.cli.app import main
from mooncake_mesh.config import SECTIONS, EngineKind, GatewayConfig, MessengerConfig, PrefillConfig, UpConfig
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.errors import ConfigError, PeerUnreachable, UnsupportedModel
from mooncake_mesh.mesh import key_folder, runtime


@pytest.mark.parametrize("name", SECTIONS)
def test_print_config(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--print-config"], environ={}) == 0
    assert tomllib.loads(capsys.readouterr().out).keys() == {name}


@pytest.mark.parametrize("name", SECTIONS)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    assert "--print-config" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("mooncake-mesh ")


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["gateway", "--flavour=x"], ["gateway", "--por=1"], ["gateway", "stray"]]
)
def test_wrong_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv, environ={})
    assert end.value.code == 2
    assert "mooncake" in capsys.readouterr().err


def test_wrong_configuration_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--port=70000"], environ={}) == 2
    captured = capsys.readouterr()
    assert captured.err == "mooncake gateway: gateway.port: must lie in 0..65535, got 70000 (from --port)\n"
    assert captured.out == ""


def test_up_gets_configuration_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[up]\nport = 9\n")
    seen: list[object] = []

    def record(*given: object) -> int:
        seen.extend(given)
        return 7

    monkeypatch.setattr(up, "run", record)
    assert main(["up", f"--config={file}", "--decode=2"], environ={}) == 7
    assert seen == [UpConfig(port=9, decode=2), file]


def test_role_gets_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def record(*given: object) -> int:
        seen.extend(given)
        return 7

    monkeypatch.setattr(roles, "run", record)
    assert main(["prefill", "--chunk-tokens=64"], environ={"MOONCAKE_PREFILL_THREADS": "2"}) == 7
    assert seen == ["prefill", PrefillConfig(chunk_tokens=64, threads=2)]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("is taken", path="gateway.port"), 2, "mooncake gateway: gateway.port: is taken\n"),
        (UnsupportedModel("T5 is no decoder"), 2, "mooncake gateway: T5 is no decoder\n"),
        (ExceptionGroup("g", [ExceptionGroup("g", [UnsupportedModel("no")])]), 2, "mooncake gateway: no\n"),
        (PeerUnreachable("conductor is away"), 1, "mooncake gateway: conductor is away\n"),
        (ZeroDivisionError("by 0"), 1, "mooncake gateway: ZeroDivisionError: by 0\n"),
    ],
)
def test_failure_of_a_service_is_an_exit_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(runtime, "main", fail)
    monkeypatch.setattr(telemetry, "configure", lambda *_: None)
    monkeypatch.setattr(importlib, "import_module", lambda name: name)
    assert roles.run("gateway", GatewayConfig()) == code
    assert capsys.readouterr().err == line


def test_a_folder_without_keys_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(telemetry, "configure", lambda *_: None)
    assert roles.run("gateway", GatewayConfig(keys=tmp_path)) == 2
    assert "keys: cannot read a key from" in capsys.readouterr().err


def test_a_bind_without_keys_or_in_clear_is_warned_of_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "configure", lambda *_: None)
    monkeypatch.setattr(runtime, "main", lambda *_: 0)
    with structlog.testing.capture_logs() as logs:
        assert roles.run("gateway", GatewayConfig(host="0.0.0.0", allow_insecure_bind=True)) == 0
        assert roles.run("gateway", GatewayConfig()) == 0
        keys = key_folder.create(tmp_path / "keys", "first").folder
        assert roles.run("messenger", MessengerConfig(data_host="0.0.0.0", bind="tcp://0.0.0.0:1", keys=keys)) == 0
        tls = MessengerConfig(data_host="0.0.0.0", bind="tcp://0.0.0.0:1", keys=keys, tcp_tls=True)
        assert roles.run("messenger", tls) == 0
        assert roles.run("gateway", GatewayConfig(host="0.0.0.0", keys=keys)) == 0
        for tcp_tls in (False, True):
            stage = PipelineConfig(stages=2, stage=1, data_host="10.0.0.5", tcp_tls=tcp_tls)
            assert roles.run("prefill", PrefillConfig(pipeline=stage, engine=EngineKind.FAKE, keys=keys)) == 0
    assert [line["event"] for line in logs] == ["insecure_bind", *["not_encrypted"] * 3]
    in_clear = [["data_host=0.0.0.0"], ["host=0.0.0.0"], ["pipeline.data_host=10.0.0.5"]]
    assert [line["addresses"] for line in logs[1:]] == in_clear
    assert "messenger.tcp_tls" in logs[1]["remedy"]
    line = logs[0]
    assert (line["log_level"], line["addresses"]) == ("warning", ["host=0.0.0.0"])


def test_command_line_imports_nothing_heavy() -> None:
    program = (
        "import sys; import mooncake_mesh.__main__\n"
        "print(sorted({'torch', 'transformers', 'zmq', 'uvicorn', 'starlette', 'numpy', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
