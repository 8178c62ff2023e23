"""Request traces as they were published with the FAST'25 paper: one JSON object a line.

``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``, which name 512-token blocks of the
prompt: equal ids are equal blocks with equal prefixes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TRACE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLine:
    """One request. Its last block is partial unless ``input_tokens`` is a multiple of TRACE_BLOCK_TOKENS."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]


def read_trace_file(path: Path) -> Iterator[TraceLine]:
    """The requests of *path*, one by one. Raises OSError, and ValueError with the number of a line that is none."""
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield parse_trace_line(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from error


def parse_trace_line(line: object) -> TraceLine:
    """Raises ValueError."""
    match line:
        case {
            "timestamp": int() | float() as arrival_ms,
            "input_length": int(input_tokens),
            "output_length": int(output_tokens),
            "hash_ids": list(ids),
        } if input_tokens > 0 and len(ids) == -(-input_tokens // TRACE_BLOCK_TOKENS):
            return TraceLine(
                arrival_s=arrival_ms / 1e3,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                block_ids=tuple(ids),
            )
        case _:
            raise ValueError(f"not a request of a trace: {str(line)[:200]}")
