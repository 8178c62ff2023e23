"""``mooncake gateway|conductor|prefill|decode|messenger``: one process of the mesh.

Exit codes: 0 after an orderly stop, 2 when the configuration or the model is refused, 1 for any other failure.
"""

import gc
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Final

import structlog

from mooncake_mesh import telemetry
from mooncake_mesh.config import (
    ConductorConfig,
    DecodeConfig,
    EngineKind,
    GatewayConfig,
    MessengerConfig,
    PrefillConfig,
)
from mooncake_mesh.config_checks import exposed
from mooncake_mesh.engine import heap, openmp
from mooncake_mesh.errors import ConfigError, ModelError, MooncakeError

if TYPE_CHECKING:
    from mooncake_mesh.mesh import runtime

WorkerConfig = DecodeConfig | PrefillConfig
ServiceConfig = ConductorConfig | GatewayConfig | MessengerConfig | WorkerConfig
Service = Callable[["runtime.Lifecycle"], Awaitable[None]]

log = structlog.get_logger(__name__)

_IN_CLEAR: Final = ("host=", "data_host=", "pipeline.data_host=")
"""Addresses whose keys prove who speaks and hide nothing: HTTP, and the data of transports without tcp_tls."""


def run(role: str, config: ServiceConfig) -> int:
    """Run the service of *role* until SIGTERM or SIGINT."""

    def service() -> Service:
        module = importlib.import_module(f"mooncake_mesh.{role}.service")
        return lambda lifecycle: module.run(config, lifecycle)

    return _run(role, config, service)


def run_switchable(role: str, config: WorkerConfig, other: WorkerConfig) -> int:
    """As :func:`run`, of a worker that starts as *role* and takes the other one by *config* and *other*."""

    def service() -> Service:
        from mooncake_mesh.cli import switching

        both = switching.BothRoles.of(config, other)
        return lambda lifecycle: switching.run(both, lifecycle)

    return _run(role, config, service)


def _run(role: str, config: ServiceConfig, load_service: Callable[[], Service]) -> int:
    telemetry.configure(role, config.instance_id, config.log_level, config.log_format)
    from mooncake_mesh.mesh import key_folder, runtime  # here, so that `mooncake --help` needs no event loop

    try:
        keys = None if config.keys is None else key_folder.load_server(config.keys)
        _warn(config)
        if isinstance(config, WorkerConfig) and config.engine is EngineKind.TRANSFORMERS:
            heap.keep_freed_memory()
            if isinstance(config, PrefillConfig) and not config.switchable:
                openmp.sleep_soon()
        service = load_service()
        gc.freeze()  # modules live as long as the process: no collection, and not its end, has to look through them
        return runtime.main(service, keys)
    except Exception as error:  # noqa: BLE001  the process' border: every failure becomes a line and an exit code
        return _failed(role, error)


def _warn(config: ServiceConfig) -> None:
    """Say what is open to others, or in clear, although other machines reach it."""
    addresses = exposed(config)
    in_clear = [each for each in addresses if each.startswith(_IN_CLEAR) and not each.startswith(_hidden(config))]
    if addresses and config.keys is None:
        log.warning(
            "insecure_bind",
            addresses=addresses,
            danger="anybody who reaches these can read prompts and answers, use the mesh and change its KVCache",
            remedy="mooncake keys init, and --keys",
        )
    elif in_clear:
        log.warning(
            "not_encrypted",
            addresses=in_clear,
            danger="who can read this network can read what goes over these",
            remedy="a TLS proxy before HTTP; for KVCache messenger.tcp_tls and prefill.pipeline.tcp_tls, a private "
            "network, WireGuard or IPsec",
        )


def _hidden(config: ServiceConfig) -> tuple[str, ...]:
    """Addresses of data that is encrypted."""
    if isinstance(config, MessengerConfig) and config.tcp_tls:
        return ("data_host=",)
    return ("pipeline.data_host=",) if isinstance(config, PrefillConfig) and config.pipeline.tcp_tls else ()


def _failed(role: str, error: Exception) -> int:
    refusal = next((leaf for leaf in _leaves(error) if isinstance(leaf, ConfigError | ModelError)), None)
    if refusal is not None:
        sys.stderr.write(f"mooncake {role}: {refusal}\n")
        return 2
    log.critical("crashed", exc_info=error)
    sys.stderr.write(f"mooncake {role}: {_brief(error)}\n")
    return 1


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside nested groups: task groups wrap what their tasks raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _brief(error: BaseException) -> str:
    first = next(_leaves(error))
    return str(first) if isinstance(first, MooncakeError) else f"{type(first).__name__}: {first}"
