"""Prefill in one process and in several stages, each held to one core: `python -m bench.pipeline`.

Meshes with instances of 1, 2 and 4 stages run side by side and get a new prompt each in turns; stage *i* is held to
core *i* modulo the cores there are. Measured is the time to the first token, and beside it what the instance would
take if nobody else used the machine: the same chunks, with the CPU time that each took each stage, put one after the
other as the pipeline does (bench/pipeline_chart.py). The chart shows which chunk was where when.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import pipeline_layers
from bench.load import Connection
from bench.mesh import LocalMesh, keep_on, local_mesh
from bench.pipeline_chart import ChunkRun, plot, text_chart, undisturbed_s
from bench.report import Report
from mooncake_mesh.config_layerwise import LayerwiseConfig, Overlap
from mooncake_mesh.kv.layout import KvDtype

_AIM = 1.7
_AIM_TOKENS = 8000
"""A shorter prompt makes fewer chunks, and the first and last ones leave stages idle."""
_DEADLINE_S = 600.0
_TOKEN_IDS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Instance:
    stages: int
    mesh: LocalMesh
    logs: Path

    @property
    def processes(self) -> list[str]:
        return ["prefill0", *(f"prefill0-{stage}" for stage in range(1, self.stages))]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """One prompt: its TTFT, and the chunks that each stage computed for it."""

    ttft_s: float
    stages: tuple[tuple[ChunkRun, ...], ...]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a shorter prompt and fewer rounds, under a minute")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="chunks of the instance of one stage")
    parser.add_argument("--prompt-tokens", type=int, help="8,000 otherwise, or 1,500 with --quick")
    parser.add_argument("--rounds", type=int, help="5 otherwise, or 2 with --quick")
    parser.add_argument("--layers", action="store_true", help="measure the layers instead, and say how to split them")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    Report.add_flags(parser)
    args = parser.parse_args()
    if args.layers:
        _measure_layers(args)
        return
    prompt_tokens = args.prompt_tokens or (1500 if args.quick else 8000)
    rounds = args.rounds or (2 if args.quick else 5)
    report = Report("pipeline", f"{args.model}, {args.dtype}, {prompt_tokens:,} prompt tokens, one core for each stage")
    with tempfile.TemporaryDirectory(prefix="mooncake-pipeline-") as folder, ExitStack() as meshes:
        instances = [_start(meshes, Path(folder), args, stages) for stages in args.stages]
        found = asyncio.run(_measure(instances, prompt_tokens, rounds))
    _tell(report, found, is_aim=prompt_tokens >= _AIM_TOKENS)
    for stages, prompts in found.items():
        print(f"\n{stages} stages, last prompt\n{text_chart(prompts[-1].stages)}")
        if args.plot:
            plot(prompts[-1].stages, args.plot / f"pipeline-{stages}.png")
    report.finish(args)


def _measure_layers(args: argparse.Namespace) -> None:
    from mooncake_mesh.engine.runner import TransformersEngine  # needs torch

    engine = TransformersEngine.load(
        args.model,
        dtype=KvDtype(args.dtype),
        block_tokens=16,
        threads=1,
        layerwise=LayerwiseConfig(overlap=Overlap.OFF),  # each layer is told of when it is written
    )
    layout = engine.spec.layout
    engine.bind(memoryview(bytearray(layout.blocks_for(pipeline_layers.TOKENS) * layout.block_bytes)))
    report = Report("pipeline", f"{args.model}, {args.dtype}, layers in a chunk of {pipeline_layers.TOKENS:,} tokens")
    pipeline_layers.tell(report, pipeline_layers.measure(engine))
    report.finish(args)


def _start(meshes: ExitStack, folder: Path, args: argparse.Namespace, stages: int) -> _Instance:
    logs, config = folder / f"logs{stages}", folder / "mooncake.toml"
    config.write_text("[conductor]\nttft_slo_s = 600\ntbt_slo_s = 60\n")  # a busy machine is measured all the same
    flags = [
        f"--config={config}",
        f"--model={args.model}",
        f"--dtype={args.dtype}",
        f"--chunk-tokens={args.chunk_tokens}",
        f"--prefill-stages={stages}",
        f"--log-dir={logs}",
        "--log-level=debug",
        "--log-format=json",
    ]
    instance = _Instance(stages=stages, mesh=meshes.enter_context(local_mesh(flags)), logs=logs)
    cores = sorted(os.sched_getaffinity(0))
    for stage, name in enumerate(instance.processes):
        keep_on(instance.mesh.processes[name], {cores[stage % len(cores)]})
    return instance


async def _measure(instances: Sequence[_Instance], prompt_tokens: int, rounds: int) -> dict[int, list[_Prompt]]:
    """The first round is thrown away: memory is touched for the first time, and chunks are planned without samples."""
    numbers = random.Random(1)
    found: dict[int, list[_Prompt]] = {instance.stages: [] for instance in instances}
    for turn in range(rounds + 1):
        for instance in instances:
            prompt = [numbers.randrange(_TOKEN_IDS) for _ in range(prompt_tokens)]  # new: nothing of it is cached
            measured = await _one(instance, prompt)
            if turn:
                found[instance.stages].append(measured)
    return found


async def _one(instance: _Instance, prompt: Sequence[int]) -> _Prompt:
    starts = {name: _size(instance.logs / f"{name}.log") for name in instance.processes}
    connection = Connection(instance.mesh.host, instance.mesh.port)
    try:
        async with asyncio.timeout(_DEADLINE_S):
            body = {"model": instance.mesh.model, "prompt": list(prompt), "max_tokens": 2, "temperature": 0}
            times = await connection.stream(body)
    finally:
        await connection.close()
    if times.error:
        raise RuntimeError(times.error)
    stages = tuple(_chunks(instance.logs / f"{name}.log", starts[name]) for name in instance.processes)
    return _Prompt(ttft_s=times.ttft_s, stages=stages)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _chunks(log: Path, start: int) -> tuple[ChunkRun, ...]:
    """What a stage has logged since *start*."""
    with log.open("rb") as file:
        file.seek(start)
        entries: list[dict[str, Any]] = [json.loads(line) for line in file if b'"chunk_computed"' in line]
    return tuple(
        ChunkRun(
            start=entry["start"],
            n_tokens=entry["n_tokens"],
            began_s=entry["began_s"],
            compute_s=entry["compute_s"],
            cpu_s=entry["cpu_s"],
        )
        for entry in entries
    )


def _tell(report: Report, found: dict[int, list[_Prompt]], *, is_aim: bool) -> None:
    first = min(found)
    for stages, prompts in found.items():
        ttft_s = [prompt.ttft_s for prompt in prompts]
        report.row(f"TTFT, {stages} stages", median(ttft_s), "s", n=len(ttft_s), spread=(min(ttft_s), max(ttft_s)))
    for stages in found:
        if stages == first:
            continue
        pairs = list(zip(found[first], found[stages], strict=True))
        for name, ratios in (
            ("TTFT", [one.ttft_s / more.ttft_s for one, more in pairs]),
            ("undisturbed", [undisturbed_s(one.stages) / undisturbed_s(more.stages) for one, more in pairs]),
        ):
            ratio = median(ratios)
            counts = is_aim and name == "TTFT" and stages == 2
            report.row(
                f"{name}: {first} stage / {stages} stages",
                ratio,
                "×",
                aim=f"≥ {_AIM}" if counts else "",
                met=ratio >= _AIM if counts else None,
                n=len(ratios),
                spread=(min(ratios), max(ratios)),
            )
    for stages, prompts in found.items():
        chunks = [sum(run.cpu_s for run in stage) for stage in prompts[-1].stages]
        report.note(
            f"{stages} stages: {len(prompts[-1].stages[0])} chunks of "
            f"{max(run.n_tokens for run in prompts[-1].stages[0])} … "
            f"{min(run.n_tokens for run in prompts[-1].stages[0][:-1] or prompts[-1].stages[0])} tokens; "
            f"CPU seconds of each stage {', '.join(f'{each:.2f}' for each in chunks)}"
        )
    report.note(f"undisturbed: from the CPU time of every chunk in every stage; {os.cpu_count()} cores are here")


if __name__ == "__main__":
    main()
