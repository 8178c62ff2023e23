"""``mooncake drain``: take workers out of service without a failed request.

A drained worker gets nothing new and finishes what it has. It stays a member until it is stopped, and its node serves
the KV it holds. ``--stop`` ends the drained processes, for whoever started them to start them again; of a node that is
given by name, the messenger too, and with it what it keeps in memory. Where nobody else is left for their work nobody
is drained, unless ``--force`` says so.

Exit codes: 0 when all are drained (or gone), 1 when they are not in time, 2 for a refused command or no conductor.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final

from mooncake_mesh.cli.drain_state import DrainState, check_others_are_left, chosen, state_of
from mooncake_mesh.errors import MooncakeError, PeerUnreachable, Refused
from mooncake_mesh.mesh import key_folder
from mooncake_mesh.mesh.conductors import Conductors
from mooncake_mesh.mesh.curve import MeshKeys
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import Drain, MemberState, Ok, StatusQuery, StatusReport, Stop

_CONDUCTOR: Final = "tcp://127.0.0.1:7700"
_CALL_TIMEOUT_S: Final = 3.0
_LOOK_EVERY_S: Final = 0.2


def run(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        keys = None if arguments.keys is None else key_folder.load(arguments.keys)
        return asyncio.run(_run(arguments, keys))
    except MooncakeError as error:
        sys.stderr.write(f"mooncake drain: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake drain", description="Take workers out of service without a failed request.", allow_abbrev=False
    )
    parser.add_argument("names", metavar="NAME", nargs="+", help="an instance, or a node: all its workers")
    parser.add_argument(
        "--conductor",
        default=_CONDUCTOR,
        help="endpoint of the conductor, or of several, separated by commas (default %(default)s)",
    )
    parser.add_argument("--keys", type=Path, help="folder with the keys of tcp sockets (mooncake keys)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest wait (default %(default)g)")
    parser.add_argument("--stop", action="store_true", help="end the processes once they are drained")
    parser.add_argument("--force", action="store_true", help="also where nobody else is left for the work")
    return parser


async def _run(arguments: argparse.Namespace, keys: MeshKeys | None) -> int:
    deadline_s = monotonic() + arguments.timeout_s
    async with Conductors(arguments.conductor, keys=keys) as conductors:
        report = await _report(conductors)
        workers, messengers = chosen(report, arguments.names)
        if not arguments.force:
            check_others_are_left(report, workers)
        watch = _Watch(conductors, deadline_s)
        for worker in workers:
            await _order(worker, Drain(incarnation=worker.member.incarnation), keys)
        if not await watch.until(workers, (DrainState.SERVING_KV, DrainState.GONE)):
            return 1
        if not arguments.stop:
            return 0
        for group in (workers, messengers):
            for member in group:
                await _order(member, Stop(incarnation=member.member.incarnation), keys)
            if not await watch.until(group, (DrainState.GONE,)):
                return 1
    return 0


async def _report(conductors: Conductors) -> StatusReport:
    await conductors.follow()
    return await conductors.leader.call(StatusQuery(), StatusReport, timeout_s=_CALL_TIMEOUT_S)


async def _order(state: MemberState, order: Drain | Stop, keys: MeshKeys | None) -> None:
    """Raises MooncakeError: nothing is drained by halves."""
    try:
        async with RpcClient(state.member.endpoint, keys=keys) as member:
            await member.call(order, Ok, timeout_s=_CALL_TIMEOUT_S)
    except MooncakeError as error:
        if isinstance(order, Stop) and isinstance(error, PeerUnreachable):
            return  # it may be gone before its answer has left; whoever watches finds out
        raise Refused(error.code, f"{state.member.instance_id} at {state.member.endpoint}: {error}") from error


class _Watch:
    """Tells each change of state on stdout."""

    def __init__(self, conductors: Conductors, deadline_s: float) -> None:
        self._conductors = conductors
        self._deadline_s = deadline_s
        self._said: dict[str, DrainState] = {}

    async def until(self, members: Sequence[MemberState], wanted: tuple[DrainState, ...]) -> bool:
        """Wait until all *members* are in a *wanted* state; False after the deadline."""
        while True:
            report = await _report(self._conductors)
            states = [state_of(report, one.member.instance_id, one.member.incarnation) for one in members]
            for one, state in zip(members, states, strict=True):
                self._say(one.member.instance_id, state)
            if all(state in wanted for state in states):
                return True
            if monotonic() > self._deadline_s:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)

    def _say(self, name: str, state: DrainState) -> None:
        if self._said.get(name) is not state:
            self._said[name] = state
            sys.stdout.write(f"{name}: {state.value}\n")
            sys.stdout.flush()
