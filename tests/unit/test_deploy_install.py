"""deploy/systemd/install, below a folder of its own: what it writes is what processes can be started with."""

import argparse
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from mooncake_mesh.cli.loading import load
from mooncake_mesh.cli.settings import add_flags
from mooncake_mesh.config import SECTIONS
from mooncake_mesh.mesh import key_folder

_INSTALL: Final = Path(__file__).resolve().parents[2] / "deploy/systemd/install"


def _install(root: Path, *flags: str) -> list[str]:
    """Names of the units that it made."""
    done = subprocess.run([_INSTALL, f"--root={root}", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("start them")[0].split()


def _configured(root: Path, unit: str) -> Any:
    """What a process of *unit* reads."""
    role = re.fullmatch(r"mooncake-(\w+)@.*", unit)
    assert role is not None
    etc = root / "etc/mooncake"
    environ = dict(line.split("=", 1) for line in (etc / f"{unit}.env").read_text().splitlines())
    parser = argparse.ArgumentParser()
    add_flags(parser, SECTIONS[role[1]])
    flags = parser.parse_args([f"--config={etc / 'mooncake.toml'}"])
    return load(SECTIONS[role[1]], flags=flags, environ=environ)


def test_a_whole_mesh_on_one_machine(tmp_path: Path) -> None:
    units = _install(tmp_path, "--node=a", "--prefill=2", "--decode=1", "--conductor=here", "--gateway")
    configs = {unit: _configured(tmp_path, unit) for unit in units}
    assert set(configs) == {
        "mooncake-conductor@0",
        "mooncake-messenger@a",
        "mooncake-prefill@a-0",
        "mooncake-prefill@a-1",
        "mooncake-decode@a-0",
        "mooncake-gateway@a",
    }
    assert {config.conductor for unit, config in configs.items() if "conductor" not in unit} == {
        configs["mooncake-conductor@0"].bind
    }
    assert configs["mooncake-prefill@a-1"].messenger == configs["mooncake-messenger@a"].bind
    bound = [config.bind for config in configs.values()]
    assert len(set(bound)) == len(bound)
    for unit in units:
        assert (tmp_path / f"etc/systemd/system/{unit.split('@')[0]}@.service").is_file()


def test_a_node_of_several_machines_has_keys_and_an_address(tmp_path: Path) -> None:
    keys = tmp_path / "mesh"
    key_folder.create(keys, "a")
    root = tmp_path / "root"
    units = _install(root, "--node=b", "--decode=1", "--conductor=10.0.0.1", "--address=10.0.0.2", f"--keys={keys}")
    assert units == ["mooncake-messenger@b", "mooncake-decode@b-0"]
    messenger, decode = (_configured(root, unit) for unit in units)
    assert (messenger.bind, messenger.data_host) == ("tcp://10.0.0.2:7720", "10.0.0.2")
    assert (decode.bind, decode.messenger) == ("tcp://10.0.0.2:0", messenger.bind)
    assert {messenger.conductor, decode.conductor} == {"tcp://10.0.0.1:7700"}
    assert {messenger.keys, decode.keys} == {Path("/etc/mooncake/keys")}
    copied = root / "etc/mooncake/keys"
    assert copied.stat().st_mode & 0o777 == 0o700
    assert (copied / "server.key_secret").stat().st_mode & 0o777 == 0o600


def test_of_several_conductors_each_runs_where_its_address_is(tmp_path: Path) -> None:
    keys = tmp_path / "mesh"
    key_folder.create(keys, "a")
    both, etcd = "10.0.0.1,10.0.0.2", "http://10.0.0.7:2379,http://10.0.0.8:2379"
    endpoints = "tcp://10.0.0.1:7700,tcp://10.0.0.2:7700"
    for node, address in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")):
        root = tmp_path / node
        flags = [f"--node={node}", f"--address={address}", f"--keys={keys}", f"--conductor={both}", f"--etcd={etcd}"]
        units = _install(root, *flags)
        assert ("mooncake-conductor@0" in units) is (address in both)
        for unit in units:
            config = _configured(root, unit)
            if "conductor" in unit:
                assert (config.instance_id, config.bind) == (f"conductor-{node}", f"tcp://{address}:7700")
                assert config.etcd.endpoints == etcd
            else:
                assert config.conductor == endpoints


def test_several_conductors_without_etcd_are_refused(tmp_path: Path) -> None:
    flags = ["--node=a", "--address=10.0.0.1", f"--keys={tmp_path}", "--conductor=10.0.0.1,10.0.0.2"]
    done = subprocess.run([_INSTALL, f"--root={tmp_path}", *flags], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--etcd" in done.stderr


def test_a_second_run_keeps_what_is_edited_and_removes_workers(tmp_path: Path) -> None:
    _install(tmp_path, "--node=a", "--prefill=2", "--conductor=here")
    edited = tmp_path / "etc/mooncake/mooncake.toml"
    edited.write_text('[prefill]\nmodel = "elsewhere"\n')
    units = _install(tmp_path, "--node=a", "--prefill=1", "--conductor=here")
    assert not (tmp_path / "etc/mooncake/mooncake-prefill@a-1.env").exists()
    assert _configured(tmp_path, units[-1]).model == "elsewhere"


@pytest.mark.parametrize("flags", [{"--address": "10.0.0.2"}, {"--conductor": "10.0.0.1"}])
def test_a_machine_that_others_reach_needs_keys(tmp_path: Path, flags: Mapping[str, str]) -> None:
    given = {"--root": str(tmp_path), "--node": "a", "--conductor": "here"} | dict(flags)
    command = [str(_INSTALL), *(f"{name}={value}" for name, value in given.items())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--keys" in done.stderr
