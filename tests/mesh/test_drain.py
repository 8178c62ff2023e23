"""Workers taken out of service while requests run: none of these fails, or even has to begin again."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mooncake_proto.control import Drain, MemberState, Ok, Stop
from mooncake_proto.ids import Incarnation
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

TOKENS = 30
FLAGS = {
    "prefill": ["--fake-prefill-s-base=0.02"],
    "decode": ["--fake-decode-s-base=0.01"],
    "conductor": ["--replication-share=0"],
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(prefill_nodes=(0, 1), decode_nodes=(2, 2), flags=FLAGS) as mesh:
        yield mesh


def _drain(mesh: Mesh, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mooncake_mesh", "drain", *words, f"--conductor={mesh.conductor}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


@contextmanager
def _requests(mesh: Mesh) -> Iterator[list[str]]:
    """Streams one after the other, two at a time, until the block ends; what is wrong with any."""
    over = threading.Event()
    wrong: list[str] = []
    done: list[str] = []

    def work(worker: int) -> None:
        while not over.is_set():
            prompt = f"request {len(done)} of {worker}"
            try:
                with Stream(mesh.http, prompt, TOKENS) as stream:
                    assert stream.result() == clients.expected_text(prompt, TOKENS)
            except AssertionError as error:
                wrong.append(f"{prompt}: {error}")
            done.append(prompt)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert len(done) > 4


def test_a_rolling_restart_of_all_workers_fails_no_request(mesh: Mesh) -> None:
    with _requests(mesh) as wrong:
        for name in ("prefill0", "decode0", "prefill1", "decode1"):
            life = mesh.incarnation(name)
            said = _drain(mesh, name, "--stop")
            assert said.returncode == 0, said.stderr
            assert said.stdout.splitlines()[-1] == f"{name}: gone"
            assert mesh.exit_code(name) == 0
            mesh.start(name)
            mesh.wait_healthy()
            assert mesh.incarnation(name) != life
    assert wrong == []
    assert mesh.find_log("gateway0", "request_failed") is None
    mesh.wait_idle()


def test_a_drained_node_serves_its_kv_until_it_is_gone(mesh: Mesh) -> None:
    """What it computed is not computed anew elsewhere."""
    prompt = "whole blocks that were computed on a node which is then drained " * 4
    mesh.wait_idle()
    known = mesh.status().indexed_blocks
    clients.complete(mesh.http, prompt, 1)
    first = [event["prefill"] for event in mesh.logs("conductor") if event["event"] == "request_placed"][-1]
    node, other = ("node0", "messenger1") if first == "prefill0" else ("node1", "messenger0")
    source = f"messenger{node[-1]}"
    n_blocks = known[node] + len(prompt) // 16
    mesh.wait(lambda: mesh.status().indexed_blocks[node] >= n_blocks or None, what="its blocks to be indexed")

    said = _drain(mesh, node)
    assert (said.returncode, said.stdout.splitlines()[-1]) == (0, f"{first}: drained, serving KV"), said.stderr
    assert not _state(mesh, first).takes_work
    assert clients.complete(mesh.http, prompt + "and on", 20) == clients.expected_text(prompt + "and on", 20)
    mesh.wait_log(other, "prefix_fetched", source=mesh.endpoint(source))

    said = _drain(mesh, node, "--stop")
    assert [line for line in said.stdout.splitlines() if not line.endswith(": active")] == [
        f"{first}: drained, serving KV",
        f"{first}: gone",
        f"{source}: gone",
    ]
    assert (mesh.exit_code(first), mesh.exit_code(source)) == (0, 0)
    assert clients.complete(mesh.http, "who is left", 10) == clients.expected_text("who is left", 10)
    for name in (source, first):
        mesh.start(name)
    mesh.wait_healthy()
    mesh.wait_idle()


def test_the_last_of_a_role_is_drained_by_force_only(mesh: Mesh) -> None:
    said = _drain(mesh, "node2")  # both decode instances
    assert said.returncode == 2
    assert "nobody else takes the work of decode0 (decode), decode1 (decode)" in said.stderr
    assert all(_state(mesh, name).takes_work for name in ("decode0", "decode1"))

    assert _drain(mesh, "node2", "--force").returncode == 0
    assert not any(_state(mesh, name).takes_work for name in ("decode0", "decode1"))
    for name in ("decode0", "decode1"):
        mesh.restart(name)
    mesh.wait_healthy()


def test_an_order_for_a_former_life_is_refused(mesh: Mesh) -> None:
    for name, order in (("prefill0", Drain), ("decode0", Stop), ("messenger0", Stop)):
        failure = clients.refused(mesh.endpoint(name), order(incarnation=Incarnation("0" * 16)))
        assert failure.code == "another_incarnation"
    clients.ask(mesh.endpoint("decode0"), Drain(incarnation=mesh.incarnation("decode0")), Ok)
    mesh.wait(lambda: _state(mesh, "decode0").load.draining or None, what="decode0 to drain")
    mesh.restart("decode0")
    mesh.wait_healthy()


@pytest.mark.parametrize("words", [["nobody"], ["messenger0"]])
def test_an_unknown_name_drains_nobody(mesh: Mesh, words: list[str]) -> None:
    said = _drain(mesh, *words)
    assert said.returncode == 2
    assert "is no prefill or decode instance" in said.stderr
    assert all(_state(mesh, name).takes_work for name in ("prefill0", "decode1"))


def _state(mesh: Mesh, name: str) -> MemberState:
    return next(state for state in mesh.status().cluster.members if state.member.instance_id == name)
