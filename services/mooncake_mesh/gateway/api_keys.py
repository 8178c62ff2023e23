"""API keys and the tenants they belong to, in one JSON file of the keys folder.

A key reads ``mk-ID-SECRET``. The file holds its id and the SHA-256 of the whole, never the key: 256 random bits need no
slower hash, and who reads the file can use nothing in it. A tenant's limits hold for all of its keys together.
"""

import base64
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.gateway.rate_limits import TenantLimits

FILE_NAME: Final = "api_keys.json"
_VERSION: Final = 1
_KEY: Final = re.compile(r"mk-(?P<id>[0-9a-f]{12})-(?P<secret>[A-Za-z0-9_-]{43})")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SECRET_BYTES: Final = 32
_NOBODY: Final = "0" * 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """``sha256`` is of the whole key as its owner writes it."""

    name: str
    id: str
    tenant: str
    sha256: str
    created: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """All keys of a gateway, by id, and the limits of the tenants that have any."""

    keys: Mapping[str, ApiKey] = field(default_factory=lambda: MappingProxyType({}))
    limits: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))

    def find(self, shown: str) -> ApiKey | None:
        """The key that *shown* is. Takes as long for one that is nearly right as for any other."""
        match = _KEY.fullmatch(shown)
        known = self.keys.get(match["id"]) if match is not None else None
        expected = _NOBODY if known is None else known.sha256
        is_right = hmac.compare_digest(_digest(shown), expected)
        return known if is_right else None

    def limits_of(self, tenant: str) -> TenantLimits:
        return self.limits.get(tenant, TenantLimits())


def id_in(shown: str) -> str:
    """The id that *shown* claims to have, which is no secret; empty for what is no key at all."""
    match = _KEY.fullmatch(shown)
    return "" if match is None else match["id"]


def read(path: Path) -> ApiKeys:
    """The keys in *path*; none where there is no such file. Raises ConfigError for a file that is damaged."""
    try:
        document = json.loads(path.read_text())
        if document["version"] != _VERSION:
            raise _refused(f"{path} is of version {document['version']}, this program reads {_VERSION}")
        return ApiKeys(
            keys={entry["id"]: ApiKey(**entry) for entry in document["keys"]},
            limits={tenant: TenantLimits(**limits) for tenant, limits in document["tenants"].items()},
        )
    except FileNotFoundError:
        return ApiKeys()
    except OSError as error:
        raise _refused(f"cannot read {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _refused(f"{path} is damaged: {type(error).__name__}: {error}") from error


def add(path: Path, name: str, tenant: str, limits: TenantLimits | None) -> str:
    """Make a key; it is returned and stored nowhere. *limits* replace those of the tenant where given.

    Raises ConfigError for a name that is taken.
    """
    for what in (name, tenant):
        if not _NAME.fullmatch(what):
            raise _refused(f"a name has up to 64 letters, digits, dots, dashes or underscores, not {what!r}")
    with _changing(path) as document:
        if any(entry["name"] == name for entry in document["keys"]):
            raise _refused(f"there is an API key {name} already")
        key_id = secrets.token_hex(6)
        secret = base64.urlsafe_b64encode(secrets.token_bytes(_SECRET_BYTES)).decode().rstrip("=")
        shown = f"mk-{key_id}-{secret}"
        created = datetime.now(UTC).isoformat(timespec="seconds")
        key = ApiKey(name=name, id=key_id, tenant=tenant, sha256=_digest(shown), created=created)
        document["keys"].append(asdict(key))
        if limits is not None:
            document["tenants"][tenant] = asdict(limits)
    return shown


def revoke(path: Path, name: str) -> None:
    """Forget the key. Raises ConfigError for an unknown one. Running gateways notice within a second."""
    with _changing(path) as document:
        left = [entry for entry in document["keys"] if entry["name"] != name]
        if len(left) == len(document["keys"]):
            raise _refused(f"there is no API key {name}")
        document["keys"] = left
        tenants = {entry["tenant"] for entry in left}
        document["tenants"] = {t: limits for t, limits in document["tenants"].items() if t in tenants}


def state_of(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return (status.st_mtime_ns, status.st_ino)


@contextmanager
def _changing(path: Path) -> Iterator[dict[str, Any]]:
    """The file's content to change; written at once at the end, and by one process at a time."""
    if not path.parent.is_dir():
        raise _refused(f"there is no folder {path.parent}: mooncake keys init makes one")
    with _locked(path.parent):
        known = read(path)
        document: dict[str, Any] = {
            "version": _VERSION,
            "tenants": {tenant: asdict(limits) for tenant, limits in known.limits.items()},
            "keys": [asdict(key) for key in known.keys.values()],
        }
        yield document
        fresh = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(document, indent=2) + "\n")
        fresh.rename(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest(shown: str) -> str:
    return hashlib.sha256(shown.encode(errors="surrogateescape")).hexdigest()


def _refused(message: str) -> ConfigError:
    return ConfigError(message, path="keys.api")
