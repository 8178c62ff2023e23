"""Checks that the classes of :mod:`mooncake_mesh.config` share.

Each looks at the named fields of a configuration and raises ``ValueError("field: what is allowed")``.
"""

import ipaddress
import math
import os
import re
from collections.abc import Sequence
from typing import Final

from mooncake_mesh.config_kinds import TransportKind
from mooncake_mesh.config_tenants import tenant_shares

IPC_PATH_LIMIT_BYTES: Final = 107
"""Longest path of a Unix socket: sockaddr_un holds 108 bytes with the closing zero."""

_ADDRESS: Final = r"(?P<host>\[[^\]]+\]|[^:\[\]/]+):(?P<port>\d{1,5})"
_TCP: Final = re.compile("tcp://" + _ADDRESS)
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def at_least(config: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name}: must be at least {least}, got {value}")


def above_zero(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}: must be above 0, got {value}")


def ids(config: object, *names: str) -> None:
    """Names of processes and nodes; they become parts of paths and of log lines."""
    for name in names:
        value = getattr(config, name)
        if not _ID.fullmatch(value):
            raise ValueError(f"{name}: must be up to 64 letters, digits, dots, dashes or underscores, got {value!r}")


def words(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value or not value.isprintable() or value != value.strip():
            raise ValueError(f"{name}: must not be empty or hold control characters or outer spaces, got {value!r}")


def whole_blocks(chunk_tokens: int, block_tokens: int) -> None:
    if chunk_tokens < 0 or chunk_tokens % block_tokens:
        raise ValueError(f"chunk_tokens: must be 0 or a multiple of block_tokens ({block_tokens}), got {chunk_tokens}")


def in_chunks(chunk_tokens: int, stages: int) -> None:
    if stages > 1 and chunk_tokens == 0:
        raise ValueError("chunk_tokens: must be above 0 where an instance has stages: they work on chunks")


def one_role(switchable: bool, stages: int) -> None:
    if switchable and stages > 1:
        raise ValueError("switchable: an instance of several stages prefills only")


def listed(endpoints: str) -> tuple[str, ...]:
    """The endpoints of a list that is separated by commas."""
    return tuple(endpoint.strip() for endpoint in endpoints.split(","))


def connected_each(name: str, endpoints: Sequence[str]) -> None:
    """The one field holds endpoints to connect to."""
    for endpoint in endpoints:
        _tcp_host(name, endpoint, least_port=1)


def conductors(config: object) -> None:
    """The field ``conductor`` lists endpoints to connect to, each once."""
    endpoints = listed(getattr(config, "conductor"))  # noqa: B009 - the configs share no base
    connected_each("conductor", endpoints)
    if len(set(endpoints)) < len(endpoints):
        raise ValueError(f"conductor: names one endpoint twice: {', '.join(endpoints)}")


def connected(config: object, *names: str) -> None:
    """Each field is an endpoint to connect to."""
    for name in names:
        _tcp_host(name, getattr(config, name), least_port=1)


def bound(config: object, *names: str) -> None:
    """Each field is an endpoint to bind; the system picks the port where it is 0."""
    for name in names:
        host = _tcp_host(name, getattr(config, name), least_port=0)
        if host is not None:
            _protected(config, name, host)


def listening(config: object, *, host: str, port: str) -> None:
    """The two fields are where a TCP server listens."""
    if not 0 <= getattr(config, port) <= 65535:
        raise ValueError(f"{port}: must lie in 0..65535, got {getattr(config, port)}")
    _protected(config, host, getattr(config, host))


def reachable(config: object, name: str, host: str) -> None:
    """*host* is where a TCP server of *config* listens."""
    _protected(config, name, host)


def exposed(config: object) -> list[str]:
    """The addresses that *config* binds although other machines reach them, with the fields' names."""
    found = []
    for name in ("bind", "publish", "stream_bind"):
        endpoint = getattr(config, name, "")
        host = _tcp_host(name, endpoint, least_port=0) if endpoint else None
        if host is not None and not is_loopback(host):
            found.append(f"{name}={endpoint}")
    for name in ("host", "data_host"):
        host = getattr(config, name, None)
        if host is not None and not is_loopback(host):
            found.append(f"{name}={host}")
    pipeline = getattr(config, "pipeline", None)
    if pipeline is not None and pipeline.stages > 1 and not is_loopback(pipeline.data_host):
        found.append(f"pipeline.data_host={pipeline.data_host}")
    return found


def quotas(config: object, name: str) -> None:
    try:
        tenant_shares(getattr(config, name))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def encrypted(config: object, name: str) -> None:
    """Where the one field asks for encryption, the transport can do it."""
    if getattr(config, name) and getattr(config, "transport") is TransportKind.RDMA:  # noqa: B009 - no common base
        raise ValueError(
            f"{name}: transport rdma cannot encrypt; use tcp, or auto, or a network that nobody else reads"
        )


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """The two parts of HOST:PORT or [IPv6]:PORT, an address to connect to."""
    match = re.fullmatch(_ADDRESS, address)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError(f"{name}: must be HOST:PORT, got {address!r}")
    return match["host"].strip("[]"), int(match["port"])


def socket_path(name: str, path: str) -> None:
    """*path* can be that of a Unix socket."""
    size = len(os.fsencode(path))
    if not size:
        raise ValueError(f"{name}: ipc:// needs a path")
    if size > IPC_PATH_LIMIT_BYTES:
        raise ValueError(
            f"{name}: the path of a socket has at most {IPC_PATH_LIMIT_BYTES} bytes, this one has {size}: {path}"
        )


def _tcp_host(name: str, endpoint: str, *, least_port: int) -> str | None:
    """Host of a tcp endpoint, None for an ipc one."""
    if endpoint.startswith("ipc://"):
        socket_path(name, endpoint.removeprefix("ipc://"))
        return None
    match = _TCP.fullmatch(endpoint)
    if match is None or not least_port <= int(match["port"]) <= 65535:
        raise ValueError(f"{name}: must be tcp://HOST:PORT or ipc://PATH, got {endpoint!r}")
    return match["host"].strip("[]")


def _protected(config: object, name: str, host: str) -> None:
    if not is_loopback(host) and getattr(config, "keys") is None and not getattr(config, "allow_insecure_bind"):  # noqa: B009 - the configs share no base
        raise ValueError(
            f"{name}: {host!r} may be reached from other machines, so keys are needed: make a folder with "
            f"`mooncake keys init` and give it as keys; or use 127.0.0.1 or ipc://, or insist with allow_insecure_bind"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches *host*. Other names count as reachable: nobody knows what they resolve to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
