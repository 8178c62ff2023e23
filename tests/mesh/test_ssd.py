"""Blocks that left the arena are found again, also after a kill -9. What a broken disk costs is never the text."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_mesh.engine.fake import FakeConfig
from mooncake_mesh.gateway.tokenizer import ByteTokenizer, SpecialTokens
from mooncake_mesh.kv.block_hash import chain, join_keys, key_root, token_bytes
from mooncake_mesh.kv.layout import KvDtype, KvLayout
from mooncake_mesh.messenger.store.records import PAGE_BYTES, RECORD_BYTES, Namespace, unpack_record
from mooncake_proto import codec
from mooncake_proto.control import Load, Ping
from mooncake_proto.envelope import Envelope
from mooncake_proto.ids import BlockKey, MessageId
from mooncake_proto.transfer import Replicate
from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=128, dtype=KvDtype.BFLOAT16, block_tokens=16)
FAKE = FakeConfig(name="fake", layout=LAYOUT)
WORKER = [f"--fake-head-dim={LAYOUT.head_dim}"]
ARENA_BLOCKS = 2 * (1 << 20) // LAYOUT.block_bytes
"""64 blocks of 32 KiB, that is 1024 tokens."""

FIRST = "the first conversation, of which the blocks will have to leave the arena. " * 5
N_TOKENS = 8


@contextlib.contextmanager
def _mesh(folder: Path, *flags: str) -> Iterator[Mesh]:
    """A mesh with a tiny arena, and an SSD tier on the prefill node."""
    store = {"messenger0": [f"--ssd-dir={folder}", "--ssd-bytes=64MiB", *flags], "prefill": WORKER, "decode": WORKER}
    with Mesh(arena_bytes="2MiB", flags=store) as mesh:
        yield mesh


def _ask(mesh: Mesh, prompt: str) -> int:
    """Ask, check the text against the truth, and say how many tokens were cached.

    An arena this small looks full to the conductor until the next beat, so it may have to be asked again.
    """

    def answered() -> clients.Answer | None:
        answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(prompt, N_TOKENS))
        return None if answer.status == 429 else answer

    answer = mesh.wait(answered, what="room for a request").json()
    assert answer["choices"][0]["text"] == clients.expected_text(prompt, N_TOKENS, FAKE)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def _others(mesh: Mesh, n: int) -> None:
    """Requests that together need more than the arena."""
    for number in range(n):
        _ask(mesh, _other(number))


def _other(number: int) -> str:
    return f"conversation {number} has nothing in common with others. " * 6


def _load(mesh: Mesh, name: str = "messenger0") -> Load:
    return next(state.load for state in mesh.status().cluster.members if state.member.instance_id == name)


def _whole_blocks(prompt: str) -> int:
    return (len(prompt.encode()) + 1) // LAYOUT.block_tokens


def _adopted(mesh: Mesh) -> int:
    """Wait until messenger0 has found the blocks of its last life and the conductor knows; how many were torn."""
    mesh.wait_healthy()
    adopted = mesh.wait_log("messenger0", "ssd_adopted")
    held = adopted["found"] - adopted["torn"]
    assert held

    def known() -> bool | None:
        return True if mesh.status().indexed_blocks.get("node0", 0) >= held else None

    mesh.wait(known, what="the conductor to know the blocks of the last life")
    return int(adopted["torn"])


def _demote_first(mesh: Mesh) -> None:
    """Ask FIRST, then others until none of its blocks is left in the arena."""
    _ask(mesh, FIRST)
    _others(mesh, 8)
    mesh.wait_idle()
    n_blocks = _whole_blocks(FIRST)
    mesh.wait(lambda: True if _load(mesh).ssd_blocks >= n_blocks else None, what="blocks to leave the arena")


def test_a_prefix_that_left_the_arena_comes_back(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        _demote_first(mesh)
        mesh.wait(lambda: _load(mesh).blocks_free > ARENA_BLOCKS // 20 or None, what="blocks to leave ahead of need")
        assert _ask(mesh, FIRST) == _whole_blocks(FIRST) * LAYOUT.block_tokens
        assert _load(mesh).ssd_faults == 0


def test_a_killed_messenger_finds_its_blocks_again(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        _demote_first(mesh)
        mesh.kill("messenger0")
        mesh.start("messenger0")
        assert _adopted(mesh) == 0, "torn"
        assert _ask(mesh, FIRST) == _whole_blocks(FIRST) * LAYOUT.block_tokens
        _others(mesh, 3)
        assert _load(mesh).ssd_faults == 0


def test_killed_in_the_middle_of_moving_blocks_again_and_again(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        for round_number in range(3):
            _ask(mesh, FIRST)
            _others(mesh, 4 + round_number)
            mesh.kill("messenger0")
            mesh.start("messenger0")
            assert _adopted(mesh) == 0, "torn"
        _ask(mesh, FIRST)


def test_another_node_gets_a_prefix_that_left_the_arena(tmp_path: Path) -> None:
    """The node with the prefix has lost its prefill instance; its messenger sends from SSD."""
    flags = {"messenger0": [f"--ssd-dir={tmp_path}", "--ssd-bytes=64MiB"], "prefill": WORKER, "decode": WORKER}
    flags["prefill1"] = ["--fake-prefill-s-per-token=0.015"]  # it will be busy for six seconds
    flags["conductor"] = ["--suspect-after-s=4"]  # two instances are missed
    with Mesh(arena_bytes="2MiB", prefill_nodes=(0, 2), flags=flags) as mesh:
        mesh.kill("prefill1")
        mesh.wait(lambda: None if _takes_work(mesh, "prefill1") else True, what="prefill1 to be missed")
        _demote_first(mesh)
        mesh.kill("prefill0")
        mesh.start("prefill1")
        mesh.wait(lambda: _takes_work(mesh, "prefill1") or None, what="prefill1 to take work")
        mesh.wait(lambda: None if _takes_work(mesh, "prefill0") else True, what="prefill0 to be missed")
        with ThreadPoolExecutor(2) as pool:  # another request keeps prefill1 busy: time to read ahead
            busy = pool.submit(_ask, mesh, "a prompt that nobody has asked before. " * 10)
            mesh.wait(lambda: _is_computing(mesh, "prefill1") or None, what="the conductor to know that it is busy")
            mesh.stop("messenger2")  # or its question might overtake the conductor's word, and be answered first
            first = pool.submit(_ask, mesh, FIRST)
            ahead = mesh.wait_log("messenger0", "read_ahead")
            mesh.cont("messenger2")
            assert ahead["blocks"] == _whole_blocks(FIRST)
            assert first.result() == _whole_blocks(FIRST) * LAYOUT.block_tokens
            busy.result()
        assert mesh.wait_log("messenger2", "prefix_fetched")["blocks"] == _whole_blocks(FIRST)
        _replicate(mesh, _other(0), source="messenger0", target="messenger2")
        copied = mesh.wait_log("messenger2", "prefix_fetched", blocks=_whole_blocks(_other(0)))
        assert copied["job_id"].startswith("replica-")
        assert _ask(mesh, _other(0)) == _whole_blocks(_other(0)) * LAYOUT.block_tokens


def _replicate(mesh: Mesh, prompt: str, *, source: str, target: str) -> None:
    order = Replicate(keys=join_keys(_keys_of(prompt)), source=mesh.member(source).endpoint)
    with clients.dealer(mesh.member(target).endpoint) as plug:
        plug.send_multipart(codec.encode(order))
        plug.send_multipart(codec.encode(Ping(), Envelope(id=MessageId("1"), deadline_s=5.0)))
        clients.receive(plug, timeout_s=30.0)  # what was sent before has come


def _takes_work(mesh: Mesh, name: str) -> bool:
    return any(state.takes_work for state in mesh.status().cluster.members if state.member.instance_id == name)


def _is_computing(mesh: Mesh, name: str) -> bool:
    """By its last report; a report from before a prompt came may have said that it is idle."""
    members = mesh.status().cluster.members
    return any(bool(state.load.queued_prompts) for state in members if state.member.instance_id == name)


def _keys_of(prompt: str) -> list[BlockKey]:
    root = key_root(
        fingerprint=FAKE.fingerprint,
        dtype=LAYOUT.dtype.value,
        block_tokens=LAYOUT.block_tokens,
        block_bytes=LAYOUT.block_bytes,
        tenant="",
        cache_salt="",
    )
    tokens = ByteTokenizer().encode(prompt, SpecialTokens.ADD)
    return chain(root, token_bytes(tokens), LAYOUT.block_tokens)


def _flip_a_byte_of(folder: Path, key: BlockKey) -> None:
    """In the file, of the block under *key*."""
    layout = f"{FAKE.fingerprint} {LAYOUT.dtype.value} {LAYOUT.block_tokens}"
    namespace = Namespace(block_bytes=LAYOUT.block_bytes, layout=layout)
    table = (folder / "slots.tbl").read_bytes()[PAGE_BYTES:]
    slots = range(len(table) // RECORD_BYTES)
    records = (unpack_record(table[i * RECORD_BYTES : (i + 1) * RECORD_BYTES], i, namespace) for i in slots)
    (slot,) = (record.slot for record in records if record is not None and record.key == key)
    with (folder / "blocks.dat").open("r+b") as file:
        file.seek(slot * LAYOUT.block_bytes + 77)
        (byte,) = file.read(1)
        file.seek(slot * LAYOUT.block_bytes + 77)
        file.write(bytes([byte ^ 0x80]))


def test_a_byte_flipped_while_the_messenger_serves_costs_that_block(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        _demote_first(mesh)
        _flip_a_byte_of(tmp_path, _keys_of(FIRST)[5])
        assert _ask(mesh, FIRST) == 5 * LAYOUT.block_tokens
        mesh.wait_log("messenger0", "ssd_fault", operation="read", kind="checksum")
        mesh.wait(lambda: _load(mesh).ssd_faults or None, what="the fault to be counted")
        assert _ask(mesh, FIRST) == _whole_blocks(FIRST) * LAYOUT.block_tokens, "it was computed again"


def test_a_byte_flipped_while_the_messenger_is_down_costs_that_block(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        _demote_first(mesh)
        mesh.kill("messenger0")
        _flip_a_byte_of(tmp_path, _keys_of(FIRST)[5])
        mesh.start("messenger0")
        assert _adopted(mesh) == 1, "torn"
        assert _ask(mesh, FIRST) == 5 * LAYOUT.block_tokens


@pytest.mark.parametrize(
    "flags",
    [["--ssd-dir=/proc/self/nowhere"], [f"--ssd-bytes={1 << 42}"]],
    ids=["a folder that cannot be", "more than the disk has"],
)
def test_a_mesh_without_its_disk_serves_on(tmp_path: Path, flags: list[str]) -> None:
    with _mesh(tmp_path, *flags) as mesh:
        mesh.wait_log("messenger0", "ssd_tier_off")
        _ask(mesh, FIRST)
        _others(mesh, 8)
        assert _ask(mesh, FIRST) == 0, "dropped as if there were no second tier"
        assert _load(mesh).ssd_blocks == 0


def test_a_folder_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _mesh(tmp_path) as mesh:
        _demote_first(mesh)
    other = [f"--fake-head-dim={LAYOUT.head_dim // 2}"]
    flags = {"messenger0": [f"--ssd-dir={tmp_path}", "--ssd-bytes=64MiB"], "prefill": other, "decode": other}
    with pytest.raises(AssertionError, match="messenger0 ended with 2"), Mesh(arena_bytes="2MiB", flags=flags):
        raise AssertionError("a mesh that is ready")
    assert f"messenger.ssd_dir: {tmp_path} holds blocks of 32768 bytes" in capsys.readouterr().out


def test_two_messengers_on_one_folder_are_one_too_many(tmp_path: Path) -> None:
    with _mesh(tmp_path) as mesh:
        second = [sys.executable, "-P", "-m", "mooncake_mesh", "messenger", f"--ssd-dir={tmp_path}"]
        sockets = [f"--bind=ipc://{mesh.folder}/second.ipc", f"--conductor={mesh.conductor}"]
        ended = subprocess.run([*second, *sockets], capture_output=True, text=True, timeout=30, check=False)
        assert ended.returncode == 2
        assert "messenger.ssd_dir" in ended.stderr
        assert "in use by another messenger" in ended.stderr
        _ask(mesh, FIRST)
