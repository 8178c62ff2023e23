"""The request traces that were published with the FAST'25 paper, read in place.

They are not part of this project. mooncake_mesh/loadtest/trace_file.py has their format.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mooncake_mesh.loadtest.trace_file import TRACE_BLOCK_TOKENS, TraceLine, read_trace_file
from mooncake_proto.ids import BLOCK_KEY_BYTES, BlockKey

TRACES: Final = Path(__file__).resolve().parents[2] / "shared" / "traces"
BLOCK_TOKENS: Final = TRACE_BLOCK_TOKENS


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
    """All requests of the trace *name* (``conversation``, ``synthetic``), in order of arrival.

    Raises TraceMissing, and ValueError for a line that is no request.
    """
    path = folder / f"{name}_trace.jsonl"
    try:
        return [_request(line) for line in read_trace_file(path)]
    except FileNotFoundError:
        raise TraceMissing(
            f"no trace at {path}: take FAST25-release/traces from github.com/kvcache-ai/Mooncake, and name their "
            "folder with --traces"
        ) from None


def _request(line: TraceLine) -> TraceRequest:
    return TraceRequest(
        arrival_s=line.arrival_s,
        input_tokens=line.input_tokens,
        output_tokens=line.output_tokens,
        keys=tuple(BlockKey(block.to_bytes(BLOCK_KEY_BYTES, "big")) for block in line.block_ids),
    )
