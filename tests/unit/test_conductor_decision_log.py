"""What a conductor remembers of its decisions: the estimates of that moment, what tipped it, and no more than a few."""

import pytest

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.conductor.decision_log import MAX_CANDIDATES, MAX_DECISIONS
from mooncake_mesh.config_scheduling import AdmissionKind, PlacementKind
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.placement import Scheduling
from mooncake_proto.control import Load
from mooncake_proto.decisions import Decision, DecisionsQuery
from mooncake_proto.ids import Incarnation, JobId, NodeId
from mooncake_proto.kvcache import KvSnapshot
from mooncake_proto.serving import Schedule
from tests.unit.conductor_trace import LIFE
from tests.unit.test_conductor_decisions import KEYS, ask, beat, mesh, placed

HERE = Incarnation("conductor")


def decisions(core: ConductorCore, *, after: int = 0, now_s: float = 2.0) -> tuple[Decision, ...]:
    report = core.decisions.report(DecisionsQuery(after=after), HERE, now_s)
    assert report.conductor == HERE
    return report.decisions


def holds(core: ConductorCore, node: str, blocks: int) -> None:
    core.kv_snapshot(KvSnapshot(node_id=NodeId(node), incarnation=LIFE, seq=1, keys=join_keys(KEYS[:blocks])))


def test_a_placement_tells_the_candidates_as_it_saw_them() -> None:
    core = mesh("p0", "p1", "d0")
    holds(core, "n1", 5)
    answer = placed(core, 1.0, keys=9)
    placed(core, 1.0, keys=9)
    first, second = decisions(core)
    assert (first.number, first.age_s, first.prefill, first.decode, first.reason) == (1, 1.0, "p1", "d0", "")
    assert first.ttft_est_s == answer.ttft_est_s == first.prefill_candidates[0].ttft_s
    assert [(one.instance_id, one.prefix_blocks, one.copy_from) for one in first.prefill_candidates] == [
        ("p1", 5, None),
        ("p0", 5, "n1"),
    ]
    assert [(one.instance_id, one.waiting_jobs) for one in first.decode_candidates] == [("d0", 0)]
    assert first.cached_tokens == 20
    assert "sooner than on p0" in first.why
    assert "20 of 40 tokens are on its node" in first.why
    assert second.prefill == "p0"  # the queue of the first one counts
    assert second.decode_candidates[0].waiting_jobs == 1
    assert "come from n1" in second.why


def test_what_happens_later_does_not_change_a_decision() -> None:
    core = mesh("p0", "p1", "d0")
    placed(core, 1.0)
    before = decisions(core)
    holds(core, "n0", 5)
    beat(core, "p0", Load(queued_jobs=1, queued_tokens=400, queued_prompts=((400, 0),)), 1.5)
    assert decisions(core) == before


def test_a_refusal_tells_why() -> None:
    core = mesh("p0", "d0", blocks=5_000)
    ask(core, 1.0, tokens=10_001)  # computed in 100.01 s
    (refused,) = decisions(core)
    assert (refused.prefill, refused.decode, refused.reason) == ("", "", "ttft_objective")
    assert refused.why == "soonest first token in 100.01 s on p0, the objective is 100 s"
    assert (refused.n_prefill, refused.n_decode, refused.cached_tokens, refused.ttft_est_s) == (1, 1, 0, 0.0)


def test_a_refusal_for_a_step_names_the_shortest() -> None:
    core = mesh("p0", "d0", tbt_s=0.015, scheduling=Scheduling(admission=Admission(kind=AdmissionKind.EARLY)))
    ask(core, 1.0)
    (refused,) = decisions(core)
    assert refused.why == "shortest decode step 20 ms on d0, the objective is 15 ms"


@pytest.mark.parametrize(
    ("nodes", "model", "reason", "why"),
    [
        (("d0",), "m", "no_prefill_instance", "no prefill instance takes work"),
        ((), "m", "no_worker", "no instance serves this model"),
        (("p0", "d0"), "other", "no_worker", "no instance serves this model"),
    ],
)
def test_a_refusal_for_lack_of_anybody(nodes: tuple[str, ...], model: str, reason: str, why: str) -> None:
    core = mesh(*nodes)
    core.schedule(Schedule(job_id=JobId("r"), model=model, prompt_tokens=4, max_new_tokens=1, keys=b""), 1.0)
    (refused,) = decisions(core)
    assert (refused.reason, refused.why, refused.prefill_candidates) == (reason, why, ())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (PlacementKind.RANDOM, "drawn at random of 2"),
        (PlacementKind.LOAD_BALANCE, "fewest accepted prompts of 2"),
        (PlacementKind.ADAPTIVE, "as soon as on p0, drawn"),
    ],
)
def test_the_policy_is_what_tips_it(kind: PlacementKind, why: str) -> None:
    core = mesh("p0", "p1", "d0", scheduling=Scheduling(placement=kind))
    placed(core, 1.0)
    assert decisions(core)[0].why.startswith(why)


def test_only_what_is_new_is_told_and_all_to_whoever_knows_an_older_life() -> None:
    core = mesh("p0", "d0")
    for _ in range(3):
        ask(core, 1.0)
    assert [one.number for one in decisions(core, after=2)] == [3]
    assert decisions(core, after=3) == ()
    assert [one.number for one in decisions(core, after=4)] == [1, 2, 3]


def test_old_ones_and_the_worst_candidates_are_forgotten() -> None:
    core = mesh(*(f"p{number}" for number in range(9)), "d0")
    for _ in range(MAX_DECISIONS + 5):
        ask(core, 1.0)
    known = decisions(core)
    assert [one.number for one in known] == list(range(6, MAX_DECISIONS + 6))
    assert known[0].n_prefill == 9
    assert len(known[0].prefill_candidates) == MAX_CANDIDATES
