"""What long prompts do to those who are being answered: `python -m bench.interference`.

Some streams are being generated all the time while 6,000-token prompts arrive at a fixed rate, the same for every
server. This project computes the prompts on one core and the streams on the other, and has both for either while there
is nothing to do for the other; vLLM has both cores for both, with chunked prefill and without it. Measured are the
streams' TBT (the mean of the longest 10 % of all intervals between tokens), their goodput (tokens a second of the
streams that kept to the objective) and the prompts' TTFT. The servers take turns, a window each, while the others are
frozen.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from bench.peers.environments import NotInstalled
from bench.peers.serving_engines import install
from bench.report import Report, say
from bench.serving_client import Prompts, Reply, RequestFailed, Target, complete
from bench.serving_measures import compare
from bench.serving_servers import (
    CONTEXT_TOKENS,
    OURS,
    NotStarted,
    Server,
    ServerPlan,
    free_port,
    our_plan,
    running,
    vllm_plan,
    write_config,
)
from mooncake_mesh.engine.model_files import DEFAULT_MODEL, resolve_model

_SEED: Final = 11
_STREAM_PROMPT_TOKENS: Final = 128
_TAIL_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The load: ``streams`` at a time of ``stream_tokens`` each, and a long prompt every ``every_s``, for
    ``window_s``."""

    streams: int
    stream_tokens: int
    long_tokens: int
    every_s: float
    window_s: float
    objective_s: float


FULL: Final = Offered(streams=4, stream_tokens=192, long_tokens=6000, every_s=30.0, window_s=60.0, objective_s=0.25)
QUICK: Final = Offered(streams=2, stream_tokens=64, long_tokens=2048, every_s=8.0, window_s=16.0, objective_s=0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is offered, how often to each server, and where the texts come from."""

    offered: Offered
    rounds: int
    prompts: Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What one server did with the offered load."""

    tbt_s: float
    tokens_per_s: float
    goodput_tokens_per_s: float
    long_ttft_s: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.interference", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round with shorter prompts")
    parser.add_argument("--rounds", type=int, help="windows of each server (default: 2)")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="time between two long prompts")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--ours", default="", metavar="FLAGS", help="flags for `mooncake up`")
    Report.add_flags(parser)
    args = parser.parse_args()
    model = resolve_model(args.model)
    offered = QUICK if args.quick else FULL
    load = Load(
        offered=replace(offered, every_s=args.every or offered.every_s),
        rounds=args.rounds or (1 if args.quick else 2),
        prompts=Prompts(model / "tokenizer.json", _SEED),
    )
    report = Report(
        "interference",
        f"{offered.streams} streams, a {offered.long_tokens}-token prompt every {load.offered.every_s:g} s; "
        f"goodput: TBT ≤ {offered.objective_s:g} s; ratios of one round",
    )
    with tempfile.TemporaryDirectory(prefix="mooncake-interference-") as folder:
        plans = [our_plan(free_port(), model, write_config(Path(folder) / "mooncake.toml"), args.ours.split())]
        plans += _vllm_plans(model, report)
        found = _measure(plans, Path(folder), load, report)
    tell(report, found)
    report.finish(args)


def _vllm_plans(model: Path, report: Report) -> list[ServerPlan]:
    try:
        home = install("vllm", say)
    except NotInstalled as error:
        report.note(f"vllm is not compared, it cannot be installed: {error}")
        return []
    whole = ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={CONTEXT_TOKENS}"]
    return [
        vllm_plan(free_port(), model, home, name="vllm, chunked prefill", flags=["--enable-chunked-prefill"]),
        vllm_plan(free_port(), model, home, name="vllm, whole prompts", flags=whole),
    ]


def _measure(plans: Sequence[ServerPlan], folder: Path, load: Load, report: Report) -> dict[str, list[Window | None]]:
    """Windows by server; None for one that failed."""
    found: dict[str, list[Window | None]] = {}
    with ExitStack() as stack:
        servers = []
        for plan in plans:
            try:
                servers.append(stack.enter_context(running(plan, folder, say)))
            except NotStarted as error:
                report.note(f"{plan.name} is not compared: {error}")
        for _ in range(load.rounds):
            for server in servers:
                found.setdefault(server.name, []).append(_asked(server, load, report))
    return found


