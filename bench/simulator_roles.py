"""Simulated instances that change between prefilling and decoding when the conductor tells them to.

One that was told to switch says so with its beats, and finishes what it has. Then it leaves, and is back on the same
node, with the same blocks in its pool, as an instance of the other role a while later.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bench.simulator_clock import VirtualClock
from bench.simulator_decode import DecodeShell
from bench.simulator_node import INCARNATION, SimNode
from bench.simulator_prefill import PrefillShell
from mooncake_mesh.conductor.core import ConductorCore
from mooncake_proto.control import SwitchRole, WorkerRole
from mooncake_proto.ids import InstanceId

Shell = PrefillShell | DecodeShell


@dataclass(slots=True)
class Fleet:
    """The instances of a run, in their roles; and by id, where one that has left stays until it is back."""

    prefill: list[PrefillShell]
    decode: list[DecodeShell]
    prefill_of: dict[InstanceId, PrefillShell]
    decode_of: dict[InstanceId, DecodeShell]

    @classmethod
    def of(cls, prefill: list[PrefillShell], decode: list[DecodeShell]) -> "Fleet":
        return cls(
            prefill=prefill,
            decode=decode,
            prefill_of={shell.member.instance_id: shell for shell in prefill},
            decode_of={shell.member.instance_id: shell for shell in decode},
        )

    def shells(self) -> Iterable[Shell]:
        yield from self.prefill
        yield from self.decode


class RoleSwitches:
    """The beats of a fleet, and what becomes of the conductor's orders. A new role takes *switch_s* from the end of the
    old one; None: there are no orders."""

    def __init__(
        self,
        fleet: Fleet,
        clock: VirtualClock,
        conductor: ConductorCore,
        switch_s: float | None,
        *,
        prefill: Callable[[SimNode, str], PrefillShell],
        decode: Callable[[SimNode, str], DecodeShell],
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._conductor = conductor
        self._switch_s = switch_s
        self._make_prefill = prefill
        self._make_decode = decode
        self._draining: dict[InstanceId, Shell] = {}
        self.total = 0

    def beat(self) -> None:
        """Let all tell the conductor how they are, and where there may be orders let it think about them."""
        for shell in self._fleet.shells():
            load = shell.load()
            is_draining = shell.member.instance_id in self._draining
            shell.node.beat(shell.member, replace(load, draining=True) if is_draining else load)
        if self._switch_s is not None:
            self._step(self._switch_s)

    def _step(self, switch_s: float) -> None:
        """Let time pass at the conductor; begin what it orders, and end what has drained."""
        self._conductor.expire(self._clock.now_s)
        by_endpoint = {shell.member.endpoint: shell for shell in self._fleet.shells()}
        for order in self._conductor.orders.take():
            shell = by_endpoint.get(order.endpoint)
            if isinstance(order.message, SwitchRole) and shell is not None and _role(shell) is not order.message.role:
                self._draining[shell.member.instance_id] = shell
        for instance_id, shell in list(self._draining.items()):
            if not (shell.flights if isinstance(shell, PrefillShell) else shell.core.n_jobs):
                del self._draining[instance_id]
                self._switch(shell, switch_s)

    def _switch(self, shell: Shell, switch_s: float) -> None:
        name, node = shell.member.instance_id, shell.node
        self._conductor.goodbye(name, INCARNATION)
        if isinstance(shell, PrefillShell):
            self._fleet.prefill.remove(shell)

            def back() -> None:
                self._fleet.decode_of[name] = decode = self._make_decode(node, name)
                self._fleet.decode.append(decode)

        else:
            self._fleet.decode.remove(shell)

            def back() -> None:
                self._fleet.prefill_of[name] = prefill = self._make_prefill(node, name)
                self._fleet.prefill.append(prefill)

        self.total += 1
        self._clock.at(self._clock.now_s + switch_s, back)


def _role(shell: Shell) -> WorkerRole:
    return WorkerRole(shell.member.role.value)
