"""The conductors of a mesh, of which one leads. Most meshes have one, and nobody is asked who that is."""

import asyncio
from typing import Final

import structlog

from mooncake_mesh.config_checks import listed
from mooncake_mesh.errors import CallTimeout, MooncakeError, NotLeader, PeerUnreachable, Refused
from mooncake_mesh.mesh.curve import MeshKeys
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_proto.control import LeaderQuery, LeaderReport

log = structlog.get_logger(__name__)

_LOOK_S: Final = 0.5
"""How long all of them have to answer; one that leads in a new term is believed at once."""
_CONNECT_S: Final = 0.5
"""How long a call to one that may be gone waits for a connection, where another one may lead by then."""


class Conductors:
    """A connection to each of *endpoints*, commas between; ``leader`` is the one to who leads, as far as is known.

    ``epoch`` is that of its term, 0 of one that has no others beside it; ``connect_timeout_s`` is how long a call that
    is tried again should wait for a connection, None: as long as for its answer. Create inside a running loop.
    """

    def __init__(self, endpoints: str, *, keys: MeshKeys | None = None) -> None:
        self._clients = [RpcClient(endpoint, keys=keys) for endpoint in listed(endpoints)]
        self.leader = self._clients[0]
        self.epoch = 0
        self.are_several = len(self._clients) > 1
        self.connect_timeout_s = _CONNECT_S if self.are_several else None

    async def __aenter__(self) -> "Conductors":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def post(self, body: object) -> None:
        """Send one way to the leader, now. Raises PeerUnreachable."""
        self.leader.post(body)

    async def follow(self) -> None:
        """Find out who leads. What still waits for an answer of another one fails, as when its connection is lost.

        Raises NotLeader when nobody does, or nobody can be asked; Refused where one does not know that it has others
        beside it.
        """
        if not self.are_several:
            return
        client, report = await self._look()
        if client is not self.leader or report.epoch != self.epoch:
            log.info("conductor_leads", instance_id=report.instance_id, endpoint=client.endpoint, epoch=report.epoch)
        self.leader, self.epoch = client, report.epoch
        for other in self._clients:
            if other is not client:
                other.fail_open_calls("another conductor leads")

    def registered(self, epoch: int) -> None:
        """The leader has us as a member, in its term *epoch*."""
        self.epoch = epoch

    async def reports(self) -> list[tuple[str, LeaderReport | MooncakeError]]:
        """What each one says of itself, with its endpoint."""
        async with asyncio.TaskGroup() as asking:
            answers = [asking.create_task(_ask(client)) for client in self._clients]
        return [(client.endpoint, answer.result()) for client, answer in zip(self._clients, answers, strict=True)]

    async def _look(self) -> tuple[RpcClient, LeaderReport]:
        """Of several that say so (one may have slept since it was true) the one of the latest term leads."""
        leading: list[tuple[RpcClient, LeaderReport]] = []
        words: list[str] = []
        async with asyncio.TaskGroup() as asking:
            open_ones = {asking.create_task(_ask(client)): client for client in self._clients}
            while open_ones and not any(report.epoch >= self.epoch for _, report in leading):
                done, _ = await asyncio.wait(open_ones, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    client, answer = open_ones.pop(task), task.result()
                    if isinstance(answer, LeaderReport) and answer.leads:
                        leading.append((client, answer))
                    else:
                        word = standing(answer) if isinstance(answer, LeaderReport) else str(answer)
                        words.append(f"{client.endpoint}: {word}")
            for task in open_ones:
                task.cancel()
        if not leading:
            raise NotLeader("; ".join(words))
        for client, report in leading:
            _check_has_others(client, report)
        return max(leading, key=lambda found: found[1].epoch)


def is_without_conductor(error: MooncakeError) -> bool:
    """Whether a call failed because no conductor that leads has heard it, as far as is known."""
    return isinstance(error, PeerUnreachable | CallTimeout) or error.code == NotLeader.code


async def _ask(client: RpcClient) -> LeaderReport | MooncakeError:
    try:
        return await client.call(LeaderQuery(), LeaderReport, timeout_s=_LOOK_S)
    except MooncakeError as error:
        return error


def _check_has_others(client: RpcClient, report: LeaderReport) -> None:
    if not report.epoch:
        why = "leads alone: where there are several conductors each needs etcd (conductor.etcd.endpoints)"
        raise Refused("no_etcd", f"{client.endpoint} {why}")


def standing(report: LeaderReport) -> str:
    """What a conductor says of itself, for people."""
    if report.leads:
        return f"leads, epoch {report.epoch}" if report.epoch else "leads alone"
    leader = f"the leader is {report.leader}" if report.leader else "no leader is known"
    return f"standby, {leader}{f' ({report.trouble})' if report.trouble else ''}"