def _asked(server: Server, load: Load, report: Report) -> Window | None:
    window = None
    with server.awake() as target:
        try:
            window = asyncio.run(_window(target, load.offered, load.prompts))
        except* (OSError, RequestFailed, TimeoutError) as group:
            report.note(f"{server.name}: a window failed: {group.exceptions[0]}")
    say(f"{server.name}: {window}")
    return window


async def _window(target: Target, offered: Offered, prompts: Prompts) -> Window:
    """Streams from the start on; long prompts arrive after a first half of their interval. All that began ends."""
    await complete(target, prompts.text(_STREAM_PROMPT_TOKENS), 4)
    began_s = perf_counter()
    ends_s = began_s + offered.window_s
    streamed: list[Reply] = []
    long: list[Reply] = []

    async def stream() -> None:
        while perf_counter() < ends_s:
            streamed.append(await complete(target, prompts.text(_STREAM_PROMPT_TOKENS), offered.stream_tokens))

    async def long_prompt(text: str) -> None:
        long.append(await complete(target, text, 2))

    async with asyncio.TaskGroup() as clients:
        for _ in range(offered.streams):
            clients.create_task(stream())
        due_s = began_s + offered.every_s / 2
        while due_s < ends_s:
            await asyncio.sleep(max(0.0, due_s - perf_counter()))
            clients.create_task(long_prompt(prompts.text(offered.long_tokens)))
            due_s += offered.every_s
    return summarised(streamed, long, offered, perf_counter() - began_s)


def summarised(streamed: Sequence[Reply], long: Sequence[Reply], offered: Offered, elapsed_s: float) -> Window:
    """A stream is good when its own TBT keeps to the objective."""
    good = [reply for reply in streamed if tbt_s(reply.intervals_s) <= offered.objective_s]
    return Window(
        tbt_s=tbt_s([interval_s for reply in streamed for interval_s in reply.intervals_s]),
        tokens_per_s=sum(reply.output_tokens for reply in streamed) / elapsed_s,
        goodput_tokens_per_s=sum(reply.output_tokens for reply in good) / elapsed_s,
        long_ttft_s=median(reply.ttft_s for reply in long) if long else float("nan"),
    )


def tbt_s(intervals_s: Sequence[float]) -> float:
    """The mean of the longest 10 %, of one interval at least; 0 where there is none."""
    if not intervals_s:
        return 0.0
    count = max(1, round(_TAIL_SHARE * len(intervals_s)))
    return sum(sorted(intervals_s)[-count:]) / count


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A column of windows. ``aim`` is for the ratio to each peer: at most that, or at least where ``is_floor``."""

    name: str
    unit: str
    of: Callable[[Window], float]
    aim: float | None = None
    is_floor: bool = False

    def is_met(self, ratio: float) -> bool | None:
        if self.aim is None:
            return None
        return ratio >= self.aim if self.is_floor else ratio <= self.aim


def _tbt_ms(window: Window) -> float:
    return 1e3 * window.tbt_s


QUANTITIES: Final = (
    Quantity(name="TBT of the streams", unit="ms", of=_tbt_ms, aim=0.3),
    Quantity(name="goodput", unit="tok/s", of=attrgetter("goodput_tokens_per_s"), aim=1.0, is_floor=True),
    Quantity(name="output of the streams", unit="tok/s", of=attrgetter("tokens_per_s")),
    Quantity(name="TTFT of the long prompts", unit="s", of=attrgetter("long_ttft_s")),
)


def tell(report: Report, found: Mapping[str, Sequence[Window | None]]) -> None:
    """Rows of each quantity, one for each peer; without any, our own figures."""
    peers = [name for name in found if name != OURS]
    for quantity in QUANTITIES:
        samples = {name: [[quantity.of(one)] if one else [] for one in windows] for name, windows in found.items()}
        ours = samples.get(OURS, [])
        if not peers and any(ours):
            report.row(quantity.name, median(one[0] for one in ours if one), quantity.unit, n=len(ours))
        for peer in peers:
            if compared := compare(ours, samples[peer]):
                sign = "≥" if quantity.is_floor else "≤"
                report.row(
                    f"{quantity.name}, beside {peer}",
                    compared.value,
                    quantity.unit,
                    baseline=compared.baseline,
                    ratio=compared.ratio,
                    aim="" if quantity.aim is None else f"{sign} {quantity.aim:g}×",
                    met=quantity.is_met(compared.ratio),
                    n=len(compared.ratios),
                    spread=(min(compared.ratios), max(compared.ratios)),
                )


if __name__ == "__main__":
    main()
