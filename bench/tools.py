"""Other people's load tools against a mesh: `python -m bench.tools --tools mooncake,aiperf,guidellm,vllm`.

A mesh is started, by default of the fake engine. Each tool is installed into an environment of its own the first time,
and sends two short loads: prompts that share nothing, and the beginning of the conversation trace, scaled. Printed is
what the tool says, as baseline what the gateway counted in /metrics meanwhile, and their ratio: what two clocks at two
ends of a socket say of the same requests. `mooncake bench serve` is one of the tools. A tool that cannot be installed
or fails is named under the table, and the rest goes on.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.request import urlopen

from bench.mesh import local_mesh
from bench.peers.environments import AIPERF, GUIDELLM, NotInstalled, install
from bench.peers.serving_engines import install as install_server
from bench.report import Report, say
from bench.tools_load import (
    Load,
    RandomLoad,
    Served,
    TraceLoad,
    aiperf_command,
    guidellm_command,
    own_command,
    scaled_lines,
    vllm_command,
)
from bench.tools_results import Figures, GatewayCounters, read_aiperf, read_gateway, read_guidellm, read_vllm
from bench.tools_tokenizer import into_hub_cache, write_byte_tokenizer
from bench.traces import TRACES
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model
from mooncake_mesh.loadtest.trace_file import read_trace_file

_TIMEOUT_S: Final = 240.0
_HUB_NAME: Final = "mooncake/tokenizer"
_FAKE: Final = (
    "--engine", "fake", "--fake-prefill-s-per-token", "0.0005", "--fake-decode-s-base", "0.02",
    "--fake-decode-s-per-slot", "0.002", "--fake-output", "utf8",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """``programs`` makes its environment and names the folder of its programs, or raises NotInstalled. Its report is
    ``result`` in the folder that the command is given, or its output."""

    name: str
    programs: Callable[[], Path]
    command: Callable[[Path, Served, Load, Path], list[str]]
    result: str
    read: Callable[[str], Figures]
    variables: dict[str, str] = field(default_factory=dict)


TOOLS: Final = (
    Tool(
        name="mooncake",
        programs=lambda: Path(sys.executable).parent,
        command=own_command,
        result="stdout",
        read=read_vllm,
    ),
    Tool(
        name="aiperf",
        programs=lambda: install(AIPERF).python.parent,
        command=aiperf_command,
        result="profile_export_aiperf.json",
        read=read_aiperf,
    ),
    Tool(
        name="guidellm",
        programs=lambda: install(GUIDELLM).python.parent,
        command=guidellm_command,
        result="guidellm.json",
        read=read_guidellm,
    ),
    Tool(
        name="vllm",
        programs=lambda: install_server("vllm", say) / "bin",
        command=vllm_command,
        result="vllm.json",
        read=read_vllm,
        variables={"VLLM_NO_USAGE_STATS": "1"},
    ),
)


class ToolFailed(Exception):
    """It ended badly or left no report; the text says how."""


def main() -> int:
    """0 when every tool made its runs."""
    args = _parser().parse_args()
    wanted = args.tools.split(",")
    if unknown := set(wanted) - {tool.name for tool in TOOLS}:
        sys.stderr.write(f"bench.tools: no such tools: {', '.join(sorted(unknown))}\n")
        return 2
    report = Report("tools", f"{args.engine} engine; baseline: the gateway's /metrics of the same run; times are means")
    with tempfile.TemporaryDirectory(prefix="mooncake-tools-") as temporary:
        folder = Path(temporary)
        tokenizer = _tokenizer(args.engine, folder)
        loads = _loads(args, folder)
        with local_mesh(_FAKE if args.engine == "fake" else ()) as mesh:
            served = Served(
                base_url=f"http://{mesh.host}:{mesh.port}",
                model=mesh.model,
                tokenizer=tokenizer,
                hub_tokenizer=_HUB_NAME,
            )
            for tool in (tool for tool in TOOLS if tool.name in wanted):
                _use(tool, served, loads, folder, args.keep or folder, report)
    report.finish(args)
    return 1 if report.notes else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.tools", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    names = ",".join(tool.name for tool in TOOLS)
    add("--tools", default=names, metavar="NAMES", help=f"by commas (default: {names})")
    add("--engine", default="fake", choices=["fake", "transformers"], help="transformers: the real small model")
    add("--requests", type=int, default=16, metavar="N", help="of each load")
    add("--streams", type=int, default=4, metavar="N", help="requests at a time, of the random load")
    add("--input-len", type=int, default=128, metavar="N", help="prompt tokens of the random load")
    add("--output-len", type=int, default=16, metavar="N", help="answer tokens of the random load")
    add("--block-tokens", type=int, default=16, metavar="N", help="what a block of 512 tokens of the trace becomes")
    add("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of the published traces")
    add("--keep", type=Path, metavar="DIR", help="keep what the tools write there")
    Report.add_flags(parser)
    return parser


def _tokenizer(engine: str, folder: Path) -> Path:
    made = write_byte_tokenizer(folder / "bytes") if engine == "fake" else resolve_model(DEFAULT_MODEL)
    into_hub_cache(made, folder / "huggingface", _HUB_NAME)
    return made


def _loads(args: argparse.Namespace, folder: Path) -> list[Load]:
    """Without the trace file only the random one, which is said."""
    loads: list[Load] = [
        RandomLoad(
            requests=args.requests,
            streams=args.streams,
            input_tokens=args.input_len,
            output_tokens=args.output_len,
        )
    ]
    trace = args.traces / "conversation_trace.jsonl"
    if not trace.exists():
        say(f"no load by a trace: {trace} does not exist (--traces)")
        return loads
    scaled = folder / "trace.jsonl"
    lines = scaled_lines(islice(read_trace_file(trace), args.requests), args.block_tokens)
    scaled.write_text("".join(f"{line}\n" for line in lines))
    return [
        *loads,
        TraceLoad(requests=args.requests, trace=trace, scaled=scaled, block_tokens=args.block_tokens),
    ]


def _use(tool: Tool, served: Served, loads: Sequence[Load], folder: Path, keep: Path, report: Report) -> None:
    """All *loads* by one tool, told in *report*."""
    try:
        say(f"{tool.name}: its environment")
        programs = tool.programs()
        for load in loads:
            say(f"{tool.name}: {load.name}")
            out = keep.absolute() / f"{tool.name}-{load.name}"
            out.mkdir(parents=True, exist_ok=True)
            before = _counters(served)
            said = run(tool, tool.command(programs, served, load, out), out, folder / "huggingface")
            tell(report, f"{tool.name}, {load.name}", said, (_counters(served) - before).figures(said))
    except (NotInstalled, ToolFailed) as error:
        report.note(f"{tool.name}: {error}")


def _counters(served: Served) -> GatewayCounters:
    with urlopen(f"{served.base_url}/metrics") as answer:
        return read_gateway(answer.read().decode())


def run(tool: Tool, command: Sequence[str], out: Path, hub_home: Path) -> Figures:
    """Run *command* and read its report in *out*. Nothing of it is left running. Raises ToolFailed."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(hub_home), **tool.variables}
    with (
        (out / "stdout").open("wb") as stdout,
        (out / "stderr").open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "bench.guard", *command],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env=environment,
        ) as guard,  # when its stdin is closed, all that it started is ended
    ):
        try:
            code = guard.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ToolFailed(f"not ready after {_TIMEOUT_S:g} s") from None
    try:
        return tool.read((out / tool.result).read_text())
    except (OSError, LookupError, ValueError) as error:
        lines = [line for name in ("stdout", "stderr") for line in (out / name).read_text(errors="replace").split("\n")]
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise ToolFailed(f"exit code {code}, no report ({error!r}); its last words: {last[:200]}") from error


def tell(report: Report, title: str, tool: Figures, gateway: Figures) -> None:
    """Rows of one run: the tool's figures with the gateway's as their baseline."""
    rows = [
        ("answered", tool.answered, "requests", gateway.answered),
        ("failed", tool.failed, "requests", gateway.failed),
        ("TTFT", 1e3 * tool.ttft_s, "ms", 1e3 * gateway.ttft_s),
        ("TPOT", 1e3 * tool.tpot_s, "ms", 1e3 * gateway.tpot_s),
        ("answers", tool.output_tokens_per_s, "tokens/s", gateway.output_tokens_per_s),
    ]
    if tool.hit_rate is not None:
        rows.append(("hit rate", tool.hit_rate, "of tokens", gateway.hit_rate or 0.0))
    for what, value, unit, baseline in rows:
        report.row(f"{title}: {what}", value, unit, baseline=baseline)


if __name__ == "__main__":
    sys.exit(main())
