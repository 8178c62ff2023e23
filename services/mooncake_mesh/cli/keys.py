"""``mooncake keys``: makes the keys of a mesh, and says who may come in (docs/security.md).

Secrets are written to files that only their owner can read; an API key is shown once, when it is made.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mooncake_mesh.errors import ConfigError
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.rate_limits import TenantLimits
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.curve import Audience

_FOLDER_VARIABLE: Final = "MOONCAKE_KEYS"


def default_folder() -> Path:
    """``$MOONCAKE_KEYS``, or a folder beside this user's other configuration."""
    chosen = os.environ.get(_FOLDER_VARIABLE)
    configuration = os.environ.get("XDG_CONFIG_HOME")
    return Path(chosen or (Path(configuration) if configuration else Path.home() / ".config") / "mooncake" / "keys")


def run(argv: Sequence[str]) -> int:
    """Run one command; its exit code, 2 for one that is refused."""
    arguments = _parser().parse_args(argv)
    act: Callable[[argparse.Namespace], None] = arguments.act
    try:
        act(arguments)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"mooncake keys: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake keys", description="Make the keys of a mesh, and say who may come in.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    init = _command(commands, "init", _init, "make the keys of a new mesh, and of its first member")
    init.add_argument("--name", default="first", help="what the first member is called on the allow-list")
    _command(commands, "show", _show, "print public keys and the allow-list")
    issue = _command(commands, "issue", _issue, "make the folder of another machine or of an SDK client")
    issue.add_argument("name", metavar="NAME", help="what it is called on the allow-list")
    issue.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to make; carry it there")
    _audience(issue)
    allow = _command(commands, "allow", _allow, "put a public key on the allow-list")
    allow.add_argument("name", metavar="NAME")
    allow.add_argument("public_key", metavar="KEY", help="40 characters, as `mooncake keys show` prints it")
    _audience(allow)
    revoke = _command(commands, "revoke", _revoke, "take a key off the allow-list")
    revoke.add_argument("name", metavar="NAME")
    api = commands.add_parser("api", help="API keys of the gateway's doors", allow_abbrev=False)
    _add_api(api.add_subparsers(metavar="COMMAND", required=True))
    return parser


def _add_api(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    add = _command(commands, "add", _api_add, "make an API key and print it, this once")
    add.add_argument("name", metavar="NAME")
    add.add_argument("--tenant", required=True, help="whom it belongs to; tenants share no KVCache")
    for what in ("requests", "tokens"):
        text = f"{what} that all keys of the tenant may ask for in a minute (default: as before, or no limit)"
        add.add_argument(f"--{what}-per-minute", metavar="N", type=_limit, help=text)
    _command(commands, "list", _api_list, "print all API keys by name, with the tenants' limits")
    revoke = _command(commands, "revoke", _api_revoke, "forget an API key")
    revoke.add_argument("name", metavar="NAME")


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    act: Callable[[argparse.Namespace], None],
    summary: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
    folder = default_folder()
    text = f"the keys folder (default: ${_FOLDER_VARIABLE}, or {folder})"
    parser.add_argument("--keys", metavar="DIR", type=Path, default=folder, help=text)
    parser.set_defaults(act=act)
    return parser


def _audience(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--member",
        dest="audience",
        action="store_const",
        const=Audience.MEMBERS,
        default=Audience.CLIENTS,
        help="a machine of the mesh, which every socket lets in (default: an SDK client)",
    )


def _limit(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return number


# --- commands ---------------------------------------------------------------------------------------------------------


def _init(arguments: argparse.Namespace) -> None:
    key_folder.create(arguments.keys, arguments.name)
    _show(arguments)


def _show(arguments: argparse.Namespace) -> None:
    keys = key_folder.load(arguments.keys)
    _write(f"folder   {arguments.keys}")
    _write(f"server   {keys.server_public.decode()}")
    _write(f"own      {keys.own.public.decode()}")
    for entry in key_folder.entries(arguments.keys):
        _write(f"{entry.audience.value:8} {entry.public.decode()}  {entry.name}")


def _issue(arguments: argparse.Namespace) -> None:
    key_folder.issue(arguments.keys, arguments.name, arguments.audience, arguments.out)
    _write(f"{arguments.out} is the folder of {arguments.name}: carry it there over a channel that you trust")


def _allow(arguments: argparse.Namespace) -> None:
    key_folder.allow(arguments.keys, arguments.name, arguments.public_key, arguments.audience)
    _write(f"{arguments.name} is on the allow-list ({arguments.audience.value}) of {arguments.keys}")


def _revoke(arguments: argparse.Namespace) -> None:
    key_folder.revoke(arguments.keys, arguments.name)
    _write(f"{arguments.name} makes no new connection; restart the processes to end those it has")


def _api_add(arguments: argparse.Namespace) -> None:
    file = arguments.keys / api_keys.FILE_NAME
    known = api_keys.read(file).limits_of(arguments.tenant)
    requests, tokens = arguments.requests_per_minute, arguments.tokens_per_minute
    limits = TenantLimits(
        requests_per_minute=known.requests_per_minute if requests is None else requests,
        tokens_per_minute=known.tokens_per_minute if tokens is None else tokens,
    )
    shown = api_keys.add(file, arguments.name, arguments.tenant, limits)
    sys.stderr.write(f"API key {arguments.name} of tenant {arguments.tenant}; it is not shown again:\n")
    _write(shown)


def _api_list(arguments: argparse.Namespace) -> None:
    known = api_keys.read(arguments.keys / api_keys.FILE_NAME)
    for key in sorted(known.keys.values(), key=lambda key: key.name):
        limits = known.limits_of(key.tenant)
        _write(
            f"{key.name}  tenant={key.tenant}  created={key.created}  id={key.id}"
            f"  requests_per_minute={_shown(limits.requests_per_minute)}"
            f"  tokens_per_minute={_shown(limits.tokens_per_minute)}"
        )


def _api_revoke(arguments: argparse.Namespace) -> None:
    api_keys.revoke(arguments.keys / api_keys.FILE_NAME, arguments.name)
    _write(f"API key {arguments.name} is revoked")


def _shown(limit: int | None) -> str:
    return "none" if limit is None else str(limit)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
