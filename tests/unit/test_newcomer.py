"""The newcomer's path: what it runs is what the README and docs/first-steps.md show, and who stands in for Docker."""

import re
from pathlib import Path
from typing import Final

import pytest

from tests.deploy import compose_stand_in, podman
from tests.deploy.compose_stand_in import translated, write_files

_ROOT: Final = Path(__file__).resolve().parents[2]
_FILES: Final = ["--file=/c/docker-compose.yml", "--file=/c/.compose.stand-in.json"]
_HEAD: Final = ["podman-compose", "--env-file=/c/.env.stand-in", "--project-name=mooncake-newcomer", *_FILES]


def _shown(page: str) -> list[str]:
    """The commands of *page*, without what a comment says of them."""
    lines = re.findall(r"^\$ (.+)$", (_ROOT / page).read_text(), re.MULTILINE)
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def test_first_steps_shows_what_the_readme_shows_in_its_order() -> None:
    steps, readme = _shown("docs/first-steps.md"), _shown("README.md")
    assert len(steps) > 8
    places = [readme.index(step) for step in steps]
    assert places == sorted(places)


def test_the_script_runs_what_first_steps_shows() -> None:
    script = (_ROOT / "scripts" / "newcomer").read_text()
    for step in _shown("docs/first-steps.md"):
        start, _, data = step.partition(" -d ")
        assert f"{start}" in script, step
        assert data in script, step


@pytest.mark.parametrize(
    ("given", "done"),
    [
        ("up --detach --build --scale prefill=2", [*_HEAD, "up", "--no-build", "--detach", "--scale=prefill=2"]),
        ("exec gateway mooncake status", ["podman", "exec", "mooncake-newcomer_gateway_1", "mooncake", "status"]),
        ("down", [*_HEAD, "down", "--volumes"]),
        ("version", [*_HEAD, "version"]),
    ],
)
def test_podman_does_as_docker_would(given: str, done: list[str]) -> None:
    assert translated("podman-compose", given.split(), Path("/c")) == done


def test_a_scale_is_remembered_and_the_port_of_the_environment_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("ENGINE=transformers\nHTTP_PORT=8000\n")
    monkeypatch.setenv("HTTP_PORT", "8123")
    monkeypatch.delenv("SDK_PORT", raising=False)
    for command in ("up --detach --scale prefill=2", "down"):
        write_files(tmp_path, command.split())
        lines = (tmp_path / ".env.stand-in").read_text().splitlines()
        settings = dict(line.split("=", 1) for line in lines)  # the last one counts
        assert (settings["ENGINE"], settings["HTTP_PORT"], settings["PREFILL_REPLICAS"]) == ("fake", "8123", "2")


def test_without_containers_it_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(podman, "lacking", lambda: "needs root")
    assert compose_stand_in.main(["up"]) == podman.CANNOT
    assert capsys.readouterr().out == "needs root\n"
