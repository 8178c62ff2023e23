"""The request traces that were published with the FAST'25 paper, read in place.

They are not part of this project. Each line of a file is one request; ``hash_ids`` names its 512-token prefix blocks:
equal ids are equal blocks with equal prefixes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

TRACES: Final = Path(__file__).resolve().parents[2] / "shared" / "traces"
BLOCK_TOKENS: Final = 512


class TraceMissing(Exception):
    """There is no such trace; the text says where it was looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request. Its last block is partial unless ``input_tokens`` is a multiple of BLOCK_TOKENS."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    keys: Sequence[BlockKey]


def read_trace(name: str, folder: Path = TRACES) -> list[TraceRequest]:
    """All requests of the trace *name* (``conversation``, ``synthetic``), in order of arrival. Raises TraceMissing."""
    path = folder / f"{name}_trace.jsonl"
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise TraceMissing(
            f"no trace at {path}: take FAST25-release/traces from github.com/kvcache-ai/Mooncake, and name their "
            "folder with --traces"
        ) from None
    return [_request(json.loads(line)) for line in lines]


def _request(line: dict[str, object]) -> TraceRequest:
    match line:
        case {
            "timestamp": int(arrival_ms),
            "input_length": int(input_tokens),
            "output_length": int(output_tokens),
            "hash_ids": list(ids),
        }:
            keys = tuple(BlockKey(block.to_bytes(BLOCK_KEY_BYTES, "big")) for block in ids)
            return TraceRequest(
                arrival_s=arrival_ms / 1e3, input_tokens=input_tokens, output_tokens=output_tokens, keys=keys
            )
        case _:
            raise ValueError(f"not a request of a trace: {line}")
