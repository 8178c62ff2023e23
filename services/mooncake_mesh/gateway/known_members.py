"""Who is there, as the conductor that leads tells it. Pure."""

from typing import Final

from mooncake_proto.control import ClusterState, Health, MemberState

_SETTLED_S: Final = 2.0
"""How long members may take to register with a conductor that has just begun: a beat or two."""


class KnownMembers:
    """The members of the latest state. Of a conductor that has just begun, which has not heard of all yet, also those
    that only the one before knew: they are there as a rule, and whoever needs one that is not finds out."""

    def __init__(self) -> None:
        self._state: ClusterState | None = None
        self._before: tuple[MemberState, ...] = ()
        self._began_s = 0.0

    def heard(self, state: ClusterState, now_s: float) -> None:
        if self._state is not None and state.conductor != self._state.conductor:
            self._before, self._began_s = self.members(now_s), now_s
        self._state = state

    def members(self, now_s: float) -> tuple[MemberState, ...]:
        if self._state is None:
            return ()
        if self._before and now_s - self._began_s >= _SETTLED_S:
            self._before = ()
        told = {state.member.instance_id for state in self._state.members}
        left = (state for state in self._before if state.health is not Health.DEAD)
        return (*self._state.members, *(state for state in left if state.member.instance_id not in told))
