"""The KV that decode reads is what crossed the wire: a relay between the messengers damages, delays and cuts it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.mesh import clients
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
    before = relay.frames
    assert clients.complete(mesh.http, "relayed: " + PROMPT, TOKENS) == clients.expected_text(
        "relayed: " + PROMPT, TOKENS
    )
    assert relay.frames > before
    assert mesh.wait_log("prefill0", "prefill_sent")["transport"] == "tcp"


def test_a_damaged_slice_is_found_and_the_request_ends_right(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    prompt = "damaged: " + PROMPT
    relay.damage_frame(after=2)
    assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    assert relay.damaged == 1
    found = [event for name in ("messenger0", "messenger1") for event in mesh.logs(name)]
    assert "checksum_mismatch" in {event.get("code") for event in found}
    mesh.wait_idle()


def test_a_cut_connection_is_made_again_and_the_request_ends_right(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    prompt = "cut: " + PROMPT
    relay.cut_frame(after=2)
    assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    assert relay.cuts == 1
    mesh.wait_idle()


def test_slices_arrive_while_prefill_computes_also_over_a_slow_path(checked: tuple[Mesh, Relay]) -> None:
    mesh, relay = checked
    prompt = "delayed: " + PROMPT
    relay.delay_s = 0.02
    try:
        assert clients.complete(mesh.http, prompt, TOKENS) == clients.expected_text(prompt, TOKENS)
    finally:
        relay.delay_s = 0.0
    sent = [event for event in mesh.logs("prefill0") if event["event"] == "prefill_sent"][-1]
    assert sent["overlapped_bytes"] > 0
    assert sent["sent_bytes"] > sent["overlapped_bytes"]


def test_without_checksums_a_damaged_slice_changes_the_output() -> None:
    """So the decode instance read what was moved, and nothing else."""
    with _relayed("none") as (mesh, relay):
        assert clients.complete(mesh.http, "whole: " + PROMPT, TOKENS) == clients.expected_text(
            "whole: " + PROMPT, TOKENS
        )
        relay.damage_frame()
        damaged = clients.complete(mesh.http, "damaged: " + PROMPT, TOKENS)
        assert relay.damaged == 1
    expected = clients.expected_text("damaged: " + PROMPT, TOKENS)
    assert damaged[0] == expected[0]  # prefill drew the first token from its own blocks
    assert damaged[1:] != expected[1:]
