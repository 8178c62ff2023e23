"""Which NICs are near which memory, and the paths that follow from it."""

import json
from pathlib import Path

import pytest

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.messenger.transports.rdma import paths
from mooncake_mesh.messenger.transports.rdma.devices import read_devices
from mooncake_mesh.messenger.transports.rdma.paths import PathHealth, Tiers, tiers
from mooncake_mesh.messenger.transports.rdma.selection import Nic, choose_nics
from mooncake_mesh.messenger.transports.rdma.topology import (
    ANYWHERE,
    Affinity,
    BadTopology,
    from_file,
    from_numa,
    location_of,
)
from tests.unit.rdma_sysfs import V2, add_device, add_numa_node, mapped

GIDS = {0: (mapped("10.0.0.1"), V2)}


def nics(sysfs: Path, **numa_node_of: int | None) -> tuple[Nic, ...]:
    for name, node in numa_node_of.items():
        add_device(sysfs, name, GIDS, numa_node=node)
    return choose_nics(read_devices(sysfs), RdmaConfig())


def path(local: str, remote: str) -> paths.Path:
    return paths.Path("peer", local, remote)


def test_the_nics_of_the_same_numa_node_are_preferred(tmp_path: Path) -> None:
    topology = from_numa(nics(tmp_path, mlx5_0=0, mlx5_1=0, mlx5_2=1, mlx5_3=1))
    assert topology.near("cpu:0") == Affinity(preferred=("mlx5_0", "mlx5_1"), secondary=("mlx5_2", "mlx5_3"))
    assert topology.near("cpu:1") == Affinity(preferred=("mlx5_2", "mlx5_3"), secondary=("mlx5_0", "mlx5_1"))


def test_a_nic_of_no_node_is_near_everything(tmp_path: Path) -> None:
    topology = from_numa(nics(tmp_path, mlx5_0=0, mlx5_1=1, rxe0=None))
    assert topology.near("cpu:0") == Affinity(preferred=("mlx5_0", "rxe0"), secondary=("mlx5_1",))


@pytest.mark.parametrize("location", ["cpu:7", "cuda:0", ANYWHERE])
def test_unknown_memory_is_near_every_nic(tmp_path: Path, location: str) -> None:
    topology = from_numa(nics(tmp_path, mlx5_0=0, mlx5_1=1))
    assert topology.near(location) == Affinity(preferred=("mlx5_0", "mlx5_1"))


def test_the_users_matrix_counts(tmp_path: Path) -> None:
    used = nics(tmp_path, mlx5_0=0, mlx5_1=0)
    file = tmp_path / "topology.json"
    file.write_text(json.dumps({"cpu:0": [["mlx5_1"], ["mlx5_0"]], "cuda:0": [["mlx5_0"]]}))
    topology = from_file(file, used)
    assert topology.near("cpu:0") == Affinity(preferred=("mlx5_1",), secondary=("mlx5_0",))
    assert topology.near("cuda:0") == Affinity(preferred=("mlx5_0",))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"cpu:0": []}',
        '{"cpu:0": [[]]}',
        '{"cpu:0": ["mlx5_0"]}',
        '{"cpu:0": [["mlx5_0"], [], []]}',
        '{"cpu:0": [["mlx5_9"]]}',
        '{"cpu:0": [[1]]}',
    ],
)
def test_a_matrix_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    used = nics(tmp_path, mlx5_0=0)
    file = tmp_path / "topology.json"
    file.write_text(text)
    with pytest.raises(BadTopology, match="topology"):
        from_file(file, used)


def test_a_missing_matrix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTopology):
        from_file(tmp_path / "none.json", nics(tmp_path, mlx5_0=0))


def test_memory_lies_on_the_node_of_the_cpus(tmp_path: Path) -> None:
    add_numa_node(tmp_path, 0, "0-3,8-11")
    add_numa_node(tmp_path, 1, "4-7,12-15")
    assert location_of({2, 9}, tmp_path) == "cpu:0"
    assert location_of({12}, tmp_path) == "cpu:1"
    assert location_of({3, 4}, tmp_path) == ANYWHERE
    assert location_of({0}, tmp_path / "nothing") == ANYWHERE


# --- paths ------------------------------------------------------------------------------------------------------------


def test_the_first_group_loads_every_preferred_nic_once() -> None:
    local = Affinity(preferred=("a", "b"), secondary=("c",))
    remote = Affinity(preferred=("x", "y"), secondary=("z",))
    spread, near, far = tiers("peer", local, remote).groups
    assert spread == (path("a", "x"), path("b", "y"))
    assert near == (path("a", "y"), path("b", "x"))
    assert set(spread + near + far) == {path(here, there) for here in "abc" for there in "xyz"}
    assert len(spread + near + far) == 9


def test_ends_with_different_numbers_of_nics_use_them_all() -> None:
    spread = tiers("peer", Affinity(preferred=("a", "b", "c")), Affinity(preferred=("x",))).groups[0]
    assert spread == (path("a", "x"), path("b", "x"), path("c", "x"))


def test_a_failed_path_rests_and_is_tried_again() -> None:
    health = PathHealth(rest_s=30.0)
    both = tiers("peer", Affinity(preferred=("a", "b")), Affinity(preferred=("x", "y")))
    health.failed(path("a", "x"), now_s=100.0)
    assert health.usable(both, frozenset(), 101.0) == (path("b", "y"),)
    assert health.usable(both, frozenset(), 130.0) == (path("a", "x"), path("b", "y"))


def test_a_success_ends_the_rest() -> None:
    health = PathHealth(rest_s=30.0)
    health.failed(path("a", "x"), now_s=100.0)
    health.worked(path("a", "x"))
    assert not health.is_resting(path("a", "x"), 100.0)


def test_other_groups_are_used_when_the_first_one_rests() -> None:
    health = PathHealth(rest_s=30.0)
    both = tiers("peer", Affinity(preferred=("a",), secondary=("b",)), Affinity(preferred=("x",)))
    health.failed(path("a", "x"), now_s=0.0)
    assert health.usable(both, frozenset(), 1.0) == (path("b", "x"),)


def test_a_resting_path_is_better_than_none() -> None:
    health = PathHealth(rest_s=30.0)
    both = tiers("peer", Affinity(preferred=("a", "b")), Affinity(preferred=("x",)))
    health.failed(path("a", "x"), now_s=0.0)
    health.failed(path("b", "x"), now_s=5.0)
    assert health.usable(both, frozenset(), 6.0) == (path("a", "x"),)
    assert health.usable(both, frozenset({path("a", "x")}), 6.0) == (path("b", "x"),)
    assert health.usable(both, frozenset({path("a", "x"), path("b", "x")}), 6.0) == (path("a", "x"),)


def test_paths_to_one_peer_say_nothing_about_another() -> None:
    health = PathHealth(rest_s=30.0)
    health.failed(paths.Path("one", "a", "x"), now_s=0.0)
    assert health.is_resting(paths.Path("one", "a", "x"), 1.0)
    assert not health.is_resting(paths.Path("two", "a", "x"), 1.0)


def test_without_nics_there_is_no_path() -> None:
    assert PathHealth(rest_s=1.0).usable(Tiers(groups=()), frozenset(), 0.0) == ()
    assert tiers("peer", Affinity(preferred=()), Affinity(preferred=("x",))).groups == ()
