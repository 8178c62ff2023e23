"""Overload on a live mesh: who is decoded, who waits for it, who is refused, and that nothing is left behind.

Two decode instances that take 60 ms for each sequence of a step. Two sequences each keep within the objective of
150 ms, three do not.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mooncake_proto.control import Role
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

COST = {
    "format": "mooncake-mesh/cost/1",
    "prefill_base_s": 0.001,
    "prefill_token_s": 0.00001,
    "prefill_pair_s": 0.0,
    "cached_token_s": 0.0,
    "step_base_s": 0.0,
    "step_sequence_s": 0.06,
    "step_context_token_s": 0.0,
    "transfer_base_s": 0.001,
    "transfer_byte_s": 1e-9,
}
LONG = 400
"""Tokens of a stream that does not end while a test looks."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    profile = tmp_path_factory.mktemp("cost") / "cost.json"
    profile.write_text(json.dumps(COST))
    flags = {
        "conductor": ["--tbt-slo-s=0.15", "--ttft-slo-s=20", "--wip-limit=100", f"--cost-profile={profile}"],
        "decode": ["--fake-decode-s-per-slot=0.06"],
    }
    with Mesh(flags=flags, decode_nodes=(1, 1)) as mesh:
        yield mesh


def admitting(mesh: Mesh, admission: str) -> Mesh:
    """*mesh*, idle, with a conductor of that strategy."""
    mesh.wait_idle()
    mesh.restart("conductor", f"--admission={admission}")
    mesh.wait_healthy()
    return mesh


def stream(mesh: Mesh, n: int, max_tokens: int = LONG) -> Stream:
    return Stream(mesh.http, f"prompt number {n} of those that fill the mesh", max_tokens)


def running(mesh: Mesh, n: int) -> None:
    """Wait until the conductor has heard that *n* sequences are decoded, and that nobody waits."""

    def look() -> bool | None:
        loads = [s.load for s in mesh.status().cluster.members if s.member.role is Role.DECODE]
        return (sum(load.running_jobs for load in loads) == n and not sum(load.queued_jobs for load in loads)) or None

    mesh.wait(look, what=f"{n} sequences to be decoded")


def fill(mesh: Mesh, stack: ExitStack, n: int = 4) -> list[Stream]:
    """*n* streams under way, one after the other, so that each decode instance gets every second one."""
    streams = []
    for i in range(n):
        streams.append(stack.enter_context(stream(mesh, i)))
        streams[-1].wait_chunks(1)
        running(mesh, i + 1)
    return streams


def test_baseline_refuses_at_decode_what_would_make_steps_too_long(mesh: Mesh) -> None:
    admitting(mesh, "baseline")
    with ExitStack() as stack:
        streams = fill(mesh, stack)
        answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields("one too many", 5))
        assert answer.status == 429, answer.body
        assert answer.headers["x-mooncake-reject-reason"] == "tbt_objective_at_decode"
        assert int(answer.headers["retry-after"]) >= 1
        assert mesh.find_log("prefill0", "prefill_sent") is not None, "its prompt was computed"
        with stream(mesh, 9) as refused:
            refused.wait_over()
        assert (refused.status, refused.chunks) == (429, 0), "nothing of it was shown"
        assert not any(other.is_over for other in streams)
    mesh.wait_idle()
    assert clients.complete(mesh.http, "now there is room", 5) == clients.expected_text("now there is room", 5)


def test_hold_keeps_first_tokens_back_until_there_is_a_place(mesh: Mesh) -> None:
    admitting(mesh, "hold")
    with ExitStack() as stack:
        streams = fill(mesh, stack)
        held = [stack.enter_context(stream(mesh, 10 + i, 4)) for i in range(2)]

        def both_computed() -> bool | None:
            loads = [s.load for s in mesh.status().cluster.members if s.member.role is Role.DECODE]
            prefills = [s.load.running_jobs for s in mesh.status().cluster.members if s.member.role is Role.PREFILL]
            return (sum(load.queued_jobs for load in loads) == 2 and not sum(prefills)) or None

        mesh.wait(both_computed, what="two computed prompts to be held")
        assert [one.chunks for one in held] == [0, 0]
        streams[0].disconnect()
        streams[1].disconnect()  # a place on each instance
        texts = [one.result() for one in held]
        assert texts == [clients.expected_text(one.prompt, 4) for one in held]
    mesh.wait_idle()


def test_a_held_request_can_be_cancelled_and_a_lost_worker_changes_no_text(mesh: Mesh) -> None:
    admitting(mesh, "hold")
    with ExitStack() as stack:
        streams = fill(mesh, stack)
        with stream(mesh, 20, 4) as leaves:
            mesh.wait(lambda: _held(mesh) == 1 or None, what="a prompt to be held")
            leaves.disconnect()
        mesh.wait(lambda: _held(mesh) == 0 or None, what="the cancelled one to be gone")
        with stream(mesh, 21, 4) as stays:
            mesh.wait(lambda: _held(mesh) == 1 or None, what="a prompt to be held")
            where = next(s.member.instance_id for s in mesh.status().cluster.members if _holds(s.member.role, s.load))
            mesh.kill(where)
            mesh.start(where)  # its streams go on elsewhere, and the held one starts anew
            for other in streams:
                other.disconnect()
            assert stays.result() == clients.expected_text(stays.prompt, 4)
    mesh.wait_healthy()
    mesh.wait_idle()


def test_a_request_that_is_held_too_long_is_refused(mesh: Mesh) -> None:
    mesh.wait_idle()
    mesh.restart("conductor", "--admission=hold", "--ttft-slo-s=3", "--decode-s=0.1")
    mesh.wait_healthy()
    with ExitStack() as stack:
        streams = fill(mesh, stack)
        answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields("held in vain", 5))
        assert answer.status == 429, answer.body
        assert answer.headers["x-mooncake-reject-reason"] == "ttft_objective_at_decode"
        assert not any(other.is_over for other in streams)
    mesh.wait_idle()


def _holds(role: Role, load: object) -> bool:
    return role is Role.DECODE and bool(getattr(load, "queued_jobs", 0))


def _held(mesh: Mesh) -> int:
    """Jobs at decode instances that are not decoded yet, while nothing is computed any more."""
    members = mesh.status().cluster.members
    if any(s.load.running_jobs for s in members if s.member.role is Role.PREFILL):
        return -1
    return sum(s.load.queued_jobs for s in members if s.member.role is Role.DECODE)
