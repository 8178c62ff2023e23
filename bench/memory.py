"""Memory for the KV of a long prompt's prefill, beside the plan: `python -m bench.memory`.

A prefill instance whose device may hold 8 layers (`--layerwise-budget 8`) computes a prompt of 16,384 tokens beside one
that holds all of them, each in a process of its own. Planned are the slots of so many layers for the whole prompt;
measured are the engine's KV on the device, and the process' anonymous memory, which on a CPU is the device: the arena
is shared memory and does not count. Between the two processes the latter must differ by what the plans differ by.

The default model's context ends at 8,192 tokens. The engine, which leaves that limit to the gateway, computes on with
the same rotary embedding: what it draws there means little, and the memory it takes is that of any 16,384 tokens.
"""

import argparse
import json
import mmap
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Final

import numpy as np

from bench.report import Report
from mooncake_mesh.kv.layout import KvDtype

MiB: Final = 1 << 20
_BLOCK_TOKENS: Final = 16
_SAMPLE_S: Final = 0.005
_AIM: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One prefill. ``anonymous_bytes`` is what the process' memory grew by at its peak."""

    layers: int
    token_layer_bytes: int
    context_tokens: int
    kv_bytes: int
    anonymous_bytes: int
    elapsed_s: float


class _Watch:
    """The greatest anonymous memory of this process, looked at all the time by a thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._first_bytes = self._peak_bytes = _anonymous_bytes()
        self._thread = threading.Thread(target=self._look, name="watch")
        self._thread.start()

    def stop(self) -> int:
        """How much more than at the start it was."""
        self._over.set()
        self._thread.join()
        return self._peak_bytes - self._first_bytes

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self._peak_bytes = max(self._peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a prompt of 4,096 tokens")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=[dtype.value for dtype in KvDtype])
    parser.add_argument("--prompt-tokens", type=int, help="16,384 otherwise, or 4,096 with --quick")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--budget", type=int, default=8, help="layers that the device holds")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    Report.add_flags(parser)
    args = parser.parse_args()
    args.prompt_tokens = args.prompt_tokens or (4096 if args.quick else 16384)
    if args.child:
        print(json.dumps(asdict(_prefill(args))))
        return
    _tell(args, _in_child(args, args.budget), _in_child(args, 0))


def _in_child(args: argparse.Namespace, budget: int) -> Peak:
    command = [sys.executable, "-m", "bench.memory", "--child", f"--budget={budget}"]
    command += [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model", "dtype", "prompt_tokens")]
    command.append(f"--chunk-tokens={args.chunk_tokens}")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def _prefill(args: argparse.Namespace) -> Peak:
    """The prompt once, after a chunk that touches what every forward needs."""
    from mooncake_mesh.config_layerwise import LayerwiseConfig
    from mooncake_mesh.engine.api import PrefillChunk
    from mooncake_mesh.engine.runner import TransformersEngine

    engine = TransformersEngine.load(
        args.model,
        dtype=KvDtype(args.dtype),
        block_tokens=_BLOCK_TOKENS,
        threads=1,
        context_bytes=8 << 30,
        layerwise=LayerwiseConfig(budget=args.budget),
    )
    layout = engine.spec.layout
    blocks = range(layout.blocks_for(args.prompt_tokens))
    arena = memoryview(mmap.mmap(-1, len(blocks) * layout.block_bytes))
    engine.bind(arena)
    tokens = np.random.default_rng(1).integers(0, 256, args.prompt_tokens).astype(np.int32)
    first = PrefillChunk(sequence="first", tokens=tokens[: args.chunk_tokens], start=0, blocks=blocks)
    engine.prefill(first, lambda _: None)
    engine.bind(arena)  # forgets it
    kv_bytes, began_s, watch = 0, monotonic(), _Watch()
    for start in range(0, args.prompt_tokens, args.chunk_tokens):
        chunk = tokens[start : start + args.chunk_tokens]
        engine.prefill(PrefillChunk(sequence="long", tokens=chunk, start=start, blocks=blocks), lambda _: None)
        kv_bytes = max(kv_bytes, engine.kv_bytes)
    return Peak(
        layers=layout.layers,
        token_layer_bytes=layout.token_bytes // layout.layers,
        context_tokens=engine.spec.max_context_tokens,
        kv_bytes=kv_bytes,
        anonymous_bytes=watch.stop(),
        elapsed_s=monotonic() - began_s,
    )


def _tell(args: argparse.Namespace, held: Peak, whole: Peak) -> None:
    report = Report(
        "memory", f"{args.model}, {args.dtype}, {args.prompt_tokens:,} tokens, chunks of {args.chunk_tokens}"
    )
    layer_bytes = args.prompt_tokens * held.token_layer_bytes
    for name, peak, layers in ((f"{args.budget} layers", held, args.budget), ("all layers", whole, whole.layers)):
        plan_bytes = layers * layer_bytes
        met = peak.kv_bytes <= (1 + _AIM) * plan_bytes
        report.row(
            f"{name}: peak of KV on the device (baseline: the plan)",
            peak.kv_bytes / MiB,
            "MiB",
            baseline=plan_bytes / MiB,
            aim=f"≤ {1 + _AIM} × plan",
            met=met,
        )
        report.row(f"{name}: growth of the process at its peak", peak.anonymous_bytes / MiB, "MiB")
        report.row(f"{name}: prefill", peak.elapsed_s, "s")
    saved_bytes, planned_bytes = (
        whole.anonymous_bytes - held.anonymous_bytes,
        (whole.layers - args.budget) * layer_bytes,
    )
    report.row(
        "what the budget saves the process (baseline: the plan)",
        saved_bytes / MiB,
        "MiB",
        baseline=planned_bytes / MiB,
        aim=f"≥ {1 - _AIM} × plan",
        met=saved_bytes >= (1 - _AIM) * planned_bytes,
    )
    report.note(
        f"plan: layers × {args.prompt_tokens:,} tokens × {held.token_layer_bytes:,} bytes; activations grow with it"
    )
    if args.prompt_tokens > held.context_tokens:
        report.note(f"the model was trained for {held.context_tokens:,} tokens: memory is measured, not what it draws")
    report.finish(args)


if __name__ == "__main__":
    main()
