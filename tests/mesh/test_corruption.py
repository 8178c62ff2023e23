"""The KV that decode reads is what crossed the wire: a relay between the messengers damages, holds and cuts it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh
from tests.mesh.relay import Relay

pytestmark = pytest.mark.mesh

SLOW_PREFILL = ["--fake-prefill-s-per-token=0.002", "--chunk-tokens=64"]
PROMPT = "a prompt of some blocks, so that there is KV to move between the nodes; " * 4
TOKENS = 30


@contextmanager
def _relayed(checksum: str) -> Iterator[tuple[Mesh, Relay]]:
    """A mesh whose KV goes from node0 to node1 through a relay."""
    with Relay() as relay:
        flags = {
            "messenger": ["--transport=tcp", f"--checksum={checksum}"],
            "messenger1": ["--transport=tcp", f"--advertise-data={relay.address}"],
            "prefill": SLOW_PREFILL,
        }
        with Mesh(flags=flags) as mesh:
            relay.target = lambda: int(mesh.wait_log("messenger1", "arena_cut")["data_port"])
            yield mesh, relay


@pytest.fixture(scope="module")
def checked() -> Iterator[tuple[Mesh, Relay]]:
    with _relayed("xxh3") as pair:
        yield pair


def test_the_advertised_address_is_used(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    before = relay.slices
    assert clients.complete(mesh.http, "relayed: " + PROMPT, TOKENS) == clients.expected_text(
        "relayed: " + PROMPT, TOKENS
    )
    assert relay.slices > before
    assert mesh.wait_log("prefill0", "prefill_sent")["transport"] == "tcp"


def test_a_damaged_slice_is_found_and_the_request_ends_right(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    prompt = "damaged: " + PROMPT
    relay.damage(after=8)
    assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    assert relay.damaged == 1
    found = [event for name in ("messenger0", "messenger1") for event in mesh.logs(name)]
    assert "checksum_mismatch" in {event.get("code") for event in found}
    mesh.wait_idle()


def test_a_cut_connection_is_made_again_and_the_request_ends_right(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    prompt = "cut: " + PROMPT
    relay.cut(after=8)
    assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    assert relay.cuts == 1
    mesh.wait_idle()


def _sent(mesh: Mesh) -> list[dict[str, Any]]:
    return [event for event in mesh.logs("prefill0") if event["event"] == "prefill_sent"]


def _landed_bytes(mesh: Mesh) -> int:
    """What messenger0 has sent and knows to be there, as it last told."""
    return next(s.load.transferred_bytes for s in mesh.status().cluster.members if s.member.instance_id == "messenger0")


def test_slices_arrive_while_prefill_computes_and_what_comes_late_is_waited_for(checked: tuple[Mesh, Relay]) -> None:
    """Some have landed while it computes; the others stay in the relay until it has drawn a token."""
    mesh, relay = checked
    mesh.wait_idle()
    prompt = "held up: " + PROMPT * 8
    known, landed = len(_sent(mesh)), _landed_bytes(mesh)
    with Stream(mesh.http, prompt, TOKENS) as stream:
        mesh.wait(lambda: _landed_bytes(mesh) > landed or None, what="the first slices to land")
        relay.passing.clear()
        assert stream.chunks == 0, "its prompt is still being computed"
        stream.wait_chunks(1)
        relay.passing.set()
        assert stream.result() == clients.expected_text(prompt, TOKENS)
    sent = mesh.wait(lambda: next(iter(_sent(mesh)[known:]), None), what="the end of the transfer")
    assert 0 < sent["overlapped_bytes"] < sent["sent_bytes"]


def test_without_checksums_a_damaged_slice_changes_the_output() -> None:
    """So the decode instance read what was moved, and nothing else."""
    with _relayed("none") as (mesh, relay):
        assert clients.complete(mesh.http, "whole: " + PROMPT, TOKENS) == clients.expected_text(
            "whole: " + PROMPT, TOKENS
        )
        relay.damage()
        damaged = clients.complete(mesh.http, "damaged: " + PROMPT, TOKENS)
        assert relay.damaged == 1
    expected = clients.expected_text("damaged: " + PROMPT, TOKENS)
    assert damaged[0] == expected[0]  # prefill drew the first token from its own blocks
    assert damaged[1:] != expected[1:]
