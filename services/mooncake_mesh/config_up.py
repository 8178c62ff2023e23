"""What ``mooncake up`` can be configured with; part of :mod:`mooncake_mesh.config`, and to be had from there."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from mooncake_mesh.config_checks import at_least, in_chunks, listening, whole_blocks, words
from mooncake_mesh.config_etcd import EtcdConfig
from mooncake_mesh.config_fake import FakeConfig
from mooncake_mesh.config_kinds import CommitKind, EngineKind, LogFormat, LogLevel, PagesKind, TransportKind
from mooncake_mesh.config_pipeline import layer_counts
from mooncake_mesh.kv.layout import KvDtype

MiB: Final = 1 << 20
GiB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """``mooncake up``: a whole mesh on this machine. Of two nodes one has the prefill and one the decode instances."""

    host: Annotated[str, "address of the HTTP server"] = "127.0.0.1"
    port: Annotated[int, "port of the HTTP server; 0 takes a free one"] = 8000
    engine: Annotated[EngineKind, "transformers, or fake for tests and load"] = EngineKind.TRANSFORMERS
    model: Annotated[str, "a known name, a local folder or a hub id"] = "smollm2-135m"
    dtype: Annotated[KvDtype, "element type of weights and KVCache"] = KvDtype.BFLOAT16
    threads: Annotated[int, "most threads for the maths of each instance, 0 for as many as cores; busy ones share"] = 0
    block_tokens: Annotated[int, "tokens of a KVCache block"] = 16
    chunk_tokens: Annotated[int, "prompt tokens of one forward, whole blocks; 0 takes a prompt in one go"] = 512
    prefill: Annotated[int, "prefill instances"] = 1
    prefill_stages: Annotated[int, "processes of each prefill instance, with some of the layers each"] = 1
    prefill_split: Annotated[str, "layers of each stage, such as 16,14; evenly otherwise"] = ""
    decode: Annotated[int, "decode instances"] = 1
    forming_s: Annotated[float, "longest pause of decode instances for sequences to come; 0: none"] = 0.1
    nodes: Annotated[int, "nodes, each with its KVCache pool: 1, or 2, between which KV then moves"] = 1
    conductors: Annotated[int, "conductors, of which one leads; more than one need etcd"] = 1
    etcd: EtcdConfig = field(default_factory=EtcdConfig)
    arena_bytes: Annotated[int, "memory for KVCache blocks, on each node"] = 2 * GiB
    pages: Annotated[PagesKind, "pages of that memory: hugetlb, transparent, small or auto"] = PagesKind.AUTO
    commit: Annotated[CommitKind, "when it is taken from the system: start or use"] = CommitKind.START
    ssd_dir: Annotated[Path | None, "folder with one folder of each node for blocks that leave the arena"] = None
    ssd_bytes: Annotated[int, "space for blocks in ssd_dir, for each node"] = 8 * GiB
    transport: Annotated[TransportKind, "how KV moves between the nodes: auto, shm, tcp or rdma"] = TransportKind.AUTO
    run_dir: Annotated[Path | None, "folder for sockets; a fresh one otherwise, removed at the end"] = None
    log_dir: Annotated[Path | None, "folder for one log file of each process; all go to stderr otherwise"] = None
    fake: FakeConfig = field(default_factory=FakeConfig)
    share_cache_across_tenants: Annotated[bool, "let tenants find each other's KV; they can tell by the time"] = False
    keys: Annotated[
        Path | None, "folder with keys and API keys (mooncake keys): the gateway then asks for API keys"
    ] = None
    allow_insecure_bind: Annotated[bool, "bind addresses that other machines reach, without keys"] = False
    log_level: Annotated[LogLevel, "least severe event to log"] = LogLevel.INFO
    log_format: Annotated[LogFormat, "console (for people) or json (one object a line)"] = LogFormat.CONSOLE

    def __post_init__(self) -> None:
        words(self, "model")
        listening(self, host="host", port="port")
        at_least(self, 1, "block_tokens", "prefill", "prefill_stages", "decode", "conductors")
        at_least(self, 0, "threads", "forming_s")
        if self.nodes not in (1, 2):
            raise ValueError(f"nodes: must be 1 or 2, got {self.nodes}")
        if self.conductors > 1 and not self.etcd.urls:
            raise ValueError("conductors: more than one need etcd, to agree who leads: give etcd.endpoints")
        at_least(self, 1 * MiB, "arena_bytes", "ssd_bytes")
        whole_blocks(self.chunk_tokens, self.block_tokens)
        in_chunks(self.chunk_tokens, self.prefill_stages)
        if self.prefill_split and len(layer_counts("prefill_split", self.prefill_split)) != self.prefill_stages:
            raise ValueError(f"prefill_split: must count the layers of {self.prefill_stages} stages")
