"""Under constant load the roles settle, whatever the mesh began with: no instance goes and comes back."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_mesh.policy.roles import Candidate, Demand, Pools, RoleBalance, RoleRules, wanted_decode
from mooncake_proto.control import Role
from mooncake_proto.ids import InstanceId

RULES = RoleRules()
_LOOK_S = 2.0


@dataclass
class Mesh:
    """Instances that obey: each is back in its new role a while after it was told to switch."""

    roles: dict[str, Role]
    takes_s: list[float]
    away: dict[str, tuple[Role, float]] = field(default_factory=dict)
    switched: list[Role] = field(default_factory=list)

    def count(self, role: Role) -> int:
        return sum(mine is role for mine in self.roles.values())

    def look(self, balance: RoleBalance, demand: Demand, now_s: float) -> None:
        for name, (role, back_s) in list(self.away.items()):
            if now_s >= back_s:
                del self.away[name]
                self.roles[name] = role
        coming = [role for role, _ in self.away.values()]
        candidates = [Candidate(instance_id=InstanceId(n), role=role, work=1.0) for n, role in self.roles.items()]
        sight = Pools(
            now_s=now_s,
            prefill=self.count(Role.PREFILL),
            decode=self.count(Role.DECODE),
            to_prefill=coming.count(Role.PREFILL),
            to_decode=coming.count(Role.DECODE),
            candidates=candidates,
            demand=demand,
        )
        for switch in balance.seen(sight):
            assert self.roles.pop(switch.instance_id) is not switch.role
            self.away[switch.instance_id] = (
                switch.role,
                now_s + self.takes_s[len(self.switched) % len(self.takes_s)],
            )
            self.switched.append(switch.role)


@settings(max_examples=40, deadline=None)
@given(
    prefill=st.integers(1, 12),
    decode=st.integers(1, 12),
    demand=st.builds(Demand, prefill=st.floats(0.0, 25.0), decode=st.floats(0.0, 25.0)),
    noise=st.lists(st.floats(0.97, 1.03), min_size=1, max_size=20),
    takes_s=st.lists(st.floats(1.0, 40.0), min_size=1, max_size=8),
)
def test_constant_load_is_answered_once(
    prefill: int, decode: int, demand: Demand, noise: list[float], takes_s: list[float]
) -> None:
    names = {f"p{i}": Role.PREFILL for i in range(prefill)} | {f"d{i}": Role.DECODE for i in range(decode)}
    mesh, balance = Mesh(roles=names, takes_s=takes_s), RoleBalance(RULES)
    n_all, most = prefill + decode, max(1, (prefill + decode) // 4)
    looks = 25 * n_all + 60
    for i in range(looks):
        settled = len(mesh.switched)
        factor = noise[i % len(noise)]
        mesh.look(balance, Demand(prefill=demand.prefill, decode=demand.decode * factor), i * _LOOK_S)
        assert len(mesh.away) <= most
        assert mesh.count(Role.PREFILL) >= 1
        assert mesh.count(Role.DECODE) >= 1
        assert i < looks - 30 or len(mesh.switched) == settled
    assert len(set(mesh.switched)) <= 1
    assert len(mesh.switched) <= max(prefill, decode)
    n_decode = mesh.count(Role.DECODE)
    missing = wanted_decode(demand, n_all) - n_decode
    pressed = Role.DECODE if missing > 0 else Role.PREFILL
    asked = demand.decode if pressed is Role.DECODE else demand.prefill
    if asked >= 1.1 * RULES.least_load * mesh.count(pressed) and mesh.count(pressed) < n_all - 1:
        assert abs(missing) <= 1 + 2 * RULES.margin * n_all
