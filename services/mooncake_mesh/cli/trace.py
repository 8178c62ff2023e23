"""``mooncake trace``: the life of one request as a timeline, as the gateway that served it remembers it.

Exit codes: 0 when the request is known, 1 when it is not, 2 when the gateway cannot be reached or refuses the question.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mooncake_mesh.client import DEFAULT_ENDPOINT, RequestTrace, SyncMooncakeClient, TraceStep
from mooncake_mesh.errors import MooncakeError

_BAR_WIDTH: Final = 40
_PLAIN_WIDTH: Final = 160
_STYLES: Final = {"queued": "yellow", "prefill": "cyan", "kv transfer": "magenta", "decode": "green"}
_TROUBLES: Final = ("not placed", "job failed", "worker lost", "deadline passed")


def run(argv: Sequence[str]) -> int:
    """Run the command; its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        with SyncMooncakeClient(arguments.gateway, keys=arguments.keys) as client:
            traces = client.trace(arguments.request_id)
    except MooncakeError as error:
        sys.stderr.write(f"mooncake trace: no answer from the gateway at {arguments.gateway}: {error}\n")
        return 2
    if not traces:
        sys.stderr.write(f"mooncake trace: this gateway does not know {arguments.request_id} (any more)\n")
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(trace) for trace in traces], ensure_ascii=False) + "\n")
        return 0
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    for trace in traces:
        show(trace, console)
    return 0


def show(trace: RequestTrace, console: Console) -> None:
    """A line of facts, then one line for each step: when it ended, how long it took, where, and what is known of it."""
    began = datetime.fromtimestamp(trace.started_at).strftime("%H:%M:%S.%f")[:-3]
    state = "over" if trace.is_over else "still running"
    facts = f"{trace.prompt_tokens} prompt tokens, {trace.generated_tokens} drawn, came at {began}, {state}"
    console.print(f"[bold]{trace.request_id}[/bold]: {facts}", highlight=False)
    whole_s = max((step.at_s for step in trace.steps), default=0.0)
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("right", "left", "right", "left", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for step in trace.steps:
        took = f"{1e3 * step.took_s:,.1f} ms" if step.took_s else ""
        style = "red" if step.what in _TROUBLES else _STYLES.get(step.what, "")
        bar = Text(_bar(step, whole_s), style=style)
        table.add_row(f"{step.at_s:.3f} s", Text(step.what, style=style), took, bar, step.where, Text(step.detail))
    console.print(table)


def _bar(step: TraceStep, whole_s: float) -> str:
    """Where in the request's life the step lies."""
    if whole_s <= 0:
        return ""
    start = round(_BAR_WIDTH * max(0.0, step.at_s - step.took_s) / whole_s)
    end = round(_BAR_WIDTH * min(step.at_s, whole_s) / whole_s)
    if step.took_s <= 0 or end <= start:
        return " " * min(start, _BAR_WIDTH - 1) + "│"
    return " " * start + "█" * (end - start)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mooncake trace",
        description="Show the life of one request as a timeline.",
        epilog="Where API keys are in use, the tenant's own is taken from MOONCAKE_API_KEY.",
        allow_abbrev=False,
    )
    parser.add_argument("request_id", metavar="ID", help="the id of its answer (chatcmpl-…, cmpl-… or resp_…)")
    parser.add_argument("--gateway", default=DEFAULT_ENDPOINT, help="its gateway's SDK endpoint (default %(default)s)")
    parser.add_argument("--keys", type=Path, help="folder with the keys of a client (mooncake keys issue)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
