"""The ``mooncake`` command line: sub-commands, their flags, and the way from a parsed line to what it starts.

Importing this must stay cheap: everything that a sub-command needs is imported when that sub-command runs.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake_mesh.cli.loading import load
from mooncake_mesh.cli.settings import add_flags, dump
from mooncake_mesh.config import (
    SECTIONS,
    DecodeConfig,
    DoctorConfig,
    LogFormat,
    LogLevel,
    PrefillConfig,
    RoleConfig,
    UpConfig,
)
from mooncake_mesh.config_commands import ChatConfig, PingConfig, ProfileConfig, StatusConfig
from mooncake_mesh.errors import ConfigError

_SUMMARIES: Final = {
    "up": "run a whole mesh on this machine",
    "chat": "talk to a mesh in the terminal",
    "status": "show the instances of a mesh, their queues and pools",
    "ping": "ask one process of a mesh whether it answers",
    "profile": "measure the instances of an idle mesh and write their cost profile",
    "doctor": "tell what this machine offers a messenger, and what is missing",
    "gateway": "run a gateway: OpenAI HTTP endpoint and door for SDK clients",
    "conductor": "run the conductor: the mesh's scheduler",
    "prefill": "run a prefill instance",
    "decode": "run a decode instance",
    "messenger": "run a node's messenger: its KVCache arena and transports",
}

_SIMULATE: Final = "simulate"
_KEYS: Final = "keys"
_DRAIN: Final = "drain"
_TRACE: Final = "trace"
_BENCH: Final = "bench"
"""These run no process of a mesh: their flags are their own, and no configuration is read for them."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run one sub-command; the process' exit code. A refused configuration is one line on stderr and code 2."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == [_SIMULATE]:
        from mooncake_mesh.cli import simulate

        return simulate.run(given[1:])
    if given[:1] == [_KEYS]:
        from mooncake_mesh.cli import keys

        return keys.run(given[1:])
    if given[:1] == [_DRAIN]:
        from mooncake_mesh.cli import drain

        _log_errors_only(_DRAIN)
        return drain.run(given[1:])
    if given[:1] == [_TRACE]:
        from mooncake_mesh.cli import trace

        _log_errors_only(_TRACE)
        return trace.run(given[1:])
    if given[:1] == [_BENCH]:
        from mooncake_mesh.cli import bench

        _log_errors_only(_BENCH)
        return bench.run(given[1:])
    arguments = _parser().parse_args(argv)
    name: str = arguments.command
    try:
        config = load(SECTIONS[name], flags=arguments, environ=environ)
        if arguments.print_config:
            sys.stdout.write(dump(config))
            return 0
        return _start(name, config, arguments, environ)
    except ConfigError as error:
        sys.stderr.write(f"mooncake {name}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake",
        description="A KVCache-centric, disaggregated LLM server.",
        epilog="Every flag of a sub-command is also a key of its table in the --config file and a variable "
        "MOONCAKE_<COMMAND>_<FLAG>; flags win over variables, variables over the file.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _SUMMARIES.items():
        command = commands.add_parser(name, help=summary, description=summary.capitalize() + ".", allow_abbrev=False)
        add_flags(command, SECTIONS[name])
    commands.add_parser(_SIMULATE, help="replay a request trace on a simulated mesh", add_help=False)
    commands.add_parser(_KEYS, help="make the keys of a mesh, and say who may come in", add_help=False)
    commands.add_parser(_DRAIN, help="take workers out of service without a failed request", add_help=False)
    commands.add_parser(_TRACE, help="show the life of one request as a timeline", add_help=False)
    commands.add_parser(_BENCH, help="send load to a server and report how it is served", add_help=False)
    return parser


def _start(name: str, config: RoleConfig, arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    match config:
        case UpConfig():
            from mooncake_mesh.cli import up

            return up.run(config, arguments.config)
        case StatusConfig():
            from mooncake_mesh.cli import status

            _log_errors_only(name)
            return status.run(config)
        case PingConfig():
            from mooncake_mesh.cli import ping

            _log_errors_only(name)
            return ping.run(config)
        case DoctorConfig():
            from mooncake_mesh.cli import doctor

            return doctor.run(config)
        case ProfileConfig():
            from mooncake_mesh.cli import profile

            _log_errors_only(name)
            return profile.run(config)
        case ChatConfig():
            from mooncake_mesh.cli import chat

            _log_errors_only(name)
            return chat.run(config)
        case PrefillConfig(switchable=True) | DecodeConfig(switchable=True):
            from mooncake_mesh.cli import roles

            file_only = argparse.Namespace(config=arguments.config)
            if isinstance(config, PrefillConfig):
                return roles.run_switchable(name, config, load(DecodeConfig, flags=file_only, environ=environ))
            return roles.run_switchable(name, config, load(PrefillConfig, flags=file_only, environ=environ))
        case _:
            from mooncake_mesh.cli import roles

            return roles.run(name, config)


def _log_errors_only(name: str) -> None:
    """For commands that talk to a person: their output is not a log."""
    from mooncake_mesh import telemetry

    telemetry.configure(name, name, LogLevel.ERROR, LogFormat.CONSOLE)


class _Version(argparse.Action):
    """Looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"mooncake-mesh {version('mooncake-mesh')}\n")
        parser.exit()
