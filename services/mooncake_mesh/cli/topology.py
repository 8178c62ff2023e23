"""Which processes ``mooncake up`` starts, and with which flags. Pure.

::

    node0: messenger0, prefill0 …, decode0 …                              and one gateway, one conductor (or several)
    of two: decode0 … on node1 with messenger1

Everything but HTTP goes through Unix sockets in one folder.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_mesh.cli.settings import flags_of
from mooncake_mesh.cli.supervision import StopStage
from mooncake_mesh.config import SECTIONS, EngineKind, UpConfig
from mooncake_mesh.config_checks import socket_path
from mooncake_mesh.config_pipeline import PipelineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One process: ``mooncake ROLE FLAGS``."""

    name: str
    role: str
    stage: StopStage
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    children: tuple[ChildSpec, ...]
    sdk_endpoint: str
    conductor_endpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    number: int
    conductor: str

    @property
    def node_id(self) -> str:
        return f"node{self.number}"

    @property
    def messenger(self) -> str:
        return f"messenger{self.number}"

    @property
    def flags(self) -> dict[str, Any]:
        return {"node_id": self.node_id, "conductor": self.conductor}


def plan_mesh(config: UpConfig, run_dir: Path, port: int) -> MeshPlan:
    """ValueError (``run_dir: …``) where the folder's path is too long for sockets."""
    sdk = _ipc(run_dir, "sdk")
    shared: dict[str, Any] = {"log_level": config.log_level, "log_format": config.log_format}
    if config.keys is not None:
        shared["keys"] = config.keys.absolute()
    conductors = [_conductor(config, run_dir, number, shared) for number in range(config.conductors)]
    conductor = ",".join(endpoint for _, endpoint in conductors)
    children = [
        *(child for child, _ in conductors),
        _child(
            "gateway",
            "gateway0",
            StopStage.GATEWAY,
            host=config.host,
            port=port,
            bind=sdk,
            stream_bind=_ipc(run_dir, "tokens"),
            conductor=conductor,
            engine=config.engine,
            model=config.model,
            cache_db=run_dir / "context-caches.sqlite",
            share_cache_across_tenants=config.share_cache_across_tenants,
            allow_insecure_bind=config.allow_insecure_bind,
            **shared,
        ),
    ]
    nodes = [_Node(number=number, conductor=conductor) for number in range(config.nodes)]
    children += [_messenger(config, run_dir, node, shared) for node in nodes]
    for node, role, count in ((nodes[0], "prefill", config.prefill), (nodes[-1], "decode", config.decode)):
        for index in range(count):
            children += _worker(config, run_dir, node, role, index, shared)
    return MeshPlan(children=tuple(children), sdk_endpoint=sdk, conductor_endpoint=conductor)


def _conductor(config: UpConfig, run_dir: Path, number: int, shared: dict[str, Any]) -> tuple[ChildSpec, str]:
    """One conductor and its endpoint; the first has no number, as most meshes have only that one."""
    which = str(number or "")
    endpoint, publish = _ipc(run_dir, f"conductor{which}"), _ipc(run_dir, f"cluster{which}")
    etcd = {"etcd": config.etcd} if config.etcd.urls else {}
    name = f"conductor{which}"
    return _child("conductor", name, StopStage.CONDUCTOR, bind=endpoint, publish=publish, **etcd, **shared), endpoint


def _messenger(config: UpConfig, run_dir: Path, node: _Node, shared: dict[str, Any]) -> ChildSpec:
    return _child(
        "messenger",
        node.messenger,
        StopStage.MESSENGERS,
        bind=_ipc(run_dir, node.messenger),
        run_dir=run_dir,
        arena_bytes=config.arena_bytes,
        pages=config.pages,
        commit=config.commit,
        transport=config.transport,
        **_ssd(config, node.node_id),
        **node.flags,
        **shared,
    )


def _worker(
    config: UpConfig, run_dir: Path, node: _Node, role: str, index: int, shared: dict[str, Any]
) -> list[ChildSpec]:
    """The processes of one instance."""
    name = f"{role}{index}"
    settings = {"messenger": _ipc(run_dir, node.messenger), **node.flags, **_engine(config, run_dir), **shared}
    if role == "prefill":
        settings["chunk_tokens"] = config.chunk_tokens
        if config.prefill_stages > 1:
            return _stages(config, name, run_dir, settings)
    else:
        settings["forming_s"] = config.forming_s
    return [_child(role, name, StopStage.WORKERS, bind=_ipc(run_dir, name), **settings)]


def _stages(config: UpConfig, name: str, run_dir: Path, worker: dict[str, Any]) -> list[ChildSpec]:
    """The processes of one prefill instance, the head last: it finds the others there."""
    names = [name, *(f"{name}-{stage}" for stage in range(1, config.prefill_stages))]
    endpoints = [_ipc(run_dir, each) for each in names]
    children = []
    for stage in reversed(range(config.prefill_stages)):
        pipeline = PipelineConfig(
            stage=stage,
            stages=config.prefill_stages,
            split=config.prefill_split,
            endpoints="" if stage else ",".join(endpoints[1:]),
            run_dir=run_dir,
        )
        stop = StopStage.STAGES if stage else StopStage.WORKERS
        children.append(_child("prefill", names[stage], stop, bind=endpoints[stage], pipeline=pipeline, **worker))
    return children


def _ssd(config: UpConfig, node_id: str) -> dict[str, Any]:
    if config.ssd_dir is None:
        return {}
    return {"ssd_dir": config.ssd_dir / node_id, "ssd_bytes": config.ssd_bytes}


def _engine(config: UpConfig, run_dir: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "engine": config.engine,
        "model": config.model,
        "dtype": config.dtype,
        "threads": config.threads,
        "block_tokens": config.block_tokens,
    }
    if config.engine is EngineKind.FAKE:
        settings["fake"] = config.fake
    else:
        settings["core_board"] = run_dir / "cores"
    return settings


def _child(role: str, name: str, stage: StopStage, **given: object) -> ChildSpec:
    flags = flags_of(SECTIONS[role], {"instance_id": name, **given})
    return ChildSpec(name=name, role=role, stage=stage, flags=tuple(flags))


def _ipc(run_dir: Path, name: str) -> str:
    path = str(run_dir / f"{name}.ipc")
    socket_path("run_dir", path)
    return f"ipc://{path}"
