"""Simulated instances change their role under the conductor's own rule, and nothing is lost by it."""

from dataclasses import replace

from bench.simulator import MeshSetup, simulate
from bench.simulator_results import RunResult
from bench.traces import TraceRequest
from mooncake_mesh.config_scheduling import AdmissionKind
from mooncake_mesh.policy.admission import Admission
from mooncake_mesh.policy.placement import Scheduling
from mooncake_mesh.policy.roles import RoleRules
from mooncake_mesh.policy.views import Objectives
from tests.unit.test_simulator_mesh import BLOCK, kind_of_node, request

RULES = RoleRules(memory_s=5.0, sustained_s=4.0, rest_s=20.0)


def setup(rules: RoleRules | None) -> MeshSetup:
    """Steps grow with their KV, so that some instances are not enough."""
    return MeshSetup(
        prefill=4,
        decode=2,
        kind=kind_of_node(step_context_token_s=1e-5, vram_kv_tokens=20_480, dram_kv_tokens=20_480),
        objectives=Objectives(ttft_s=20.0, tbt_s=0.05),
        scheduling=Scheduling(admission=Admission(kind=AdmissionKind.BASELINE), roles=rules),
        block_tokens=BLOCK,
        switch_s=1.0,
    )


def shifting() -> list[TraceRequest]:
    """Long prompts with short answers, then short prompts with long answers."""
    prompts = [request(i * 0.4, 1000, 8, prefix=chr(97 + i % 26)) for i in range(50)]
    answers = [request(20.0 + i * 0.2, 64, 300, prefix=chr(65 + i % 26)) for i in range(300)]
    return prompts + answers


def served(result: RunResult) -> float:
    return result.token_share(20.0, 0.05)


def test_a_mix_that_shifts_is_followed() -> None:
    static, dynamic = simulate(shifting(), setup(None)), simulate(shifting(), setup(RULES))
    assert static.switched == 0
    assert dynamic.switched >= 1
    assert served(dynamic) > served(static) + 0.05
    assert all(record.is_whole or record.refused for record in dynamic.records)


def test_equal_arguments_give_equal_runs_with_roles_that_change() -> None:
    work = shifting()[:200]
    runs = [simulate(work, setup(RULES)) for _ in range(2)]
    assert runs[0].switched == runs[1].switched >= 1
    assert runs[0].digest_rows() == runs[1].digest_rows()


def test_rules_that_never_have_cause_change_nothing() -> None:
    calm = [request(i * 2.0, 100, 4) for i in range(20)]
    never = replace(setup(RULES), prefill_blocks=1280, decode_blocks=1280)
    assert (
        simulate(calm, never).digest_rows()
        == simulate(calm, replace(setup(None), prefill_blocks=1280, decode_blocks=1280)).digest_rows()
    )
