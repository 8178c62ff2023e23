"""The conductor moves instances between the pools: whom it tells, what it places meanwhile, what it gives up."""

from dataclasses import replace

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.roles import RoleRules
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Load, Member, Role, SwitchRole, WorkerRole
from mooncake_proto.ids import Incarnation, InstanceId, JobId
from mooncake_proto.serving import Placement, Rejected, Schedule
from tests.unit.test_conductor_core import COST, ROOMY, life, member

RULES = RoleRules(memory_s=4.0, sustained_s=4.0, rest_s=20.0)


def switchable(role: Role, name: str, *, n: int = 1) -> Member:
    return replace(member(role, name, f"n-{name}", n=n), can_switch=True)


class Mesh:
    """Three switchable prefill instances and a decode instance, each on its own node, and time in half seconds."""

    def __init__(self, rules: RoleRules | None = RULES) -> None:
        self.now_s = 0.0
        self.core = ConductorCore(
            incarnation=Incarnation("conductor"),
            peers=PeerTable(suspect_after_s=2.0, dead_after_s=5.0),
            index=PrefixIndex(max_entries=1000),
            cost=COST,
            objectives=Objectives(ttft_s=30.0, tbt_s=10.0),
            started_s=0.0,
            scheduling=Scheduling(roles=rules),
        )
        self.members: dict[str, Member] = {}
        self.loads: dict[str, Load] = {}
        for worker in [*(switchable(Role.PREFILL, f"p{i}") for i in range(3)), switchable(Role.DECODE, "d0")]:
            self.join(member(Role.MESSENGER, f"m-{worker.instance_id}", f"n-{worker.instance_id}"), ROOMY)
            self.join(worker, Load())

    def join(self, one: Member, load: Load) -> None:
        self.core.register(one, load, self.now_s)
        self.members[one.instance_id] = one
        self.loads[one.instance_id] = load

    def leave(self, name: str) -> None:
        one = self.members.pop(name)
        self.core.goodbye(one.instance_id, one.incarnation)

    def passes(self, seconds: float) -> list[tuple[str, SwitchRole]]:
        """Who was told what meanwhile."""
        told = []
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            for name, one in self.members.items():
                self.core.heartbeat(one.instance_id, one.incarnation, self.loads[name], self.now_s)
            self.core.expire(self.now_s)
            told += [(order.endpoint, order.message) for order in self.core.orders.take()]
        return [(endpoint, word) for endpoint, word in told if isinstance(word, SwitchRole)]

    def place(self) -> Placement | Rejected:
        job = JobId(f"job{self.now_s}")
        return self.core.schedule(
            Schedule(job_id=job, model="m", prompt_tokens=8, max_new_tokens=8, keys=b"", refused_by=()), self.now_s
        )

    def decodes_much(self) -> None:
        self.loads["d0"] = Load(running_jobs=10, running_tokens=3_900, sequences=((390, 1),) * 10)


def test_a_pool_that_is_short_gets_an_instance_and_hears_why() -> None:
    mesh = Mesh()
    assert mesh.passes(10.0) == [], "an idle mesh is balanced"
    mesh.decodes_much()
    [(endpoint, word)] = mesh.passes(10.0)
    assert endpoint == "ipc://p0"
    assert (word.role, word.incarnation, word.prefill, word.decode) == (WorkerRole.DECODE, life(1), 3, 1)
    assert 0.6 < word.decode_demand < 1.5
    assert word.prefill_demand == 0.0


def test_who_is_to_switch_gets_no_work_until_it_is_back() -> None:
    mesh = Mesh()
    mesh.decodes_much()
    assert [endpoint for endpoint, _ in mesh.passes(10.0)] == ["ipc://p0"]
    for _ in range(4):
        placed = mesh.place()
        assert isinstance(placed, Placement)
        assert placed.prefill.instance_id != "p0"
    mesh.loads["p0"] = Load(draining=True)
    assert mesh.passes(30.0) == [], "one at a time of four"
    mesh.leave("p0")
    mesh.passes(2.0)
    mesh.join(switchable(Role.DECODE, "p0", n=2), Load())
    placed = mesh.place()
    assert isinstance(placed, Placement)
    assert placed.decode.instance_id == "p0"
    assert mesh.core.status(mesh.now_s).reasons == ("no gateway",)


def test_an_order_that_nobody_heard_is_given_up_and_repeated() -> None:
    mesh = Mesh()
    mesh.decodes_much()
    assert mesh.passes(10.0)
    assert mesh.passes(3.0) == []
    assert [endpoint for endpoint, _ in mesh.passes(10.0)] == ["ipc://p0"]


def test_one_that_dies_on_the_way_is_no_longer_waited_for() -> None:
    mesh = Mesh()
    mesh.decodes_much()
    assert mesh.passes(10.0)
    del mesh.members["p0"]  # no goodbye
    assert [endpoint for endpoint, _ in mesh.passes(15.0)][:1] == ["ipc://p1"]


def test_nobody_switches_where_that_is_not_allowed_or_not_possible() -> None:
    off = Mesh(rules=None)
    off.decodes_much()
    assert off.passes(30.0) == []
    fixed = Mesh()
    for name in ("p0", "p1", "p2"):
        fixed.join(replace(fixed.members[name], can_switch=False, incarnation=life(2)), Load())
    fixed.decodes_much()
    assert fixed.passes(30.0) == []
    assert InstanceId("p0") in fixed.members
