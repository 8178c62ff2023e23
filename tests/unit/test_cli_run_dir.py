"""The folder of a mesh: its own, gone afterwards, and cleaned up after one that was killed."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from mooncake_mesh.cli import run_dir


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def test_fresh_folder_is_private_and_goes_away(temporary: Path) -> None:
    with run_dir.held(None) as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        _make_socket(folder / "sdk.ipc")
    assert list(temporary.iterdir()) == []


def test_fresh_folder_goes_away_after_an_error(temporary: Path) -> None:
    with pytest.raises(RuntimeError), run_dir.held(None):
        raise RuntimeError
    assert list(temporary.iterdir()) == []


def test_chosen_folder_that_did_not_exist_goes_away(tmp_path: Path) -> None:
    with run_dir.held(tmp_path / "new") as folder:
        _make_socket(folder / "sdk.ipc")
    assert not (tmp_path / "new").exists()


def test_chosen_folder_that_existed_keeps_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with run_dir.held(tmp_path) as folder:
        _make_socket(folder / "sdk.ipc")
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]


def test_second_mesh_in_a_folder_is_refused(tmp_path: Path) -> None:
    with (
        run_dir.held(tmp_path),
        pytest.raises(ValueError, match=r"^run_dir: another mesh runs in"),
        run_dir.held(tmp_path),
    ):
        pass


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^run_dir: "), run_dir.held(tmp_path / "file" / "sub"):
        pass


def test_folder_of_a_killed_mesh_is_removed_by_the_next(temporary: Path) -> None:
    dead = temporary / f"{run_dir.PREFIX}dead"
    dead.mkdir()
    (dead / "lock").touch()
    _make_socket(dead / "sdk.ipc")
    died_early = temporary / f"{run_dir.PREFIX}early"
    died_early.mkdir()
    (died_early / "lock").touch()
    just_being_made = temporary / f"{run_dir.PREFIX}new"
    just_being_made.mkdir()
    other = temporary / "mooncake-other"
    other.mkdir()
    with run_dir.held(None) as living:
        assert {entry.name for entry in temporary.iterdir()} == {living.name, just_being_made.name, other.name}
        run_dir.remove_abandoned(temporary)
        assert living.exists()


def test_links_are_not_followed(temporary: Path) -> None:
    victim = temporary / "victim"
    victim.mkdir()
    (victim / "lock").touch()
    (victim / "data").touch()
    os.symlink(victim, temporary / f"{run_dir.PREFIX}link")
    run_dir.remove_abandoned(temporary)
    assert (victim / "data").exists()
