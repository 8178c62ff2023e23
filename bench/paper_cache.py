"""Results of simulated runs on disk, so that an interrupted report goes on where it was.

A run is named by a digest of everything that it depends on: the code that decides and simulates, the requests and the
setup. Files are columns of numbers, one value a request; nothing in them is executed when they are read.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

import mooncake_mesh
import mooncake_proto
from bench.simulator_results import LoadSample, RequestRecord, RunResult
from bench.traces import TraceRequest

_NUMBERS: Final = (
    "index", "arrival_s", "input_tokens", "output_tokens", "input_blocks", "cached_blocks", "cached_tokens",
    "computed_tokens", "prefill_s", "queue_s", "ttft_est_s", "first_token_s", "finished_s", "tbt_s", "tbt_mean_s",
)  # fmt: skip
_COUNTS: Final = frozenset(
    {"index", "input_tokens", "output_tokens", "input_blocks", "cached_blocks", "cached_tokens", "computed_tokens"}
)
_SAMPLES: Final = ("time_s", "prefill_busy", "prefill_queued", "decode_running", "decode_share")
_DECIDING: Final = ("policy", "conductor", "decode", "prefill", "kv", "messenger", "mesh")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCache:
    """Runs below *folder*; None keeps nothing."""

    folder: Path | None

    @classmethod
    def at_home(cls) -> "RunCache":
        base = os.environ.get("XDG_CACHE_HOME", "")
        return cls(folder=(Path(base) if base else Path.home() / ".cache") / "mooncake-mesh" / "paper")

    def path(self, requests: Sequence[TraceRequest], setup: object) -> Path | None:
        """Where the run of *setup* over *requests* lies, or would lie."""
        if self.folder is None:
            return None
        digest = hashlib.sha256(code_digest().encode())
        digest.update(repr(setup).encode())
        for request in requests:
            digest.update(repr((request.arrival_s, request.input_tokens, request.output_tokens)).encode())
            digest.update(b"".join(request.keys))
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name}.npz"

    def read(self, path: Path | None) -> RunResult | None:
        """The run at *path*; None where there is none, or none that can be read."""
        if path is None or not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as columns:
                return _result({name: columns[name] for name in columns.files})
        except (OSError, ValueError, KeyError):
            path.unlink(missing_ok=True)
            return None

    def write(self, path: Path | None, result: RunResult) -> None:
        """Keep *result* at *path*: whole, or not at all."""
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.npz")
        np.savez_compressed(temporary, allow_pickle=False, **_columns(result))
        temporary.replace(path)


@cache
def code_digest() -> str:
    """Digest of the sources that a simulated run depends on."""
    bench, mesh = Path(__file__).parent, Path(mooncake_mesh.__file__).parent
    files = [*bench.glob("simulator*.py"), bench / "nodes.py", *Path(mooncake_proto.__file__).parent.glob("*.py")]
    for package in _DECIDING:
        files += (mesh / package).glob("*.py")
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: (file.parent.name, file.name)):
        digest.update(f"{file.parent.name}/{file.name}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _columns(result: RunResult) -> dict[str, "np.typing.NDArray[np.generic]"]:
    columns: dict[str, np.typing.NDArray[np.generic]] = {
        name: np.array([getattr(record, name) for record in result.records], dtype=np.float64) for name in _NUMBERS
    }
    for name in _SAMPLES:
        columns[f"sample_{name}"] = np.array([getattr(sample, name) for sample in result.samples], dtype=np.float64)
    reasons = sorted({record.refused for record in result.records})
    columns["refused"] = np.array([reasons.index(record.refused) for record in result.records], dtype=np.int32)
    facts = {"name": result.name, "preempted": result.preempted, "events": result.events, "wall_s": result.wall_s,
             "transferred_bytes": result.transferred_bytes, "switched": result.switched,
             "reasons": reasons}  # fmt: skip
    columns["facts"] = np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8)
    return columns


def _result(columns: dict[str, "np.typing.NDArray[np.generic]"]) -> RunResult:
    facts = json.loads(columns["facts"].tobytes())
    reasons = facts["reasons"]
    rows = zip(*(columns[name].tolist() for name in _NUMBERS), columns["refused"].tolist(), strict=True)
    records = []
    for *numbers, refused in rows:
        values = dict(zip(_NUMBERS, numbers, strict=True))
        record = RequestRecord(
            index=int(values["index"]),
            arrival_s=values["arrival_s"],
            input_tokens=int(values["input_tokens"]),
            output_tokens=int(values["output_tokens"]),
            refused=reasons[refused],
        )
        for name in _NUMBERS[4:]:
            setattr(record, name, int(values[name]) if name in _COUNTS else values[name])
        records.append(record)
    samples = [
        LoadSample(
            time_s=time_s,
            prefill_busy=int(busy),
            prefill_queued=int(queued),
            decode_running=int(running),
            decode_share=share,
        )
        for time_s, busy, queued, running, share in zip(
            *(columns[f"sample_{name}"].tolist() for name in _SAMPLES), strict=True
        )
    ]
    return RunResult(
        name=facts["name"],
        records=records,
        samples=samples,
        preempted=facts["preempted"],
        events=facts["events"],
        wall_s=facts["wall_s"] if math.isfinite(facts["wall_s"]) else 0.0,
        transferred_bytes=facts["transferred_bytes"],
        switched=facts["switched"],
    )
