"""Settings of the seat in etcd that conductors compete for; a part of :mod:`mooncake_mesh.config`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from mooncake_mesh.config_checks import at_least, is_loopback, words

LEAST_LEASE_S: Final = 2
"""etcd grants no shorter ones with its default settings: one and a half times its own election timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """Several conductors of one mesh, of which one leads. A conductor without ``endpoints`` is the only one."""

    endpoints: Annotated[str, "URLs of etcd (v3), separated by commas, where there are standby conductors"] = ""
    key: Annotated[str, "key that the leader holds; another one for each mesh"] = "mooncake-mesh/leader"
    lease_s: Annotated[int, "lease of the leader: how soon after its loss a standby may take over"] = 5
    ca: Annotated[Path | None, "certificate authorities that https:// endpoints are checked with"] = None
    cert: Annotated[Path | None, "certificate that this conductor shows etcd"] = None
    cert_key: Annotated[Path | None, "private key of that certificate"] = None

    def __post_init__(self) -> None:
        words(self, "key")
        at_least(self, LEAST_LEASE_S, "lease_s")
        if (self.cert is None) != (self.cert_key is None):
            raise ValueError("cert: goes with cert_key, and cert_key with it")
        for url in self.urls:
            _check(url)
        if len({urlsplit(url).scheme for url in self.urls}) > 1:
            raise ValueError("endpoints: must be all http:// or all https://")

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.endpoints.split(",") if url.strip())

    @property
    def urls_in_clear(self) -> tuple[str, ...]:
        """Those that go over a network as anybody there can read and change it."""
        plain = (url for url in self.urls if url.startswith("http://"))
        return tuple(url for url in plain if not is_loopback(urlsplit(url).hostname or ""))


def _check(url: str) -> None:
    """Nothing but scheme, host and port."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # a port that is none
        is_url = False
    if not is_url or url != f"{parts.scheme}://{parts.netloc}" or "@" in parts.netloc:
        raise ValueError(f"endpoints: must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
