"""The bytes of every kind are frozen in wire_v1.json.

A change of them is a change of the protocol: peers of the old version no longer agree. ``pytest --update-golden``
rewrites the file; whether PROTOCOL_VERSION has to grow with it is for the author to decide (see CONTRIBUTING.md).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_proto import (  # noqa: F401  registers every kind
    client,
    control,
    decisions,
    job_query,
    kvcache,
    pipeline,
    rdma,
    serving,
    transfer,
)
from mooncake_proto.codec import decode, encode, kinds
from mooncake_proto.envelope import PROTOCOL_VERSION, VERSION_FRAME, Envelope
from mooncake_proto.ids import MessageId
from tests.golden.samples import sample

VECTORS = Path(__file__).with_name(f"wire_v{PROTOCOL_VERSION}.json")
ENVELOPE = Envelope(id=MessageId("12"), re=MessageId("7"), deadline_s=2.5, cause="req-1")


def vector_of(kind: str) -> dict[str, Any]:
    version, name, header, *payload = encode(sample(kinds()[kind]), ENVELOPE)
    assert version == VERSION_FRAME
    return {"kind": name.decode(), "header": header.decode(), "payload_hex": [frame.hex() for frame in payload]}


@pytest.fixture(scope="module")
def frozen(update_golden: bool) -> dict[str, dict[str, Any]]:
    """Vectors by kind, rewritten first when asked to."""
    if update_golden:
        vectors = [vector_of(kind) for kind in sorted(kinds())]
        VECTORS.write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")
    return {vector["kind"]: vector for vector in json.loads(VECTORS.read_text())}


def test_every_kind_has_a_vector_and_every_vector_a_kind(frozen: dict[str, dict[str, Any]]) -> None:
    assert sorted(frozen) == sorted(kinds())


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_bytes_are_frozen(kind: str, frozen: dict[str, dict[str, Any]]) -> None:
    assert vector_of(kind) == frozen[kind]


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_frozen_bytes_still_decode(kind: str, frozen: dict[str, dict[str, Any]]) -> None:
    vector = frozen[kind]
    payload = [bytes.fromhex(frame) for frame in vector["payload_hex"]]
    frames = [VERSION_FRAME, kind.encode(), vector["header"].encode(), *payload]
    assert decode(frames) == (ENVELOPE, sample(kinds()[kind]))
