"""What a cached prefix costs a prefill, with and without overlap: `python -m bench.layerwise`.

The real model computes prompts of which 0, 50 and 95 % are in the arena, as a prefill instance does: the same engine,
`--layerwise-overlap on` and `off`. Each round measures, one after the other and on the same blocks: the load of all
layers' prefix alone; the computation alone, its prefix loaded already; and the whole with overlap and without. Ratios
are those of one round, so that a busy machine disturbs both sides.
"""

import argparse
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
import torch

from bench.report import Report
from mooncake_mesh.config_layerwise import LayerwiseConfig, Overlap
from mooncake_mesh.engine.api import PrefillChunk, TokenArray
from mooncake_mesh.engine.heap import keep_freed_memory
from mooncake_mesh.engine.kv_storage import ArenaPages, torch_dtype
from mooncake_mesh.engine.model_files import cache_folder
from mooncake_mesh.engine.native.compiling import NativeUnavailable
from mooncake_mesh.engine.native.kernels import Kernels
from mooncake_mesh.engine.native.loading import load
from mooncake_mesh.engine.runner import TransformersEngine
from mooncake_mesh.kv.layout import KvDtype

SHARES: Final = (0, 50, 95)
_AIM: Final = 1.1
_CHUNK_TOKENS: Final = 512
_BLOCK_TOKENS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one round."""

    load_s: float
    compute_s: float
    on_s: float
    off_s: float

    @property
    def ratio(self) -> float:
        """Of the whole with overlap to what takes longer of its parts."""
        return self.on_s / max(self.load_s, self.compute_s)


def _kernels(dtype: KvDtype) -> Kernels | None:
    """By which the engines copy, so that the load alone is no slower than theirs."""
    try:
        return load(cache_folder() / "native") if dtype is KvDtype.BFLOAT16 else None
    except NativeUnavailable:
        return None


class Bench:
    """Two engines of one model, which differ in overlap only, over one arena with one prompt's KV."""

    def __init__(self, model: str, dtype: KvDtype, prompt_tokens: int) -> None:
        self._engines = {
            overlap: TransformersEngine.load(
                model,
                dtype=dtype,
                block_tokens=_BLOCK_TOKENS,
                threads=1,
                context_bytes=4 << 30,
                layerwise=LayerwiseConfig(overlap=overlap),
            )
            for overlap in Overlap
        }
        layout = self._layout = self._engines[Overlap.ON].spec.layout
        self._blocks = range(layout.blocks_for(prompt_tokens))
        self._arena = mmap.mmap(-1, len(self._blocks) * layout.block_bytes)
        self._pages = ArenaPages(layout, _kernels(dtype))
        self._pages.bind(memoryview(self._arena))
        self._tokens = np.random.default_rng(1).integers(0, 256, prompt_tokens).astype(np.int32)
        self._n = 0
        for engine in self._engines.values():
            engine.bind(memoryview(self._arena))
            self._prefill(engine, "warm", 0)

    def round(self, share: int) -> Round:
        """One round with *share* % of the prompt cached, in whole blocks."""
        cached = len(self._tokens) * share // 100 // _BLOCK_TOKENS * _BLOCK_TOKENS
        self._n += 1
        return Round(
            load_s=self._load_s(cached),
            compute_s=self._compute_s(cached),
            on_s=self._whole_s(Overlap.ON, cached),
            off_s=self._whole_s(Overlap.OFF, cached),
        )

    def _load_s(self, cached: int) -> float:
        """All layers' prefix into memory of its own, as a new context has."""
        layout = self._layout
        with torch.inference_mode():
            began_s = perf_counter()
            shape = (layout.layers, 2, layout.kv_heads, cached, layout.head_dim)
            context = torch.empty(shape, dtype=torch_dtype(layout.dtype))
            for layer in range(layout.layers if cached else 0):
                self._pages.read_positions(layer, self._blocks, 0, cached, context[layer])
            return perf_counter() - began_s

    def _compute_s(self, cached: int) -> float:
        """The second time that the same engine computes the same positions of a sequence, it loads nothing."""
        engine, name = self._engines[Overlap.OFF], f"compute {self._n}"
        if cached:
            self._prefill(engine, name, cached)
        return self._timed_s(engine, name, cached)

    def _whole_s(self, overlap: Overlap, cached: int) -> float:
        return self._timed_s(self._engines[overlap], f"{overlap.value} {self._n}", cached)

    def _timed_s(self, engine: TransformersEngine, name: str, cached: int) -> float:
        """Of one prompt, which is over then: its memory is the next one's."""
        began_s = perf_counter()
        self._prefill(engine, name, cached)
        elapsed_s = perf_counter() - began_s
        engine.retire(name, ())
        return elapsed_s

    def _prefill(self, engine: TransformersEngine, name: str, start: int) -> None:
        for first in range(start, len(self._tokens), _CHUNK_TOKENS):
            tokens: TokenArray = self._tokens[first : first + _CHUNK_TOKENS]
            engine.prefill(PrefillChunk(sequence=name, tokens=tokens, start=first, blocks=self._blocks), _ignore)


def _ignore(_: int) -> None:
    """Nobody waits for a layer."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.layerwise", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the shorter prompt only and fewer rounds, about a minute")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=[dtype.value for dtype in KvDtype])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", help="2,048 and 4,096 otherwise")
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES, help="percent of the prompt that are cached")
    parser.add_argument("--rounds", type=int, help="5 otherwise, or 3 with --quick")
    Report.add_flags(parser)
    args = parser.parse_args()
    keep_freed_memory()  # as workers do
    lengths = args.prompt_tokens or ([2048] if args.quick else [2048, 4096])
    rounds = args.rounds or (3 if args.quick else 5)
    report = Report("layerwise", f"{args.model}, {args.dtype}, one thread to compute, chunks of {_CHUNK_TOKENS} tokens")
    for length in lengths:
        bench = Bench(args.model, KvDtype(args.dtype), length)
        for share in args.shares:
            if share:
                bench.round(share)  # touches the memory
            _tell(report, f"{length:,} tokens, {share} % cached", [bench.round(share) for _ in range(rounds)])
    report.note("off: the same copies by the thread that computes, when it needs them")
    report.note("0 % cached: nothing to load, what is left is storing the chunks' own KV")
    report.finish(args)


def _tell(report: Report, name: str, rounds: Sequence[Round]) -> None:
    n = len(rounds)
    load_ms, compute_ms = [1e3 * one.load_s for one in rounds], [1e3 * one.compute_s for one in rounds]
    on_ms, off_ms = [1e3 * one.on_s for one in rounds], [1e3 * one.off_s for one in rounds]
    report.row(f"{name}: load", median(load_ms), "ms", n=n, spread=(min(load_ms), max(load_ms)))
    report.row(f"{name}: compute", median(compute_ms), "ms", n=n, spread=(min(compute_ms), max(compute_ms)))
    report.row(f"{name}: whole, overlap off", median(off_ms), "ms", n=n, spread=(min(off_ms), max(off_ms)))
    report.row(f"{name}: whole, overlap on", median(on_ms), "ms", n=n, spread=(min(on_ms), max(on_ms)))
    gains = [one.on_s / one.off_s for one in rounds]
    report.row(f"{name}: overlap on / off", median(gains), "×", n=n, spread=(min(gains), max(gains)))
    ratios = [one.ratio for one in rounds]
    report.row(
        f"{name}: whole / max(load, compute)",
        median(ratios),
        "×",
        aim=f"≤ {_AIM}",
        met=median(ratios) <= _AIM,
        n=n,
        spread=(min(ratios), max(ratios)),
    )


if __name__ == "__main__":
    main()
