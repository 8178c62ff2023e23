"""The keys folder: what is made, who can read it, and what is refused."""

import stat
from pathlib import Path

import pytest
from zmq.auth import load_certificate

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.curve import Audience, KeyPair
from mooncake_mesh.mesh.log_allowance import LogAllowance

UNKNOWN = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    key_folder.create(tmp_path / "mesh", "first")
    return tmp_path / "mesh"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secrets_are_their_owner_s_alone(folder: Path) -> None:
    assert {path.name: mode(path) for path in folder.glob("*.key_secret")} == {
        "server.key_secret": 0o600,
        "own.key_secret": 0o600,
    }
    assert mode(folder) == 0o700


def test_the_files_are_those_of_zeromq_s_own_tools(folder: Path) -> None:
    keys = key_folder.load_server(folder)
    assert keys.server is not None
    assert load_certificate(folder / "server.key_secret") == (keys.server.public, keys.server.secret)
    assert load_certificate(folder / "own.key") == (keys.own.public, None)
    assert load_certificate(folder / "members" / "first.key") == (keys.own.public, None)


def test_a_client_s_folder_holds_no_secret_of_the_mesh(folder: Path, tmp_path: Path) -> None:
    client = key_folder.issue(folder, "app", Audience.CLIENTS, tmp_path / "app")
    assert sorted(path.name for path in (tmp_path / "app").rglob("*")) == ["own.key", "own.key_secret", "server.key"]
    assert client.server is None
    with pytest.raises(ConfigError, match="client's"):
        key_folder.load_server(tmp_path / "app")
    allowed = key_folder.allowed(folder)
    assert allowed[Audience.CLIENTS][client.own.public] == "app"
    assert client.own.public not in allowed[Audience.MEMBERS]


def test_a_member_s_folder_is_a_whole_one(folder: Path, tmp_path: Path) -> None:
    member = key_folder.issue(folder, "node1", Audience.MEMBERS, tmp_path / "node1")
    first = key_folder.load(folder)
    assert member.server == first.server
    assert member.own != first.own
    assert key_folder.allowed(tmp_path / "node1") == key_folder.allowed(folder)
    assert mode(tmp_path / "node1" / "server.key_secret") == 0o600


def test_an_entry_comes_and_goes(folder: Path) -> None:
    before = key_folder.allowed_state(folder)
    key_folder.allow(folder, "late", UNKNOWN, Audience.CLIENTS)
    assert [(entry.name, entry.audience) for entry in key_folder.entries(folder)] == [
        ("first", Audience.MEMBERS),
        ("late", Audience.CLIENTS),
    ]
    assert key_folder.allowed_state(folder) != before
    key_folder.revoke(folder, "late")
    assert UNKNOWN.encode() not in key_folder.allowed(folder)[Audience.CLIENTS]


def test_a_file_without_a_key_lets_nobody_in(folder: Path) -> None:
    (folder / "members" / "odd.key").write_text('curve\n    public-key = "short"\n')
    assert [entry.name for entry in key_folder.entries(folder)] == ["first"]


def test_what_is_wrong_is_named(folder: Path, tmp_path: Path) -> None:
    for action, message in (
        (lambda: key_folder.create(folder, "again"), "holds the keys of a mesh already"),
        (lambda: key_folder.load(tmp_path / "nowhere"), "nowhere/server.key"),
        (lambda: key_folder.allow(folder, "../evil", UNKNOWN, Audience.CLIENTS), "a name has up to 64"),
        (lambda: key_folder.allow(folder, "first", UNKNOWN, Audience.CLIENTS), "first is on the allow-list"),
        (lambda: key_folder.allow(folder, "bad", "tooshort", Audience.CLIENTS), "40 characters"),
        (lambda: key_folder.allow(folder, "bad", "\\" * 40, Audience.CLIENTS), "Z85"),
        (lambda: key_folder.revoke(folder, "nobody"), "nobody is called nobody"),
        (lambda: key_folder.issue(folder, "x", Audience.CLIENTS, folder), "is not empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            action()


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    (folder / "own.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        key_folder.load(folder)


def test_keys_of_two_meshes_do_not_mix(folder: Path, tmp_path: Path) -> None:
    key_folder.create(tmp_path / "other", "first")
    (tmp_path / "other" / "server.key").replace(folder / "server.key")
    with pytest.raises(ConfigError, match="not of one pair"):
        key_folder.load(folder)


def test_a_secret_is_not_in_what_is_printed() -> None:
    assert "hush" not in repr(KeyPair(public=b"p", secret=b"hush"))


def test_a_log_allowance_counts_what_went_unsaid() -> None:
    allowance = LogAllowance(lines=2, window_s=60)
    assert [allowance.take(now_s) for now_s in (0.0, 1.0, 2.0, 3.0, 60.0)] == [0, 0, None, None, 2]
