"""The documentation as far as a machine can tell: the reference is current, and every command in it could be run."""

import importlib
import importlib.util
import itertools
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from mooncake_mesh.cli.app import main
from mooncake_mesh.config import SECTIONS
from scripts import config_reference

_ROOT: Final = Path(__file__).resolve().parents[2]
_PAGES: Final = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_BLOCK: Final = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SYSTEM: Final = {"git", "systemctl", "xdg-open", "docker", "curl", "cp", "python", "python3", "pip", "journalctl"}
_OWN_FLAGS: Final = {"keys", "drain", "trace", "bench"}
"""Commands whose flags are no configuration."""


def _commands() -> Iterator[tuple[str, str]]:
    """Page and command of every line after a $, with the lines that a quote in it goes on to."""
    for page in _PAGES:
        for block in _BLOCK.findall(page.read_text()):
            lines = iter(block.splitlines())
            for line in lines:
                if not line.startswith("$ "):
                    continue
                command = line[2:]
                while command.count("'") % 2:
                    command += "\n" + next(lines)
                yield page.name, command


_COMMANDS: Final = list(_commands())


def test_there_are_commands_to_check() -> None:
    assert {page for page, _ in _COMMANDS} >= {"README.md", "quickstart.md", "deploy-compose.md", "deploy-systemd.md"}


@pytest.mark.parametrize(("page", "command"), _COMMANDS)
def test_a_command_could_be_run(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command, comments=True)
    if words[0] == "sudo":
        words = words[1:]
    if words[0] == "export":
        assert all("=" in assignment for assignment in words[1:])
        return
    program, arguments = words[0], words[1:]
    match Path(program).name:
        case "mooncake":
            _check_mooncake(arguments)
        case "curl":
            for data in (value for flag, value in itertools.pairwise(arguments) if flag == "-d"):
                json.loads(data)
        case "cp":
            assert (_ROOT / arguments[0]).exists()
        case "docker":
            _check_compose(arguments)
        case "install":
            text = (_ROOT / program).read_text()
            assert [word for word in arguments if word.startswith("--") and f'"{word}"' not in text] == []
        case _ if (_ROOT / program).is_file():
            assert os.access(_ROOT / program, os.X_OK)
        case "python" if arguments[:1] == ["-m"]:
            assert importlib.util.find_spec(arguments[1]) is not None
        case name:
            assert name in _SYSTEM, f"{page}: {command}"
    capsys.readouterr()


def _check_mooncake(arguments: list[str]) -> None:
    command, flags = arguments[0], arguments[1:]
    if command in _OWN_FLAGS:
        module = importlib.import_module(f"mooncake_mesh.cli.{command}")
        module._parser().parse_args(flags)
    elif command in SECTIONS:
        assert main([command, *flags, "--print-config"], environ={}) == 0
    else:
        assert command == "simulate"


def _check_compose(arguments: list[str]) -> None:
    assert arguments[0] == "compose"
    composed = (_ROOT / "docker-compose.yml").read_text()
    services = re.findall(r"^  ([a-z-]+):", composed.split("\nservices:\n")[1].split("\nvolumes:\n")[0], re.MULTILINE)
    words = iter(arguments[1:])
    command = next(words)
    assert command in ("up", "down", "exec", "stop", "logs")
    if command == "exec":
        assert next(words) in services
        program = list(words)
        if program[0] == "mooncake":
            _check_mooncake(program[1:])
    for word in words:
        assert word in {"--detach", "--build", "--scale"} or word.split("=")[0] in services


def test_the_configuration_reference_is_current() -> None:
    """Else: python scripts/config_reference.py."""
    assert config_reference.PAGE.read_text() == config_reference.page()


def test_every_page_is_in_the_site() -> None:
    navigation = (_ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in _PAGES[1:] if f": {page.name}\n" not in navigation] == []


def test_links_lead_somewhere() -> None:
    link = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
    broken = [
        f"{page.name}: {target}"
        for page in _PAGES
        for target in link.findall(page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_variable_of_the_compose_file_is_explained() -> None:
    used = set(re.findall(r"\$\{([A-Z_]+)", (_ROOT / "docker-compose.yml").read_text()))
    explained = set(re.findall(r"^([A-Z_]+)=", (_ROOT / ".env.example").read_text(), re.MULTILINE))
    assert explained - {"COMPOSE_PROFILES"} == used


def test_every_edge_case_of_context_caching_names_one_test_that_exists() -> None:
    page = (_ROOT / "docs" / "context-caching.md").read_text()
    section = page.split("\n## Edge cases\n")[1].split("\n## ")[0]
    files = dict(re.findall(r"`(\w+)` is\s+`([\w/]+\.py)`", section))
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    named = [re.fullmatch(r" (\w+) `(\w+)` ", row[-2]) for row in rows]
    assert len(named) > 20
    assert all(named)
    tests = [match.groups() for match in named if match is not None]
    assert len(set(tests)) == len(tests) == len({row[1] for row in rows})
    missing = [name for file, name in tests if f"\ndef {name}(" not in (_ROOT / files[file]).read_text()]
    assert missing == []
