"""Instances that change between prefill and decode, on a live mesh: requests go on meanwhile, and whatever dies."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mooncake_proto.control import Role
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

COST = {
    "prefill_base_s": 0.001,
    "prefill_token_s": 0.002,
    "prefill_pair_s": 0.0,
    "cached_token_s": 0.0,
    "step_base_s": 0.04,
    "step_sequence_s": 0.005,
    "step_context_token_s": 0.0,
    "transfer_base_s": 0.001,
    "transfer_byte_s": 1e-9,
}
"""As the fake engines are told to be. Twenty sequences a step are within the objective; half as many, where steps take
half as long again on a busy machine."""

WORKER = [
    "--switchable",
    "--fake-prefill-s-base=0",
    "--fake-prefill-s-per-token=0.002",
    "--fake-decode-s-base=0.04",
    "--fake-decode-s-per-slot=0.005",
]
WORKERS = ("prefill0", "prefill1", "decode0")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    profile = tmp_path_factory.mktemp("cost") / "cost.json"
    profile.write_text(json.dumps({"format": "mooncake-mesh/cost/2", "kinds": {"default": COST}}))
    # Not `hold`: it counts tokens, and prompts of the second test are many times as long as those of the first.
    slo = ["--tbt-slo-s=0.15", "--admission=baseline", f"--cost-profile={profile}"]
    flags = {
        "conductor": ["--switch-roles", "--switch-roles-after-s=1", *slo],
        "prefill": WORKER,
        "decode": WORKER,
    }
    with Mesh(flags=flags, prefill_nodes=(0, 1), decode_nodes=(2,)) as mesh:
        yield mesh


def roles(mesh: Mesh) -> dict[str, Role]:
    """Of the workers that take work."""
    return {
        str(state.member.instance_id): state.member.role
        for state in mesh.status().cluster.members
        if state.member.instance_id in WORKERS and state.takes_work
    }


def wait_roles(mesh: Mesh, prefill: int, decode: int) -> dict[str, Role]:
    def look() -> dict[str, Role] | None:
        found = roles(mesh)
        counts = [list(found.values()).count(role) for role in (Role.PREFILL, Role.DECODE)]
        return found if counts == [prefill, decode] else None

    return mesh.wait(look, timeout_s=30.0, what=f"{prefill}P{decode}D", tell=lambda: roles(mesh))


def orders(mesh: Mesh) -> list[dict[str, Any]]:
    return [event for event in mesh.logs("conductor") if event["event"] == "role_switch"]


def checked(streams: list[Stream]) -> None:
    for stream in streams:
        assert stream.result() == clients.expected_text(stream.prompt, stream.max_tokens)


def decode_much(mesh: Mesh, open_streams: ExitStack) -> list[Stream]:
    """Streams that two decode instances have enough to do with."""
    return [open_streams.enter_context(Stream(mesh.http, f"decode much {i}", 60)) for i in range(13)]


def test_the_pool_that_is_short_gets_an_instance_and_no_request_notices(mesh: Mesh) -> None:
    with ExitStack() as open_streams:
        streams = decode_much(mesh, open_streams)
        [order] = mesh.wait(lambda: orders(mesh) or None, timeout_s=20.0, what="an order to switch")
        assert order["to"] == "decode"
        assert (order["prefill"], order["decode"]) == (2, 1)
        assert order["decode_demand"] > 0.6 > order["prefill_demand"]
        found = wait_roles(mesh, 1, 2)
        assert found[order["instance_id"]] is Role.DECODE
        assert mesh.wait_log(order["instance_id"], "role_switch_begun", to="decode")
        streams.append(open_streams.enter_context(Stream(mesh.http, "one more", 40)))
        checked(streams)
    assert mesh.wait_log(order["instance_id"], "kv_landed"), "the one more was decoded by it"


def test_it_goes_back_and_one_that_is_killed_on_the_way_is_not_missed(mesh: Mesh) -> None:
    if not orders(mesh):  # of this mesh it is the first test
        with ExitStack() as open_streams:
            streams = decode_much(mesh, open_streams)
            wait_roles(mesh, 1, 2)
            checked(streams)
    before = len(orders(mesh))
    with ExitStack() as open_streams:
        long = [open_streams.enter_context(Stream(mesh.http, f"long answer {i}", 250)) for i in range(2)]
        for stream in long:
            stream.wait_chunks(1)
        short: list[Stream] = []

        def ordered() -> dict[str, Any] | None:
            """Three long prompts at a time, one after the other, until there is an order."""
            if sum(not stream.is_over for stream in short) < 3:
                prompt = f"{len(short)} {'many words of a long prompt ' * 25}"
                short.append(open_streams.enter_context(Stream(mesh.http, prompt, 2)))
            return next(iter(orders(mesh)[before:]), None)

        order = mesh.wait(ordered, timeout_s=30.0, what="an order to switch", tell=lambda: len(short))
        assert order["to"] == "prefill"
        name = order["instance_id"]
        mesh.wait_log(name, "role_switch_begun", to="prefill")
        mesh.kill(name)
        checked([*short, *long])
    mesh.start(name)
    mesh.wait_healthy()
    text = clients.complete(mesh.http, "and all is well", 20)
    assert text == clients.expected_text("and all is well", 20)
