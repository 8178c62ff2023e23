"""Which processes ``mooncake up`` starts: each gets flags its own role accepts, and they find each other."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.cli.loading import load
from mooncake_mesh.cli.settings import add_flags
from mooncake_mesh.cli.topology import MeshPlan, plan_mesh
from mooncake_mesh.config import (
    SECTIONS,
    CommitKind,
    ConductorConfig,
    DecodeConfig,
    EngineKind,
    FakeConfig,
    GatewayConfig,
    LogFormat,
    MessengerConfig,
    PrefillConfig,
    RoleConfig,
    TransportKind,
    UpConfig,
)
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.kv.layers import StagePart
from mooncake_mesh.kv.layout import KvDtype

RUN_DIR = Path("/tmp/m")


def _loaded(plan: MeshPlan) -> dict[str, RoleConfig]:
    """The configurations that the children will have."""
    configs = {}
    for child in plan.children:
        parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
        add_flags(parser, SECTIONS[child.role])
        configs[child.name] = load(SECTIONS[child.role], flags=parser.parse_args(child.flags), environ={})
    return configs


def test_whole_mesh() -> None:
    plan = plan_mesh(
        UpConfig(
            model="tiny",
            engine=EngineKind.FAKE,
            nodes=2,
            dtype=KvDtype.FLOAT32,
            chunk_tokens=64,
            block_tokens=32,
            threads=3,
            arena_bytes=64 << 20,
            commit=CommitKind.USE,
            transport=TransportKind.TCP,
            fake=FakeConfig(layers=7),
            log_format=LogFormat.JSON,
        ),
        RUN_DIR,
        8123,
    )
    ipc = "ipc:///tmp/m/{}.ipc".format
    worker = {
        "engine": EngineKind.FAKE,
        "model": "tiny",
        "dtype": KvDtype.FLOAT32,
        "block_tokens": 32,
        "threads": 3,
        "fake": FakeConfig(layers=7),
    }
    common = {"log_format": LogFormat.JSON}
    member = {**common, "conductor": ipc("conductor")}
    pool = {"run_dir": RUN_DIR, "arena_bytes": 64 << 20, "commit": CommitKind.USE, "transport": TransportKind.TCP}
    assert _loaded(plan) == {
        "conductor": ConductorConfig(bind=ipc("conductor"), publish=ipc("cluster"), **common),  # type: ignore[arg-type]
        "gateway0": GatewayConfig(
            port=8123,
            bind=ipc("sdk"),
            stream_bind=ipc("tokens"),
            engine=EngineKind.FAKE,
            model="tiny",
            cache_db=RUN_DIR / "context-caches.sqlite",
            **member,  # type: ignore[arg-type]
        ),
        "messenger0": MessengerConfig(node_id="node0", bind=ipc("messenger0"), **pool, **member),  # type: ignore[arg-type]
        "messenger1": MessengerConfig(
            instance_id="messenger1",
            node_id="node1",
            bind=ipc("messenger1"),
            **pool,  # type: ignore[arg-type]
            **member,  # type: ignore[arg-type]
        ),
        "prefill0": PrefillConfig(
            node_id="node0",
            bind=ipc("prefill0"),
            messenger=ipc("messenger0"),
            chunk_tokens=64,
            **worker,  # type: ignore[arg-type]
            **member,  # type: ignore[arg-type]
        ),
        "decode0": DecodeConfig(
            node_id="node1",
            bind=ipc("decode0"),
            messenger=ipc("messenger1"),
            **worker,  # type: ignore[arg-type]
            **member,  # type: ignore[arg-type]
        ),
    }
    assert plan.sdk_endpoint == ipc("sdk")
    assert plan.conductor_endpoint == ipc("conductor")


def test_several_conductors_know_of_each_other_by_etcd_and_members_know_all() -> None:
    etcd = EtcdConfig(endpoints="http://127.0.0.1:2379", key="mine", lease_s=3)
    plan = plan_mesh(UpConfig(conductors=2, etcd=etcd), RUN_DIR, 8000)
    configs = _loaded(plan)
    conductors = {name: config for name, config in configs.items() if isinstance(config, ConductorConfig)}
    assert {name: (config.bind, config.publish, config.etcd) for name, config in conductors.items()} == {
        "conductor": ("ipc:///tmp/m/conductor.ipc", "ipc:///tmp/m/cluster.ipc", etcd),
        "conductor1": ("ipc:///tmp/m/conductor1.ipc", "ipc:///tmp/m/cluster1.ipc", etcd),
    }
    assert plan.conductor_endpoint == "ipc:///tmp/m/conductor.ipc,ipc:///tmp/m/conductor1.ipc"
    members = [config for config in configs.values() if not isinstance(config, ConductorConfig)]
    assert {config.conductor for config in members} == {plan.conductor_endpoint}  # type: ignore[union-attr]


def test_several_conductors_without_etcd_are_refused() -> None:
    with pytest.raises(ValueError, match=r"conductors: more than one need etcd.*give etcd\.endpoints"):
        UpConfig(conductors=2)


@pytest.mark.parametrize(("nodes", "decode_node"), [(1, "node0"), (2, "node1")])
def test_more_instances_share_their_node(nodes: int, decode_node: str) -> None:
    configs = _loaded(plan_mesh(UpConfig(prefill=2, decode=3, nodes=nodes), RUN_DIR, 8000))
    workers = [config for config in configs.values() if isinstance(config, PrefillConfig | DecodeConfig)]
    assert [(worker.instance_id, worker.node_id) for worker in workers] == [
        ("prefill0", "node0"),
        ("prefill1", "node0"),
        ("decode0", decode_node),
        ("decode1", decode_node),
        ("decode2", decode_node),
    ]
    assert len({worker.bind for worker in workers}) == 5
    arenas = {config.node_id: config.bind for config in configs.values() if isinstance(config, MessengerConfig)}
    assert len(arenas) == nodes
    assert all(worker.messenger == arenas[worker.node_id] for worker in workers)


@pytest.mark.parametrize("nodes", [0, 3, -1])
def test_a_mesh_on_one_machine_has_one_or_two_nodes(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"^nodes: must be 1 or 2, got {nodes}"):
        UpConfig(nodes=nodes)


def test_fake_settings_are_not_given_to_a_real_engine() -> None:
    plan = plan_mesh(UpConfig(), RUN_DIR, 8000)
    assert not [flag for child in plan.children for flag in child.flags if flag.startswith("--fake")]


def test_reachable_http_passes_the_consent_on() -> None:
    config = _loaded(plan_mesh(UpConfig(host="0.0.0.0", allow_insecure_bind=True), RUN_DIR, 8000))["gateway0"]
    assert isinstance(config, GatewayConfig)
    assert config.host == "0.0.0.0"


def test_keys_are_everybody_s() -> None:
    up = UpConfig(host="0.0.0.0", keys=Path("keys"), share_cache_across_tenants=True)
    configs = _loaded(plan_mesh(up, RUN_DIR, 8000))
    assert {config.keys for config in configs.values()} == {Path("keys").absolute()}  # type: ignore[union-attr]
    assert configs["gateway0"].share_cache_across_tenants  # type: ignore[union-attr]


def test_long_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^run_dir: the path of a socket has at most 107 bytes"):
        plan_mesh(UpConfig(), Path("/tmp/" + "x" * 100), 8000)


def test_each_node_has_its_own_folder_for_blocks_that_leave_its_arena() -> None:
    configs = _loaded(plan_mesh(UpConfig(nodes=2, ssd_dir=Path("/data/kv"), ssd_bytes=3 << 30), RUN_DIR, 8000))
    stores = [configs["messenger0"], configs["messenger1"]]
    assert all(isinstance(store, MessengerConfig) for store in stores)
    assert [(store.ssd_dir, store.ssd_bytes) for store in stores if isinstance(store, MessengerConfig)] == [
        (Path("/data/kv/node0"), 3 << 30),
        (Path("/data/kv/node1"), 3 << 30),
    ]


def test_a_prefill_instance_of_several_stages() -> None:
    plan = plan_mesh(UpConfig(prefill=2, prefill_stages=3, prefill_split="10, 12,8"), RUN_DIR, 1)
    configs = _loaded(plan)
    assert {name for name in configs if name.startswith("prefill")} == {
        *("prefill0", "prefill0-1", "prefill0-2"),
        *("prefill1", "prefill1-1", "prefill1-2"),
    }
    head, last = configs["prefill1"], configs["prefill1-2"]
    assert isinstance(head, PrefillConfig)
    assert isinstance(last, PrefillConfig)
    assert head.pipeline.part == StagePart(stage=0, stages=3, split=(10, 12, 8))
    assert last.pipeline.part == StagePart(stage=2, stages=3, split=(10, 12, 8))
    stages = [configs["prefill1-1"], configs["prefill1-2"]]
    assert head.pipeline.stage_endpoints == tuple(stage.bind for stage in stages if isinstance(stage, PrefillConfig))
    order = {child.name: child.stage for child in plan.children}
    assert order["prefill1"] < order["prefill1-1"]  # the head finishes its jobs first


@pytest.mark.parametrize(
    ("pipeline", "path"),
    [
        ({"stages": 2}, "endpoints"),
        ({"stages": 2, "stage": 2}, "stage"),
        ({"stages": 2, "stage": 1, "split": "3"}, "split"),
        ({"stages": 2, "stage": 1, "split": "3,x"}, "split"),
        ({"stages": 2, "stage": 1, "split": "3,0"}, "split"),
        ({"stages": 2, "endpoints": "nowhere"}, "endpoints"),
    ],
)
def test_impossible_stages_are_refused(pipeline: dict[str, Any], path: str) -> None:
    with pytest.raises(ValueError, match=f"^{path}: "):
        PipelineConfig(**pipeline)


def test_stages_need_chunks() -> None:
    with pytest.raises(ValueError, match=r"^chunk_tokens: "):
        UpConfig(prefill_stages=2, chunk_tokens=0)
    with pytest.raises(ValueError, match=r"^prefill_split: "):
        UpConfig(prefill_stages=2, prefill_split="3,3,3")


def test_how_long_steps_may_wait_is_told_to_those_who_decode() -> None:
    for forming_s in (0.0, 0.25):
        workers = _loaded(plan_mesh(UpConfig(decode=2, forming_s=forming_s), RUN_DIR, 8000)).values()
        assert [one.forming_s for one in workers if isinstance(one, DecodeConfig)] == [forming_s] * 2
    with pytest.raises(ValueError, match=r"^forming_s: "):
        DecodeConfig(forming_s=-0.1)


def test_real_engines_share_the_cores_by_a_board_and_fake_ones_need_none() -> None:
    for kind, board in ((EngineKind.TRANSFORMERS, RUN_DIR / "cores"), (EngineKind.FAKE, None)):
        plan = plan_mesh(UpConfig(engine=kind, threads=2), RUN_DIR, 8000)
        workers = [config for config in _loaded(plan).values() if isinstance(config, PrefillConfig | DecodeConfig)]
        assert [(worker.core_board, worker.threads) for worker in workers] == [(board, 2)] * 2
