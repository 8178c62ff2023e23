"""KV travels while prefill computes: by chunks, and by layers where a prompt is computed in one go."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

import pytest

from mooncake_mesh.engine.fake import FakeConfig
from mooncake_mesh.kv.layout import KvLayout
from tests.mesh import clients
from tests.mesh.harness import Mesh

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(120)]

PROMPT: Final = "The tide carried one letter after the other out of the harbour. " * 8  # and one token before it: 513
TOKEN_S: Final = 0.02
"""Ten seconds for the prompt, so that a process which stands still for three does not hold up most of its KV."""
TRANSPORTS: Final = ("shm", "tcp", "tcp+tls")


def layout_of(layers: int) -> KvLayout:
    return replace(clients.FAKE.layout, layers=layers)


def config_of(layers: int) -> FakeConfig:
    return replace(clients.FAKE, layout=layout_of(layers))


@pytest.mark.parametrize(
    ("chunk_tokens", "layers"), [pytest.param(64, 2, id="chunks of 64"), pytest.param(0, 8, id="layers of one chunk")]
)
def test_most_slices_land_before_prefill_ends(chunk_tokens: int, layers: int) -> None:
    with ExitStack() as stack:
        meshes = {name: stack.enter_context(mesh_over(name, chunk_tokens, layers)) for name in TRANSPORTS}
        doors = [mesh.http for mesh in meshes.values()]
        with ThreadPoolExecutor(len(doors)) as threads:
            answers = list(threads.map(lambda door: clients.complete(door, PROMPT, 8), doors))
        ends = [(m.wait_log("prefill0", "prefill_sent"), m.wait_log("decode0", "kv_landed")) for m in meshes.values()]
    assert answers == [clients.expected_text(PROMPT, 8, config_of(layers))] * len(meshes)

    layout = layout_of(layers)
    kv_bytes = layout.blocks_for(len(PROMPT) + 1) * layout.block_bytes
    for transport, (sent, landed) in zip(meshes, ends, strict=True):
        assert (sent["transport"], sent["sent_bytes"], landed["received_bytes"]) == (transport, kv_bytes, kv_bytes)
        assert sent["overlapped_bytes"] > 0.5 * kv_bytes, transport
        # The device is busy for seconds: most of them lie between the first slice and the last.
        prefill_s = TOKEN_S * (len(PROMPT) + 1)
        assert landed["last_slice_s"] - landed["first_slice_s"] > 0.5 * prefill_s, transport


def mesh_over(transport: str, chunk_tokens: int, layers: int) -> Mesh:
    """Not started yet."""
    flags = {
        "prefill": [
            f"--chunk-tokens={chunk_tokens}",
            f"--fake-layers={layers}",
            f"--fake-prefill-s-per-token={TOKEN_S}",
        ],
        "decode": [f"--fake-layers={layers}"],
        "messenger": [f"--transport={transport[:3]}", *["--tcp-tls"] * (transport == "tcp+tls")],
    }
    return Mesh(flags=flags)
