"""What can be configured: one frozen dataclass for each role, valid once built.

Each is built once, in ``__main__``, by :mod:`mooncake_mesh.cli.settings` (which also reads the help texts below) and
passed down. A wrong value raises ``ValueError("field: what is allowed")``; the loader turns it into a ConfigError with
the dotted path. Fields that repeat between roles are repeated here: a role's class is the whole truth about the role.

An address that other machines reach is bound only with ``keys``, or where ``allow_insecure_bind`` insists: see
docs/security.md.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from mooncake_mesh import config_fake, config_kinds, config_up
from mooncake_mesh.config_checks import (
    above_zero,
    at_least,
    bound,
    conductors,
    connected,
    encrypted,
    host_and_port,
    ids,
    in_chunks,
    listening,
    one_role,
    quotas,
    reachable,
    whole_blocks,
    words,
)
from mooncake_mesh.config_commands import ASKING, AskingConfig
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.config_layerwise import LayerwiseConfig
from mooncake_mesh.config_pipeline import PipelineConfig
from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.config_run_dir import default_run_dir
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind, LoadMeasure, PlacementKind, QueueOrderKind
from mooncake_mesh.config_swap import SwapConfig
from mooncake_mesh.kv.eviction import EvictionKind
from mooncake_mesh.kv.layout import KvDtype

MiB: Final = 1 << 20
GiB: Final = 1 << 30
ChecksumKind = config_kinds.ChecksumKind
CommitKind = config_kinds.CommitKind
EngineKind = config_kinds.EngineKind
FakeConfig = config_fake.FakeConfig
FakeOutput = config_kinds.FakeOutput
LogFormat = config_kinds.LogFormat
LogLevel = config_kinds.LogLevel
PagesKind = config_kinds.PagesKind
TransportKind = config_kinds.TransportKind
UpConfig = config_up.UpConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConductorConfig:
    """The scheduler: its sockets, when it believes a member dead, and the objectives it schedules for."""

    instance_id: Annotated[str, "name of this process in the mesh"] = "conductor"
    node_id: Annotated[str, "node this process runs on"] = "local"
    bind: Annotated[str, "endpoint that members and gateways call"] = "tcp://127.0.0.1:7700"
    publish: Annotated[str, "endpoint that cluster states are published on"] = "tcp://127.0.0.1:7701"
    heartbeat_s: Annotated[float, "how often members report"] = 0.5
    suspect_after_s: Annotated[float, "silence after which a member gets no new work"] = 1.5
    dead_after_s: Annotated[float, "silence after which a member counts as dead"] = 3.0
    ttft_slo_s: Annotated[float, "objective for the time to first token"] = 30.0
    tbt_slo_s: Annotated[float, "objective for the time between tokens (mean of the longest 10 %)"] = 0.5
    ttft_slo_factor: Annotated[
        float | None, "count as good up to this many times the unloaded time to first token, not up to ttft_slo_s"
    ] = None
    tbt_slo_factor: Annotated[
        float | None, "count as good up to this many times the unloaded time of a step, not up to tbt_slo_s"
    ] = None
    placement: Annotated[
        PlacementKind, "how a prefill instance is chosen: random, load_balance, local, kvcache_centric or adaptive"
    ] = PlacementKind.ADAPTIVE
    kvcache_balancing_threshold: Annotated[
        float, "kvcache_centric copies a prefix that is longer than the local one by more than this factor"
    ] = 2.0
    replication_share: Annotated[
        float, "share of each node's link for copies of hot prefixes ahead of need; 0 makes none"
    ] = 0.1
    admission: Annotated[
        AdmissionKind, "what requests are refused for in an overload: baseline, early, predictive or hold"
    ] = AdmissionKind.HOLD
    load_measure: Annotated[
        LoadMeasure,
        "load that baseline, early and predictive refuse by: with_request, or the mean without: size_neutral",
    ] = LoadMeasure.WITH_REQUEST
    wip_limit: Annotated[
        float | None, "KV in progress over what can be decoded that hold allows; adapts to the load otherwise"
    ] = None
    hybrid_decode: Annotated[
        HybridDecodeKind, "auto: decode instances compute prompts that are sooner there and fit between steps; or off"
    ] = HybridDecodeKind.OFF
    switch_roles: Annotated[
        bool, "let instances that are switchable change between prefill and decode where one pool lacks what is idle"
    ] = False
    switch_roles_after_s: Annotated[float, "how long an imbalance must last before they do"] = 10.0
    hybrid_step_s: Annotated[
        float | None,
        "how long a decode step may take together with a piece of a prompt; a share of tbt_slo_s otherwise",
    ] = None
    decode_s: Annotated[float | None, "how long a request is taken to be decoded; measured otherwise"] = None
    record: Annotated[Path | None, "file for all that is heard and decided, to replay it; none otherwise"] = None
    cost_profile: Annotated[Path | None, "JSON file of the cost model to start from; a small model's otherwise"] = None
    seed: Annotated[int, "seed of the random placement"] = 0
    index_max_blocks: Annotated[int, "block keys the prefix index holds at most"] = 4_000_000
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        ids(self, "instance_id", "node_id")
        bound(self, "bind", "publish")
        above_zero(self, "heartbeat_s", "suspect_after_s", "dead_after_s", "ttft_slo_s", "tbt_slo_s")
        above_zero(self, "switch_roles_after_s")
        at_least(self, 1, "index_max_blocks")
        at_least(self, 1.0, "kvcache_balancing_threshold")
        at_least(self, 0.0, "replication_share")
        if self.replication_share > 1.0:
            raise ValueError(f"replication_share: must be at most 1, got {self.replication_share}")
        for name in ("wip_limit", "decode_s", "ttft_slo_factor", "tbt_slo_factor", "hybrid_step_s"):
            if getattr(self, name) is not None:
                above_zero(self, name)
        if self.suspect_after_s <= self.heartbeat_s:
            raise ValueError(f"suspect_after_s: must be above heartbeat_s ({self.heartbeat_s})")
        if self.dead_after_s <= self.suspect_after_s:
            raise ValueError(f"dead_after_s: must be above suspect_after_s ({self.suspect_after_s})")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The door: HTTP for OpenAI clients, a ROUTER for the SDK, and a ROUTER where workers deliver tokens."""

    instance_id: Annotated[str, "name of this process in the mesh"] = "gateway0"
    node_id: Annotated[str, "node this process runs on"] = "local"
    host: Annotated[str, "address of the HTTP server"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP server; 0 takes a free one"] = 8000
    bind: Annotated[str, "endpoint for ZeroMQ SDK clients"] = "tcp://127.0.0.1:7710"
    stream_bind: Annotated[str, "endpoint that workers send tokens to"] = "tcp://127.0.0.1:7711"
    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    engine: Annotated[EngineKind, "engine of the workers; decides the tokenizer"] = EngineKind.TRANSFORMERS
    model: Annotated[str, "model whose tokenizer and chat template to use: a name, folder or hub id"] = "smollm2-135m"
    served_model_name: Annotated[str | None, "name that clients use for the model; the model itself otherwise"] = None
    request_deadline_s: Annotated[float, "longest life of a request"] = 600.0
    max_concurrent_requests: Annotated[int, "requests in flight; more are answered 429"] = 1024
    max_body_bytes: Annotated[int, "longest request body"] = 8 * MiB
    max_replacements: Annotated[int, "how often a request is placed anew after its workers were lost"] = 3
    share_cache_across_tenants: Annotated[bool, "let tenants find each other's KV; they can tell by the time"] = False
    cache_db: Annotated[
        Path | None, "file of the context caches, which gateways of one host may share; without it there are none"
    ] = None
    cache_tenant_tokens: Annotated[int, "tokens that one tenant's context caches may come to"] = 1_000_000
    keys: Annotated[Path | None, "folder with keys and API keys (mooncake keys): every door then asks for them"] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        ids(self, "instance_id", "node_id")
        words(self, "model")
        listening(self, host="host", port="port")
        bound(self, "bind", "stream_bind")
        conductors(self)
        above_zero(self, "request_deadline_s")
        at_least(self, 1, "max_concurrent_requests", "max_body_bytes", "cache_tenant_tokens")
        at_least(self, 0, "max_replacements")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessengerConfig:
    """The keeper of a node's KVCache: its arena and how KV comes and goes."""

    instance_id: Annotated[str, "name of this process in the mesh"] = "messenger0"
    node_id: Annotated[str, "node whose arena this is"] = "node0"
    bind: Annotated[str, "endpoint that workers and other messengers call"] = "tcp://127.0.0.1:7720"
    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    run_dir: Annotated[Path, "folder for the Unix socket that hands out the arena"] = field(
        default_factory=default_run_dir
    )
    arena_bytes: Annotated[int, "memory for KVCache blocks"] = 1 * GiB
    pages: Annotated[PagesKind, "its pages: hugetlb, transparent, small, or auto: the first of them that there is"] = (
        PagesKind.AUTO
    )
    commit: Annotated[
        CommitKind, "when it is taken from the system: start (in the background), or page by page: use"
    ] = CommitKind.START
    eviction: Annotated[EvictionKind, "which unused block goes first when room is needed"] = EvictionKind.LRU
    ssd_dir: Annotated[Path | None, "folder that keeps blocks for which the arena has no room; none: they go"] = None
    ssd_bytes: Annotated[int, "space for blocks in ssd_dir, taken at once"] = 8 * GiB
    tenant_quotas: Annotated[
        str, "most percent of the arena for a tenant: NAME=PERCENT, separated by commas; *: for each one not named"
    ] = ""
    transport: Annotated[TransportKind, "shm, tcp, rdma, or auto: shm on one host, else tcp"] = TransportKind.AUTO
    data_host: Annotated[str, "address of the TCP transport"] = "127.0.0.1"
    data_port: Annotated[int, "port of the TCP transport; 0 takes a free one"] = 0
    advertise_data: Annotated[
        str | None, "HOST:PORT that others connect to for the TCP transport, where that is another (NAT, containers)"
    ] = None
    tcp_connections: Annotated[int, "TCP connections to each other node"] = 2
    tcp_tls: Annotated[bool, "encrypt the TCP transport (TLS 1.3), at all nodes or none; needs the extra tls"] = False
    checksum: Annotated[ChecksumKind, "checksum of every slice: xxh3 or none"] = ChecksumKind.XXH3
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        ids(self, "instance_id", "node_id")
        listening(self, host="data_host", port="data_port")
        bound(self, "bind")
        conductors(self)
        at_least(self, 1 * MiB, "arena_bytes", "ssd_bytes")
        at_least(self, 1, "tcp_connections")
        quotas(self, "tenant_quotas")
        encrypted(self, "tcp_tls")
        if self.advertise_data is not None:
            host_and_port("advertise_data", self.advertise_data)

    def advertised_data(self, bound_port: int) -> tuple[str, int]:
        """Where other messengers reach the TCP transport, which listens on *bound_port* here."""
        if self.advertise_data is None:
            return self.data_host, bound_port
        return host_and_port("advertise_data", self.advertise_data)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """A prefill instance: its model, and how it cuts prompts."""

    instance_id: Annotated[str, "name of this process in the mesh"] = "prefill0"
    node_id: Annotated[str, "node this process runs on, that of its messenger"] = "node0"
    bind: Annotated[str, "endpoint that gateways send jobs to"] = "tcp://127.0.0.1:7730"
    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    messenger: Annotated[str, "endpoint of the node's messenger"] = "tcp://127.0.0.1:7720"
    kind: Annotated[str, "name of what this machine is: workers of one kind share a cost profile"] = "default"
    engine: Annotated[EngineKind, "transformers, or fake for tests and load"] = EngineKind.TRANSFORMERS
    model: Annotated[str, "a known name, a local folder or a hub id"] = "smollm2-135m"
    dtype: Annotated[KvDtype, "element type of weights and KVCache"] = KvDtype.BFLOAT16
    device: Annotated[str, "torch device"] = "cpu"
    threads: Annotated[
        int, "threads for the model's maths, the most of them with a core_board; 0: one for each core"
    ] = 1
    core_board: Annotated[Path | None, "file by which busy instances of this machine share its cores"] = None
    block_tokens: Annotated[int, "tokens of a KVCache block; equal in the whole mesh"] = 16
    chunk_tokens: Annotated[int, "prompt tokens of one forward, whole blocks; 0 takes a prompt in one go"] = 512
    max_queued_jobs: Annotated[int, "jobs that may wait; more are refused"] = 256
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    layerwise: LayerwiseConfig = field(default_factory=LayerwiseConfig)
    queue_order: Annotated[
        QueueOrderKind, "slack: by priority, fair share and due time, where nobody loses by it; fcfs: as they come"
    ] = QueueOrderKind.SLACK
    switchable: Annotated[bool, "take the other role, prefill or decode, when the conductor says so"] = False
    drain_s: Annotated[float, "longest time to finish accepted jobs at an orderly stop"] = 30.0
    fake: FakeConfig = field(default_factory=FakeConfig)
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        ids(self, "instance_id", "node_id", "kind")
        words(self, "model", "device")
        bound(self, "bind")
        conductors(self)
        connected(self, "messenger")
        at_least(self, 0.0, "drain_s")
        at_least(self, 1, "block_tokens", "max_queued_jobs")
        at_least(self, 0, "threads")
        whole_blocks(self.chunk_tokens, self.block_tokens)
        in_chunks(self.chunk_tokens, self.pipeline.stages)
        one_role(self.switchable, self.pipeline.stages)
        if self.pipeline.stages > 1:
            reachable(self, "pipeline.data_host", self.pipeline.data_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """A decode instance: its model, and how many sequences it steps at once."""

    instance_id: Annotated[str, "name of this process in the mesh"] = "decode0"
    node_id: Annotated[str, "node this process runs on, that of its messenger"] = "node0"
    bind: Annotated[str, "endpoint that gateways send jobs to"] = "tcp://127.0.0.1:7740"
    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    messenger: Annotated[str, "endpoint of the node's messenger"] = "tcp://127.0.0.1:7720"
    kind: Annotated[str, "name of what this machine is: workers of one kind share a cost profile"] = "default"
    engine: Annotated[EngineKind, "transformers, or fake for tests and load"] = EngineKind.TRANSFORMERS
    model: Annotated[str, "a known name, a local folder or a hub id"] = "smollm2-135m"
    dtype: Annotated[KvDtype, "element type of weights and KVCache"] = KvDtype.BFLOAT16
    device: Annotated[str, "torch device"] = "cpu"
    threads: Annotated[
        int, "threads for the model's maths, the most of them with a core_board; 0: one for each core"
    ] = 1
    core_board: Annotated[Path | None, "file by which busy instances of this machine share its cores"] = None
    block_tokens: Annotated[int, "tokens of a KVCache block; equal in the whole mesh"] = 16
    max_batch: Annotated[int, "sequences in one decode step"] = 64
    max_waiting_jobs: Annotated[int, "jobs that may wait for KV or for a place; more are refused"] = 256
    swap: SwapConfig = field(default_factory=SwapConfig)
    forming_s: Annotated[float, "longest pause for sequences to come, on shared cores; 0: none"] = 0.1
    switchable: Annotated[bool, "take the other role, prefill or decode, when the conductor says so"] = False
    drain_s: Annotated[float, "longest time to finish accepted jobs at an orderly stop"] = 30.0
    fake: FakeConfig = field(default_factory=FakeConfig)
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        ids(self, "instance_id", "node_id", "kind")
        words(self, "model", "device")
        bound(self, "bind")
        conductors(self)
        connected(self, "messenger")
        at_least(self, 0.0, "drain_s", "forming_s")
        at_least(self, 1, "block_tokens", "max_batch", "max_waiting_jobs")
        at_least(self, 0, "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """``mooncake doctor``: what a messenger on this machine is meant to do."""

    transport: Annotated[TransportKind, "transport that must work: auto, shm, tcp or rdma"] = TransportKind.AUTO
    arena_bytes: Annotated[int, "memory for KVCache blocks that the messenger will have"] = 1 * GiB
    pages: Annotated[PagesKind, "pages that it must consist of: hugetlb, transparent, small or auto"] = PagesKind.AUTO
    rdma: RdmaConfig = field(default_factory=RdmaConfig)
    json: Annotated[bool, "print the findings as one JSON list"] = False

    def __post_init__(self) -> None:
        at_least(self, 1 * MiB, "arena_bytes")


RoleConfig = (
    ConductorConfig
    | GatewayConfig
    | MessengerConfig
    | PrefillConfig
    | DecodeConfig
    | UpConfig
    | AskingConfig
    | DoctorConfig
)
"""Every class that has a table of its own in a configuration file."""

SECTIONS: Final[dict[str, type[RoleConfig]]] = {
    "gateway": GatewayConfig,
    "conductor": ConductorConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "messenger": MessengerConfig,
    "up": UpConfig,
    **ASKING,
    "doctor": DoctorConfig,
}
"""Table name, environment prefix (in capitals) and sub-command → class."""
