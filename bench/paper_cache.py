"""Results of simulated runs on disk, so that an interrupted report goes on where it was.

A run is named by a digest of everything that it depends on: the modules that the simulator imports, the requests and
the setup. Files are columns of numbers, one value a request; nothing in them is executed when they are read. Requests
on their way to a worker process are kept alike.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from threading import get_ident
from typing import Final

import numpy as np

from bench.simulator_results import LoadSample, RequestRecord, RunResult
from bench.traces import TraceRequest
from mooncake_mesh.kv.block_hash import split_keys

_NUMBERS: Final = (
    "index", "arrival_s", "input_tokens", "output_tokens", "input_blocks", "cached_blocks", "cached_tokens",
    "computed_tokens", "prefill_s", "queue_s", "ttft_est_s", "first_token_s", "finished_s", "tbt_s", "tbt_mean_s",
)  # fmt: skip
_COUNTS: Final = frozenset(
    {"index", "input_tokens", "output_tokens", "input_blocks", "cached_blocks", "cached_tokens", "computed_tokens"}
)
_SAMPLES: Final = ("time_s", "prefill_busy", "prefill_queued", "decode_running", "decode_share")
_IMPORTED: Final = """
import json, sys
import bench.simulator, bench.simulator_coupled
files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
ours = ("bench", "mooncake_mesh", "mooncake_proto")
print(json.dumps({name: file for name, file in files.items() if file and name.split(".")[0] in ours}))
"""


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
        what = (code_digest(), repr(setup), requests_digest(requests))
        name = hashlib.sha256("\0".join(what).encode()).hexdigest()
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
        temporary = path.with_suffix(f".{os.getpid()}.{get_ident()}.npz")
        np.savez_compressed(temporary, allow_pickle=False, **_columns(result))
        temporary.replace(path)


@cache
def code_digest() -> str:
    """Digest of the sources that a simulated run depends on: all of ours that a fresh interpreter imports for one."""
    asked = [sys.executable, "-c", _IMPORTED]
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(asked, cwd=root, check=True, capture_output=True, text=True).stdout
    digest = hashlib.sha256()
    for name, file in sorted(json.loads(found).items()):
        digest.update(f"{name}\0".encode())
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def write_requests(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Keep *requests* at *path*, unless they are there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.{get_ident()}.npz")
    np.savez(
        temporary,
        allow_pickle=False,
        arrival_s=np.array([request.arrival_s for request in requests], dtype=np.float64),
        input_tokens=np.array([request.input_tokens for request in requests], dtype=np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], dtype=np.int64),
        n_keys=np.array([len(request.keys) for request in requests], dtype=np.int64),
        keys=np.frombuffer(b"".join(key for request in requests for key in request.keys), dtype=np.uint8),
    )
    temporary.replace(path)


def read_requests(path: Path) -> list[TraceRequest]:
    """What :func:`write_requests` kept."""
    with np.load(path, allow_pickle=False) as columns:
        names = ("arrival_s", "input_tokens", "output_tokens", "n_keys")
        rows = list(zip(*(columns[name].tolist() for name in names), strict=True))
        keys = split_keys(columns["keys"].tobytes())
    return [
        TraceRequest(arrival_s=at_s, input_tokens=taken, output_tokens=given, keys=tuple(islice(keys, n)))
        for at_s, taken, given, n in rows
    ]


def requests_digest(requests: Sequence[TraceRequest]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        digest.update(repr((request.arrival_s, request.input_tokens, request.output_tokens)).encode())
        digest.update(b"".join(request.keys))
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
