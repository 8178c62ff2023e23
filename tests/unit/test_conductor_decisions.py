"""What a conductor makes of reports and of its own placements between them, and that it decides the same every time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_mesh.conductor.core import ConductorCore
from mooncake_mesh.config_scheduling import AdmissionKind, HybridDecodeKind
from mooncake_mesh.kv.block_hash import join_keys
from mooncake_mesh.kv.prefix_index import PrefixIndex
from mooncake_mesh.mesh.peers import PeerTable
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.cost_model import KindFactors, LinearCost
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.views import Objectives
from mooncake_proto.control import Load, Member, Role
from mooncake_proto.ids import BlockKey, Incarnation, InstanceId, JobId, NodeId
from mooncake_proto.kvcache import KvSnapshot
from mooncake_proto.serving import GateKind, Placement, Rejected, Schedule
from tests.unit.conductor_trace import CARD, LIFE, REQUESTS, all_policies, recorded, replayed

KEYS = [BlockKey(bytes([i]) * 16) for i in range(1, 51)]
COST = LinearCost(
    prefill_base_s=0.0,
    prefill_token_s=0.01,
    cached_token_s=0.0,
    step_base_s=0.01,
    step_sequence_s=0.01,
    step_context_token_s=0.0,
    transfer_base_s=0.0,
    transfer_bytes_per_s=1e5,  # a block of 4 tokens in 0.01 s, computed in 0.04 s
)


def mesh(
    *nodes: str,
    blocks: int = 1_000,
    scheduling: Scheduling | None = None,
    tbt_s: float = 10.0,
    kinds: dict[str, KindFactors] | None = None,
    kind_of: dict[str, str] | None = None,
) -> ConductorCore:
    """Each node is written as the workers on it: "p0", "d0" or "p0 d0"."""
    core = ConductorCore(
        incarnation=Incarnation("conductor"),
        peers=PeerTable(suspect_after_s=1e3, dead_after_s=2e3, forget_after_s=3e3),
        index=PrefixIndex(max_entries=1_000),
        cost=COST,
        objectives=Objectives(ttft_s=100.0, tbt_s=tbt_s),
        started_s=0.0,
        scheduling=scheduling or Scheduling(),
        kinds=kinds or {},
    )
    for number, workers in enumerate(nodes):
        for name in [f"m{number}", *workers.split()]:
            role = {"m": Role.MESSENGER, "p": Role.PREFILL, "d": Role.DECODE}[name[0]]
            member = Member(
                role=role,
                instance_id=InstanceId(name),
                node_id=NodeId(f"n{number}"),
                incarnation=LIFE,
                endpoint=f"ipc://{name}",
                model=None if role is Role.MESSENGER else CARD,
                kind=(kind_of or {}).get(name, "default"),
            )
            core.register(member, Load(), 0.0)
            beat(core, name, Load(blocks_total=blocks, blocks_free=blocks) if role is Role.MESSENGER else Load(), 0.0)
    return core


def beat(core: ConductorCore, name: str, load: Load, now_s: float) -> None:
    assert core.heartbeat(InstanceId(name), LIFE, load, now_s) is not None


def ask(
    core: ConductorCore, now_s: float, *, tokens: int = 40, keys: int = 0, max_new: int = 16
) -> Placement | Rejected:
    request = Schedule(
        job_id=JobId("r"), model="m", prompt_tokens=tokens, max_new_tokens=max_new, keys=join_keys(KEYS[:keys])
    )
    return core.schedule(request, now_s)


def placed(core: ConductorCore, now_s: float, *, tokens: int = 40, keys: int = 0) -> Placement:
    result = ask(core, now_s, tokens=tokens, keys=keys)
    assert isinstance(result, Placement)
    return result


# --- between two beats ------------------------------------------------------------------------------------------------


def test_a_burst_is_not_promised_the_same_blocks_twice() -> None:
    core = mesh("p0", "d0", blocks=40)  # a request takes 40 / 4 = 10 blocks and wants room for 4 more
    outcomes = [ask(core, 1.0) for _ in range(4)]
    assert [isinstance(outcome, Placement) for outcome in outcomes] == [True, True, True, False]
    assert isinstance(outcomes[3], Rejected)
    assert (outcomes[3].reason, outcomes[3].unavailable) == ("decode_pool_full", False)


def test_promised_blocks_go_to_another_node_and_count_until_a_beat_has_them() -> None:
    core = mesh("p0", "d0", "d1", blocks=40)
    names = [placed(core, 1.0).decode.instance_id for _ in range(6)]
    assert sorted(names) == ["d0", "d0", "d0", "d1", "d1", "d1"]
    assert isinstance(ask(core, 1.0), Rejected)
    room = Load(blocks_total=40, blocks_free=40)
    beat(core, "m1", room, 1.05)
    assert isinstance(ask(core, 1.05), Rejected), "too soon after for the blocks to be in that report"
    beat(core, "m1", room, 1.2)
    assert placed(core, 1.2).decode.instance_id == "d0"


def test_blocks_promised_to_decoding_are_gone_for_a_prefill_instance_on_that_node() -> None:
    core = mesh("p0 d0", blocks=19)
    placed(core, 1.0)
    outcome = ask(core, 1.0)
    assert isinstance(outcome, Rejected)
    assert outcome.reason == "prefill_pool_full"


def test_a_queue_gets_shorter_while_nobody_reports() -> None:
    core = mesh("p0", "d0")
    first, second = placed(core, 1.0), placed(core, 1.0)
    assert [p.ttft_est_s for p in (first, second)] == pytest.approx([0.4, 0.8])
    assert placed(core, 1.7).ttft_est_s == pytest.approx(0.1 + 0.4)


def test_a_reported_queue_is_the_sum_of_its_prompts_less_what_has_been_computed() -> None:
    core = mesh("p0", "d0")
    beat(core, "p0", Load(queued_prompts=((100, 0), (50, 400)), prefill_elapsed_s=0.7), 2.0)
    assert placed(core, 2.0).ttft_est_s == pytest.approx(1.0 - 0.7 + 0.5 + 0.4)


def test_copies_wait_for_each_other_on_the_link_of_their_source() -> None:
    core = mesh("p0", "p1", "p2", "d0")
    core.kv_snapshot(KvSnapshot(node_id=NodeId("n0"), incarnation=LIFE, seq=0, keys=join_keys(KEYS)))
    busy = Load(queued_prompts=((10_000, 0),))
    beat(core, "p0", busy, 1.0)
    first, second = placed(core, 1.0, tokens=201, keys=50), placed(core, 1.0, tokens=201, keys=50)
    assert {p.prefill.instance_id for p in (first, second)} == {"p1", "p2"}
    assert [p.fetch_from for p in (first, second)] == ["ipc://m0", "ipc://m0"]
    assert first.ttft_est_s == pytest.approx(0.5 + 0.01)
    assert second.ttft_est_s == pytest.approx(0.5 + 0.5 + 0.01)


# --- learning ---------------------------------------------------------------------------------------------------------


def test_prefill_estimates_are_corrected_by_what_an_instance_measured() -> None:
    core = mesh("p0", "p1", "d0")
    beat(core, "p0", Load(prefills=2, recent_prefills=((100, 0, 3.0), (100, 50, 3.0))), 1.0)
    got = placed(core, 1.0)
    assert got.prefill.instance_id == "p1", "it is three times as slow as the model says"
    [quality] = core.status(1.0).estimates
    assert (quality.instance_id, quality.samples) == ("p0", 2)
    assert quality.factor == pytest.approx(3.0)
    assert quality.error == pytest.approx(0.5 * (1 - 1 / 3)), "the second one was predicted right"


def test_an_instance_that_looked_slow_and_has_had_nothing_to_do_is_tried_again() -> None:
    core = mesh("p0", "p1", "d0")
    slow = Load(prefills=1, recent_prefills=((100, 0, 3.0),))
    beat(core, "p0", slow, 1.0)
    assert {placed(core, 1.0 + n).prefill.instance_id for n in range(8)} == {"p1"}
    beat(core, "p0", slow, 12.0)
    assert {placed(core, 12.0 + n).prefill.instance_id for n in range(8)} == {"p0", "p1"}


def test_a_sample_that_is_reported_again_is_not_learnt_again() -> None:
    core = mesh("p0", "d0")
    for now_s in (1.0, 2.0, 3.0):
        beat(core, "p0", Load(prefills=1, recent_prefills=((100, 0, 3.0),)), now_s)
    beat(core, "p0", Load(prefills=2, recent_prefills=((100, 0, 3.0), (100, 0, 3.0))), 4.0)
    assert [quality.samples for quality in core.status(5.0).estimates] == [2]


def test_step_estimates_are_corrected_and_a_slow_machine_gets_less() -> None:
    core = mesh("p0", "d0", "d1")
    beat(
        core, "d0", Load(running_jobs=1, running_tokens=10, steps=9, recent_steps=((1, 10, 0.2),)), 1.0
    )  # modelled: 0.02
    beat(core, "d1", Load(running_jobs=4, running_tokens=10, steps=9, recent_steps=((4, 10, 0.05),)), 1.0)
    got = placed(core, 1.0)
    assert got.decode.instance_id == "d1"
    assert got.tbt_est_s == pytest.approx(0.06)


# --- strategies -------------------------------------------------------------------------------------------------------


def test_hold_counts_what_it_placed_itself() -> None:
    hold = Scheduling(admission=Admission(kind=AdmissionKind.HOLD, wip_limit=1.0, decode_s=10.0))
    core = mesh("p0", "d0", blocks=25, scheduling=hold)  # 100 tokens
    assert [isinstance(ask(core, 1.0), Placement) for _ in range(3)] == [True, True, False]
    refused = ask(core, 1.0)
    assert isinstance(refused, Rejected)
    assert (refused.reason, refused.unavailable) == ("kv_in_progress", False)
    assert refused.retry_after_s == pytest.approx(10.0 * 20 / 80)


def test_nobody_is_told_to_come_back_for_what_will_never_fit() -> None:
    for kind in AdmissionKind:
        core = mesh("p0", "d0", blocks=10, scheduling=Scheduling(admission=Admission(kind=kind)))
        outcome = ask(core, 1.0, tokens=100)
        assert isinstance(outcome, Rejected)
        assert (outcome.reason, outcome.unavailable) == ("prefill_pool_too_small", True)


# --- the same every time ----------------------------------------------------------------------------------------------


def test_a_trace_replays_to_the_same_decisions_in_this_process_and_under_any_hash_seed() -> None:
    trace = recorded(REQUESTS)
    once = all_policies(lambda scheduling: replayed(trace, scheduling))
    assert once == all_policies(lambda scheduling: replayed(trace, scheduling))
    assert len({line.split()[0] for line in once}) >= 7, "policies decide differently"
    for seed in ("1", "2"):
        script = Path(__file__).with_name("conductor_trace.py")
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split("\n") == once


def test_copies_are_corrected_by_what_messengers_saw_of_them() -> None:
    core = mesh("p0", "p1 d0")
    held = KvSnapshot(node_id=NodeId("n0"), incarnation=LIFE, seq=0, keys=join_keys(KEYS[:9]))
    core.kv_snapshot(held)
    beat(core, "p0", Load(queued_prompts=((10_000, 0),)), 0.0)  # the holder is busy
    assert placed(core, 0.0, keys=9).fetch_prefix_blocks == 9, "0.09 s to copy what takes 0.36 s to compute"
    slow = Load(blocks_total=1_000, blocks_free=1_000, copies=3, recent_copies=((9_000, 0.9),))  # modelled: 0.09
    beat(core, "m1", slow, 1.0)
    assert placed(core, 2.0, keys=9).fetch_prefix_blocks == 0
    [copies] = [known for known in core.status(2.0).estimates if known.instance_id == "copies"]
    assert copies.factor == pytest.approx(10.0)
    beat(core, "m1", slow, 3.0)
    [again] = [known for known in core.status(3.0).estimates if known.instance_id == "copies"]
    assert again == copies, "a copy is learned from once"


def test_an_instance_of_a_slower_kind_is_taken_for_slower_from_the_start() -> None:
    core = mesh("p0", "p1", "d0", kinds={"old": KindFactors(prefill=3.0)}, kind_of={"p0": "old"})
    assert placed(core, 0.0).prefill.instance_id == "p1"
    beat(core, "p0", Load(prefills=1, recent_prefills=((100, 0, 0.1),)), 1.0)  # a tenth of what is modelled
    assert placed(core, 1.0).prefill.instance_id == "p0", "what is observed wins"


def test_the_urgent_do_not_wait_for_whom_they_overtake() -> None:
    core = mesh("p0", "d0")
    load = Load(queued_prompts=((100, 0), (400, 0), (300, 0)), queued_priorities=(-101, 0, 5))  # 1, 4 and 3 s
    beat(core, "p0", load, 0.0)
    for priority, ttft_s in ((6, 8.4), (5, 8.4), (0, 5.4), (-1, 1.4)):  # 0.4 s is its own
        request = Schedule(
            job_id=JobId("r"), model="m", prompt_tokens=40, max_new_tokens=16, keys=b"", priority=priority
        )
        result = core.schedule(request, 0.0)
        assert isinstance(result, Placement)
        assert result.ttft_est_s == pytest.approx(ttft_s), priority


# --- the decode worker's last word ------------------------------------------------------------------------------------


def test_a_placement_tells_the_decode_worker_by_what_to_decide() -> None:
    gate = placed(mesh("p0", "d0", blocks=50), 0.0).gate
    assert gate is not None
    assert (gate.kind, gate.tbt_s, gate.room_tokens) == (GateKind.CHECK, 10.0, 200)
    holding = Scheduling(admission=Admission(kind=AdmissionKind.HOLD))
    held = placed(mesh("p0", "d0", scheduling=holding), 0.0).gate
    assert held is not None
    assert held.kind is GateKind.HOLD


@pytest.mark.parametrize(("jobs", "answer"), [(7, "d1"), (8, "tbt_objective")])
def test_refused_by_one_it_is_placed_only_where_there_is_a_place_now(jobs: int, answer: str) -> None:
    """A step with nine sequences takes 0.1 s, which is the objective."""
    core = mesh("p0", "d0", "d1", tbt_s=0.09, scheduling=Scheduling(admission=Admission(kind=AdmissionKind.BASELINE)))
    busy = Load(running_jobs=jobs, running_tokens=10 * jobs, step_s=COST.decode_step_s(jobs, 10 * jobs))
    beat(core, "d1", busy, 0.0)
    request = Schedule(
        job_id=JobId("r"),
        model="m",
        prompt_tokens=40,
        max_new_tokens=16,
        keys=b"",
        refused_by=(InstanceId("d0"),),
    )
    result = core.schedule(request, 0.0)
    assert (result.decode.instance_id if isinstance(result, Placement) else result.reason) == answer


# --- prompts that decode instances compute ----------------------------------------------------------------------------


def test_a_prompt_placed_on_a_decode_instance_counts_there_until_it_reports_it() -> None:
    core = mesh("p0", "d0", "d1", scheduling=Scheduling(hybrid_decode=HybridDecodeKind.AUTO))
    beat(core, "p0", Load(queued_prompts=((200, 0),)), 1.0)  # 2 s from now on
    spots = [placed(core, 1.0).prefill.instance_id for _ in range(12)]
    assert spots[:4] == ["d0", "d1", "d0", "d1"], "0.4 s each"
    assert 8 <= spots.index(InstanceId("p0")) <= 10, "by then it is sooner there"
    for name in ("d0", "d1"):
        beat(core, name, Load(queued_prompts=((10, 30),)), 1.2)
    assert placed(core, 1.2).inline_step is not None, "it is sooner there again"


def test_a_prompt_is_one_waiting_job_of_the_instance_that_does_both() -> None:
    core = mesh("p0", "d0", scheduling=Scheduling(hybrid_decode=HybridDecodeKind.AUTO))
    beat(core, "p0", Load(queued_prompts=((2000, 0),)), 1.0)
    assert placed(core, 1.0).prefill_est_s == pytest.approx(0.4)
    [view] = core._roster.cluster("m", (), 1.0).decode
    assert (view.waiting_jobs, view.waiting_tokens, view.busy_until_s) == (1, 40, pytest.approx(1.4))
