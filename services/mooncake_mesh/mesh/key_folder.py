"""The folder with a process' keys and allow-lists, in the file format that ZeroMQ's own tools use.

::

    server.key   server.key_secret    the mesh's: proves whoever binds a socket. A client has only the first
    own.key      own.key_secret       this process': proves it to those it connects to
    members/NAME.key                  public keys that every socket of the mesh lets in
    clients/NAME.key                  public keys that only the gateways' door for SDK clients lets in
    api_keys.json                     see gateway/api_keys.py

Secrets are readable by their owner only; a folder where they are not is refused.
"""

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.mesh.curve import KEY_CHARS, Audience, KeyPair, MeshKeys

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SERVER: Final = "server"
_OWN: Final = "own"
_PUBLIC: Final = ".key"
_SECRET: Final = ".key_secret"


def create(folder: Path, name: str) -> MeshKeys:
    """Keys of a new mesh in *folder*, and of its first member, which is called *name*. Raises ConfigError."""
    _check_name(name)
    if (folder / f"{_SERVER}{_SECRET}").exists():
        raise _refused(f"{folder} holds the keys of a mesh already")
    _make_folder(folder)
    _write_pair(folder, _SERVER, _new_pair())
    own = _new_pair()
    _write_pair(folder, _OWN, own)
    allow(folder, name, own.public.decode(), Audience.MEMBERS)
    return load(folder)


def load(folder: Path) -> MeshKeys:
    """The keys of *folder*. Raises ConfigError that names the file which is missing, damaged or open to others."""
    if not zmq.has("curve"):
        raise _refused("this ZeroMQ library was built without CURVE")
    server_public = _read(folder / f"{_SERVER}{_PUBLIC}")[0]
    own = _read_pair(folder, _OWN)
    server = _read_pair(folder, _SERVER) if (folder / f"{_SERVER}{_SECRET}").exists() else None
    if server is not None and server.public != server_public:
        raise _refused(f"{folder}: {_SERVER}{_PUBLIC} and {_SERVER}{_SECRET} are not of one pair")
    return MeshKeys(folder=folder, server_public=server_public, own=own, server=server)


def load_server(folder: Path) -> MeshKeys:
    """As :func:`load`, for a process that binds sockets."""
    keys = load(folder)
    if keys.server is None:
        raise _refused(f"{folder} has no {_SERVER}{_SECRET}: it is a client's, and can bind no socket of the mesh")
    return keys


def issue(folder: Path, name: str, audience: Audience, out: Path) -> MeshKeys:
    """Make *out*, the folder of a new member or client, and put it on the allow-list of *folder*. Raises ConfigError.

    A member's folder gets the allow-lists as they are now.
    """
    load_server(folder)
    _check_new(folder, name)
    if out.exists() and any(out.iterdir()):
        raise _refused(f"{out} is not empty")
    _make_folder(out)
    own = _new_pair()
    _write_pair(out, _OWN, own)
    allow(folder, name, own.public.decode(), audience)
    shutil.copyfile(folder / f"{_SERVER}{_PUBLIC}", out / f"{_SERVER}{_PUBLIC}")
    if audience is Audience.MEMBERS:
        _write_secret(out / f"{_SERVER}{_SECRET}", (folder / f"{_SERVER}{_SECRET}").read_text())
        for some in Audience:
            shutil.copytree(folder / some.value, out / some.value)
    return load(out)


def allow(folder: Path, name: str, public: str, audience: Audience) -> None:
    """Let who has the secret to *public* in under *name*. Raises ConfigError for a name that is taken."""
    _check_new(folder, name)
    key = _checked(public.encode(), "the key")
    known = {other.public for other in entries(folder)}
    if key in known:
        raise _refused(f"the key {public} is on the allow-list already")
    for some in Audience:
        (folder / some.value).mkdir(mode=0o700, exist_ok=True)
    (folder / audience.value / f"{name}{_PUBLIC}").write_text(_text(key))


def revoke(folder: Path, name: str) -> None:
    """Take *name* off the allow-list: it makes no new connection. Raises ConfigError for an unknown one."""
    _check_name(name)
    found = [path for some in Audience if (path := folder / some.value / f"{name}{_PUBLIC}").exists()]
    if not found:
        raise _refused(f"nobody is called {name} on the allow-list of {folder}")
    for path in found:
        path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the allow-list."""

    name: str
    audience: Audience
    public: bytes


def entries(folder: Path) -> Iterator[Entry]:
    """The allow-list, by audience and name. A file that holds no key lets nobody in and is skipped here."""
    for audience in Audience:
        for path in sorted((folder / audience.value).glob(f"*{_PUBLIC}")):
            try:
                public, _ = _read(path)
            except ConfigError:
                continue
            yield Entry(name=path.name.removesuffix(_PUBLIC), audience=audience, public=public)


def allowed(folder: Path) -> Mapping[Audience, Mapping[bytes, str]]:
    """Who may come in where: names by public key."""
    everybody = list(entries(folder))
    members = {entry.public: entry.name for entry in everybody if entry.audience is Audience.MEMBERS}
    return {Audience.MEMBERS: members, Audience.CLIENTS: {entry.public: entry.name for entry in everybody}}


def allowed_state(folder: Path) -> tuple[int, ...]:
    """Changes when an entry comes or goes."""
    folders = [folder / some.value for some in Audience]
    return tuple(path.stat().st_mtime_ns if path.is_dir() else 0 for path in folders)


# --- files ------------------------------------------------------------------------------------------------------------


def _new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public, secret=secret)


def _write_pair(folder: Path, name: str, pair: KeyPair) -> None:
    _write_secret(folder / f"{name}{_SECRET}", _text(pair.public, pair.secret))
    (folder / f"{name}{_PUBLIC}").write_text(_text(pair.public))


def _write_secret(path: Path, text: str) -> None:
    """Nobody else can open the file, not even while it is written."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _text(public: bytes, secret: bytes | None = None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _read_pair(folder: Path, name: str) -> KeyPair:
    path = folder / f"{name}{_SECRET}"
    public, secret = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise _refused(f"{path} is open to others (mode {mode:o}): chmod 600 {path}")
    if secret is None:
        raise _refused(f"{path} holds no secret key")
    if zmq.curve_public(secret) != public:
        raise _refused(f"{path}: its two keys are not of one pair")
    return KeyPair(public=public, secret=secret)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError) as error:
        raise _refused(f"cannot read a key from {path}: {getattr(error, 'strerror', None) or error}") from error
    return _checked(public, str(path)), None if secret is None else _checked(secret, str(path))


def _checked(key: bytes, what: str) -> bytes:
    try:
        if len(key) == KEY_CHARS and len(z85.decode(key)) == 32:
            return key
    except (ValueError, KeyError) as error:
        raise _refused(f"{what}: {error} in a key of {KEY_CHARS} characters (Z85)") from error
    raise _refused(f"{what}: a key has {KEY_CHARS} characters (Z85)")


def _check_new(folder: Path, name: str) -> None:
    _check_name(name)
    if any(entry.name == name for entry in entries(folder)):
        raise _refused(f"{name} is on the allow-list of {folder} already")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise _refused(f"a name has up to 64 letters, digits, dots, dashes or underscores, not {name!r}")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise _refused(f"{folder}: {error.strerror}") from error


def _refused(message: str) -> ConfigError:
    return ConfigError(message, path="keys")
