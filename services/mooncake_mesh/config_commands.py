"""What the commands that ask a running mesh can be configured with; parts of :mod:`mooncake_mesh.config`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from mooncake_mesh.config_checks import above_zero, at_least, conductors, connected


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusConfig:
    """``mooncake status``: what to ask, and how to show it."""

    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    timeout_s: Annotated[float, "how long to wait for its answer"] = 3.0
    watch_s: Annotated[float | None, "ask again this often, until interrupted"] = None
    json: Annotated[bool, "print the report as one JSON object"] = False

    def __post_init__(self) -> None:
        conductors(self)
        above_zero(self, "timeout_s")
        if self.watch_s is not None:
            above_zero(self, "watch_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """``mooncake chat``: a conversation in the terminal."""

    gateway: Annotated[str, "endpoint of the gateway for SDK clients"] = "tcp://127.0.0.1:7710"
    keys: Annotated[Path | None, "folder with the keys of a client (mooncake keys issue)"] = None
    model: Annotated[str | None, "model to talk to; the one that is served otherwise"] = None
    system: Annotated[str | None, "system prompt"] = None
    temperature: Annotated[float | None, "0 takes the likeliest token; the server's default otherwise"] = None
    max_tokens: Annotated[int, "longest answer"] = 512
    seed: Annotated[int | None, "makes answers repeatable"] = None

    def __post_init__(self) -> None:
        connected(self, "gateway")
        at_least(self, 1, "max_tokens")
        if self.temperature is not None:
            at_least(self, 0.0, "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """``mooncake profile``: which mesh to measure, how thoroughly, and where the profile goes."""

    conductor: Annotated[str, "endpoint of the conductor, or of several, separated by commas"] = "tcp://127.0.0.1:7700"
    gateway: Annotated[str, "endpoint of the gateway for SDK clients"] = "tcp://127.0.0.1:7710"
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    model: Annotated[str | None, "model to measure; the one that is served otherwise"] = None
    output: Annotated[Path, "profile to write; kinds in it that are not measured stay"] = Path("cost.json")
    longest_prompt_tokens: Annotated[int, "longest prompt; others are shorter by factors of two"] = 2048
    largest_batch: Annotated[int, "most sequences decoded at a time"] = 8
    repeats: Annotated[int, "how often each is measured"] = 2
    plot: Annotated[Path | None, "picture of measured over modelled times; needs matplotlib"] = None

    def __post_init__(self) -> None:
        conductors(self)
        connected(self, "gateway")
        at_least(self, 64, "longest_prompt_tokens")
        at_least(self, 1, "largest_batch", "repeats")


@dataclass(frozen=True, slots=True, kw_only=True)
class PingConfig:
    """``mooncake ping``: which process of a mesh to ask."""

    endpoint: Annotated[str, "endpoint that the process binds; the conductor's otherwise"] = "tcp://127.0.0.1:7700"
    keys: Annotated[Path | None, "folder with the keys of tcp sockets (mooncake keys)"] = None
    timeout_s: Annotated[float, "how long to wait for its answer"] = 3.0

    def __post_init__(self) -> None:
        connected(self, "endpoint")
        above_zero(self, "timeout_s")


AskingConfig = StatusConfig | PingConfig | ChatConfig | ProfileConfig

ASKING: Final[dict[str, type[AskingConfig]]] = {
    "status": StatusConfig,
    "ping": PingConfig,
    "chat": ChatConfig,
    "profile": ProfileConfig,
}
