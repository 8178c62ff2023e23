"""What is planned, fitted and told of a measurement; measuring itself is a test of a running mesh."""

import asyncio
import io
from typing import cast

import pytest
from rich.console import Console

from mooncake_mesh.cli.profile import error_rows, fitted, show
from mooncake_mesh.cli.profile_measure import Measurement, Plan, Samples, plan_for
from mooncake_mesh.client import MooncakeClient
from mooncake_mesh.errors import Rejected
from mooncake_mesh.mesh.rpc import RpcClient
from mooncake_mesh.policy.cost_fit import PrefillSample, StepSample, TransferSample
from mooncake_proto.control import ClusterState, Health, Load, Member, MemberState, Role, StatusReport
from mooncake_proto.ids import Incarnation, InstanceId, NodeId

PREFILLS = [
    PrefillSample(uncached_tokens=n, cached_tokens=p, elapsed_s=0.01 + 0.001 * n)
    for n in (10, 100, 900)
    for p in (0, 90)
]
STEPS = [StepSample(batch=b, context_tokens=100 * b, elapsed_s=0.02 + 0.01 * b) for b in (1, 2, 8)]


def measured(**kinds: Samples) -> Measurement:
    nobody = (cast(MooncakeClient, None), cast(RpcClient, None))
    made = Measurement(*nobody, model=None)
    made.samples.update(kinds)
    return made


def test_a_plan_doubles_up_to_the_largest() -> None:
    plan = plan_for(300, 4, 2)
    assert list(plan.prompt_tokens) == [32, 64, 128, 256, 300]
    assert plan.batches == [(size, n) for size in (1, 2, 4) for n in (32, 128, 300)]
    assert plan_for(64, 1, 1).batches == [(1, 32), (1, 64)]


def test_what_was_measured_is_fitted_by_kind_and_halves_are_shared() -> None:
    costs = fitted(measured(new=Samples(prefills=PREFILLS, steps=STEPS), steps_only=Samples(steps=STEPS)))
    assert set(costs) == {"new", "steps_only"}
    for cost in costs.values():
        assert cost.prefill_s(500, 0) == pytest.approx(0.51)
        assert cost.decode_step_s(4, 400) == pytest.approx(0.06)
        assert cost.transfer_s(1 << 20) == pytest.approx(0.0025, rel=0.1), "loopback, where none was seen"
    assert fitted(measured(a=Samples(prefills=PREFILLS))) == {}


def test_errors_are_told_for_each_kind_of_work() -> None:
    copies = [TransferSample(n_bytes=n, elapsed_s=0.001 + n / 1e9) for n in (10**6, 10**8)]
    measurement = measured(
        new=Samples(prefills=PREFILLS, steps=[*STEPS, *STEPS, StepSample(batch=1, context_tokens=100, elapsed_s=0.6)])
    )
    measurement.copies = copies
    costs = fitted(measurement)
    rows = {row.work: row for row in error_rows(costs["new"], measurement.samples["new"], copies)}
    assert (rows["prefill"].samples, rows["prefill"].worst) == (6, pytest.approx(0.0, abs=1e-6))
    assert rows["copy"].mean == pytest.approx(0.0, abs=1e-6)
    assert rows["decode step"].worst == pytest.approx(0.0, abs=1e-6), "one stop of the machine moves no median"
    assert (rows["decode step"].samples, rows["decode step"].single) == (7, pytest.approx(0.95 / 7))
    out = io.StringIO()
    show(measurement, costs, Console(file=out, width=120))
    assert "decode step" in out.getvalue()
    assert "loopback" not in out.getvalue()


def test_steps_are_grouped_by_batch_and_context() -> None:
    steps = [StepSample(batch=2, context_tokens=n, elapsed_s=s) for n, s in ((200, 1.0), (204, 3.0), (208, 9.0))]
    longer = StepSample(batch=2, context_tokens=2_000, elapsed_s=5.0)
    assert Samples(steps=[*steps, longer]).medians().steps == [steps[1], longer]


class SelectiveMesh:
    """A client and a conductor in one: prompts longer than *longest* are refused, others take a millisecond a token."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._prefills: list[tuple[int, int, float]] = []

    async def generate(self, prompt: list[int], **_: object) -> None:
        if len(prompt) > self._longest:
            raise Rejected("ttft_objective", unavailable=False, retry_after_s=1.0)
        self._prefills.append((len(prompt), 0, 0.001 * len(prompt)))

    async def call(self, *_: object, **__: object) -> StatusReport:
        load = Load(prefills=len(self._prefills), recent_prefills=tuple(self._prefills[-16:]))
        member = Member(
            role=Role.PREFILL, instance_id=InstanceId("p0"), node_id=NodeId("n0"), incarnation=Incarnation("i0"),
            endpoint="ipc://p0",
        )  # fmt: skip
        state = MemberState(member=member, health=Health.ALIVE, load=load, takes_work=True, last_beat_s=0.0)
        cluster = ClusterState(conductor=Incarnation("c0"), revision=1, members=(state,))
        return StatusReport(
            cluster=cluster, healthy=True, reasons=(), indexed_blocks={}, placed_total=0, rejected_total=0, uptime_s=1.0
        )


@pytest.mark.parametrize(("longest", "measured_lengths"), [(64, [32] * 3 + [64] * 3), (8, [])])
def test_prompts_that_the_mesh_refuses_are_left_out(longest: int, measured_lengths: list[int]) -> None:
    mesh = SelectiveMesh(longest)
    made = Measurement(cast(MooncakeClient, mesh), cast(RpcClient, mesh), model=None)
    told: list[str] = []
    asyncio.run(made.run(Plan(prompt_tokens=(32, 64, 128), batches=(), repeats=1), told.append))
    assert [sample.uncached_tokens for sample in made.samples["default"].prefills] == measured_lengths
    refused = 1 if measured_lengths else 4  # the warm-up and all three lengths
    assert sum("left out" in line and "ttft_objective" in line for line in told) == refused
