"""What other people's load tools are asked to do, and the command lines that say it: pure.

Two kinds of load: prompts that share nothing, a few streams at a time, and the beginning of a published trace, with its
arrivals and with all its lengths scaled. A trace is scaled by writing it again with smaller blocks, which each tool is
told: prompts then share as much as before.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, assert_never

from mooncake_mesh.loadtest.trace_file import TRACE_BLOCK_TOKENS, TraceLine
from mooncake_mesh.loadtest.workloads import Replay, traced

_MS: Final = "0.001"
_PERCENTILE: Final = "90"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLoad:
    """``requests`` of equal lengths, ``streams`` at a time."""

    requests: int
    streams: int
    input_tokens: int
    output_tokens: int

    name: str = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoad:
    """The first ``requests`` of ``trace`` with blocks of ``block_tokens``; ``scaled`` is the file that says so."""

    requests: int
    trace: Path
    scaled: Path
    block_tokens: int

    name: str = "trace"


Load = RandomLoad | TraceLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the load goes to. ``tokenizer`` is a folder, ``hub_tokenizer`` its name in a cache of the hub's kind."""

    base_url: str
    model: str
    tokenizer: Path
    hub_tokenizer: str


def scaled_lines(lines: Iterable[TraceLine], block_tokens: int) -> list[str]:
    """*lines*, in order of arrival, as a trace whose blocks have *block_tokens*, as JSON."""
    ordered = list(lines)
    requests = traced(ordered, Replay(length_scale=block_tokens / TRACE_BLOCK_TOKENS))
    return [
        json.dumps(
            {
                "timestamp": round(1e3 * line.arrival_s),
                "input_length": request.input_tokens,
                "output_length": max(2, request.output_tokens),  # one token alone has no interval
                "hash_ids": line.block_ids,
            }
        )
        for line, request in zip(ordered, requests, strict=True)
    ]


def aiperf_command(programs: Path, served: Served, load: Load, out: Path) -> list[str]:
    """One worker and one record processor: it starts as many as there are cores otherwise, which the mesh needs."""
    command = [
        str(programs / "aiperf"), "profile", "--url", served.base_url, "--model", served.model,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", served.hub_tokenizer, "--use-server-token-count",
        "--extra-inputs", "ignore_eos:true", "--random-seed", "0",
        "--ui", "none", "--workers-max", "1", "--record-processor-service-count", "1", "--no-gpu-telemetry",
        "--output-artifact-dir", str(out),
    ]  # fmt: skip
    match load:
        case RandomLoad():
            command += [
                "--request-count", str(load.requests), "--concurrency", str(load.streams),
                "--prompt-input-tokens-mean", str(load.input_tokens),
                "--prompt-output-tokens-mean", str(load.output_tokens),
            ]  # fmt: skip
        case TraceLoad():
            command += [
                "--input-file", str(load.scaled), "--custom-dataset-type", "mooncake_trace", "--fixed-schedule",
                "--prompt-input-tokens-block-size", str(load.block_tokens),
            ]  # fmt: skip
        case _:
            assert_never(load)
    return command


def guidellm_command(programs: Path, served: Served, load: Load, out: Path) -> list[str]:
    command = [
        str(programs / "guidellm"), "run", "--backend", f"kind=openai_http,target={served.base_url}",
        "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={served.tokenizer}",
        "--output", f"kind=json,path={out / 'guidellm.json'}", "--disable-console-interactive",
    ]  # fmt: skip
    match load:
        case RandomLoad():
            data = f"kind=synthetic_text,prompt_tokens={load.input_tokens},output_tokens={load.output_tokens}"
            command += ["--profile", f"kind=concurrent,streams={load.streams}", "--data", data]
        case TraceLoad():
            trace = {
                "kind": "mooncake",
                "source": {"kind": "json_file", "path": str(load.scaled)},
                "hash_id_block_size": load.block_tokens,
                "time_scale": float(_MS),
            }
            command += ["--profile", "kind=replay", "--data", json.dumps(trace)]
        case _:
            assert_never(load)
    return command


def vllm_command(programs: Path, served: Served, load: Load, out: Path) -> list[str]:
    """Through a script of ours, see bench/peers/vllm_load.py."""
    script = Path(__file__).parent / "peers" / "vllm_load.py"
    command = [
        str(programs / "python"), str(script), "--backend", "openai", "--base-url", served.base_url,
        "--model", served.model, "--tokenizer", str(served.tokenizer), "--num-prompts", str(load.requests),
        "--ignore-eos", "--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", _PERCENTILE,
        "--save-result", "--result-dir", str(out), "--result-filename", "vllm.json", "--disable-tqdm",
    ]  # fmt: skip
    match load:
        case RandomLoad():
            command += [
                "--dataset-name", "random", "--random-input-len", str(load.input_tokens),
                "--random-output-len", str(load.output_tokens), "--max-concurrency", str(load.streams),
            ]  # fmt: skip
        case TraceLoad():
            command += [
                "--dataset-name", "timed_trace", "--dataset-path", str(load.scaled),
                "--timed-trace-chunk-hash-size", str(load.block_tokens), "--timed-trace-sec-multiplier", _MS,
            ]  # fmt: skip
        case _:
            assert_never(load)
    return command


def own_command(programs: Path, served: Served, load: Load, out: Path) -> list[str]:
    """`mooncake bench serve`, which writes to stdout: *out* is not used."""
    command = [str(programs / "python"), "-m", "mooncake_mesh", "bench", "serve", "--base-url", served.base_url]
    command += ["--model", served.model, "--requests", str(load.requests), "--json"]
    match load:
        case RandomLoad():
            command += [
                "--input-len", str(load.input_tokens), "--output-len", str(load.output_tokens),
                "--max-concurrency", str(load.streams),
            ]  # fmt: skip
        case TraceLoad():
            scale = load.block_tokens / TRACE_BLOCK_TOKENS
            command += ["--workload", "trace", "--trace", str(load.trace), "--length-scale", str(scale)]
        case _:
            assert_never(load)
    return command
