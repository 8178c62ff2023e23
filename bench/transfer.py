"""How fast KV moves between two processes: `python -m bench.transfer`.

Each path runs in processes of its own and answers the same questions: blocks of a size, one or 16 in a call, call after
call. A round puts every question to all paths in turn, so that a noisy machine disturbs all alike; figures are medians
over the rounds. Limits are measured in the same rounds: memory copies, bare sockets, reading another process's memory.
"""

import argparse
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from time import monotonic
from typing import Final

from bench.peers.environments import MOONCAKE, NIXL, NotInstalled, Peer, install
from bench.report import Report
from bench.transfer_child import POOL_BYTES, SIZES, Question
from bench.transfer_rig import Rig, RigFailed
from bench.transfer_rows import BATCH, Measured, MeasuredPath, TransferReport, add_grids, judge, name_of, rdma_rows
from mooncake_mesh.config import PagesKind

_SMALLEST: Final = 4 << 10
_QUICK_SIZES: Final = (64 << 10, 1 << 20, 4 << 20)
_POOL_SIZES: Final = (64 << 10, 1 << 20, 4 << 20)
_JUDGED_SIZES: Final = (1 << 20,)
_POOLS: Final = ("pool-auto", "pool-auto-xxh3", "pool-tcp", "pool-tcp-xxh3")
_AT_ONCE: Final = 16
_LEAST_ROUNDS: Final = 3

_ALL_SIZES: Final = (_SMALLEST, *SIZES)
PATHS: Final = (
    MeasuredPath(label="memory copy, 1 thread", rig="limits", op="memcpy-1"),
    MeasuredPath(label="memory copy, 2 threads", rig="limits", op="memcpy-2"),
    MeasuredPath(label="process_vm_readv", rig="limits", op="readv", sizes=_ALL_SIZES),
    MeasuredPath(label="bare sockets, 2 connections", rig="limits", op="sockets", sizes=_ALL_SIZES),
    MeasuredPath(label="memory copy, 1 thread, 2 MiB pages", rig="limits-huge", op="memcpy-1"),
    MeasuredPath(label="process_vm_readv, 2 MiB pages", rig="limits-huge", op="readv", sizes=_ALL_SIZES),
    MeasuredPath(label="shm, hand-off", rig="links", op="handoff", sizes=_ALL_SIZES),
    MeasuredPath(label="shm, one copy", rig="links", op="shm", sizes=_ALL_SIZES),
    MeasuredPath(label="shm, one copy, checksums", rig="links", op="shm-sealed"),
    MeasuredPath(label="tcp", rig="links", op="tcp", sizes=_ALL_SIZES),
    MeasuredPath(label="tcp, checksums", rig="links", op="tcp-sealed"),
    MeasuredPath(label="tcp, TLS", rig="links", op="tls", sizes=_ALL_SIZES),
    MeasuredPath(label="tcp, TLS, checksums", rig="links", op="tls-sealed"),
    MeasuredPath(label="shm, one copy, 2 MiB pages", rig="links-huge", op="shm", sizes=_ALL_SIZES),
    MeasuredPath(label="tcp, 2 MiB pages", rig="links-huge", op="tcp", sizes=_ALL_SIZES),
    *[
        MeasuredPath(label=f"pool {op}, {how}", rig=f"pool-{rig}", op=op, sizes=sizes)
        for how, rig, sizes in (
            ("auto", "auto", _POOL_SIZES),
            ("auto, checksums", "auto-xxh3", _JUDGED_SIZES),  # each size starts messengers of its own
            ("tcp", "tcp", _POOL_SIZES),
            ("tcp, checksums", "tcp-xxh3", _JUDGED_SIZES),
        )
        for op in ("put", "get")
    ],
    MeasuredPath(label="disk, direct reads, 2 threads", rig="disk", op="disk-read", sizes=_JUDGED_SIZES),
    MeasuredPath(label="pool get from SSD, auto", rig="pool-auto", op="ssd-get", sizes=_JUDGED_SIZES),
    MeasuredPath(label="pool get from SSD, tcp", rig="pool-tcp", op="ssd-get", sizes=_JUDGED_SIZES),
    MeasuredPath(label="Mooncake engine, tcp write", rig="engine", op="write", sizes=_ALL_SIZES),
    MeasuredPath(label="Mooncake engine, tcp read", rig="engine", op="read", sizes=_ALL_SIZES),
    MeasuredPath(label="Mooncake Store, put", rig="store", op="put", sizes=_POOL_SIZES),
    MeasuredPath(label="Mooncake Store, get", rig="store", op="get", sizes=_POOL_SIZES),
    MeasuredPath(label="Mooncake Store, get from SSD", rig="ssd", op="ssd-get", sizes=_JUDGED_SIZES),
    MeasuredPath(label="NIXL tcp, write", rig="nixl-tcp", op="write", sizes=_ALL_SIZES),
    MeasuredPath(label="NIXL tcp, read", rig="nixl-tcp", op="read", sizes=_ALL_SIZES),
    MeasuredPath(label="NIXL default, write", rig="nixl", op="write", sizes=_ALL_SIZES),
    MeasuredPath(label="NIXL default, read", rig="nixl", op="read", sizes=_ALL_SIZES),
)
PEERS: Final = ("engine", "store", "ssd", "nixl-tcp", "nixl")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes: a minute without --peers")
    parser.add_argument("--seconds", type=float, help=f"rounds go on for so long, {_LEAST_ROUNDS} at least")
    parser.add_argument(
        "--transfers", type=int, default=10_000, help="small ones, to see what they leave behind (the aim: 100000)"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, metavar="PEER", help=f"also these (all when none is named): {PEERS}"
    )
    parser.add_argument("--rdma", action="store_true", help="also RDMA, in the kernel of scripts/rdma-vm")
    Report.add_flags(parser)
    args = parser.parse_args()
    peers = PEERS if args.peers == [] else args.peers or ()
    report = TransferReport()
    with ExitStack() as running:
        rigs = _start(running, peers, report)
        paths = [path for path in PATHS if path.rig in rigs]
        seconds = args.seconds if args.seconds is not None else (30.0 if args.quick else 270.0)
        measured = _measure(rigs, paths, seconds, report, quick=args.quick)
        add_grids(measured, paths, report)
        judge(measured, report)
        if "pool-auto" in rigs:
            _judge_life(rigs["pool-auto"], report, args.transfers // (10 if args.quick else 1))
    if args.rdma:
        rdma_rows(report)
    report.finish(args)


# --- processes --------------------------------------------------------------------------------------------------------


def _start(running: ExitStack, peers: Sequence[str], report: TransferReport) -> dict[str, Rig]:
    """All that can be started here; a note for each that cannot."""
    rigs: dict[str, Rig] = {}
    for name in ("limits", "limits-huge", "disk", "links", "links-huge", *_POOLS, *peers):
        try:
            rigs[name] = _rig(name)
        except (RigFailed, NotInstalled) as error:
            report.note(f"{name}: not measured, {error}")
        else:
            running.callback(_close, rigs, name)
    return rigs


def _close(rigs: dict[str, Rig], name: str) -> None:
    rigs[name].close()


def _rig(name: str) -> Rig:
    match name:
        case "disk":
            return Rig.ours("bench.transfer_disk")
        case "limits" | "links":
            return Rig.ours(f"bench.transfer_{name}", PagesKind.SMALL.value)
        case "limits-huge" | "links-huge":
            return Rig.ours(f"bench.transfer_{name.removesuffix('-huge')}", PagesKind.HUGETLB.value)
        case _ if name in _POOLS:
            _, transport, checksum = f"{name}-none".split("-")[:3]
            return Rig.ours("bench.transfer_messengers", transport, checksum)
        case "engine" | "store" | "ssd":
            return _peer(MOONCAKE, f"bench.peers.mooncake_{name}", {})
        case _:
            return _peer(NIXL, "bench.peers.nixl_agents", {"UCX_TLS": "tcp"} if name == "nixl-tcp" else {}, spins=True)


def _peer(peer: Peer, module: str, variables: dict[str, str], *, spins: bool = False) -> Rig:
    environment = install(peer)
    return Rig([str(environment.python), "-m", module], env={**environment.variables, **variables}, spins=spins)


# --- rounds -----------------------------------------------------------------------------------------------------------


def _measure(
    rigs: dict[str, Rig], paths: Sequence[MeasuredPath], seconds: float, report: TransferReport, *, quick: bool
) -> Measured:
    """Every question to every path, round after round. A path that fails twice is left out from then on."""
    measured: Measured = defaultdict(dict)
    failures: Counter[str] = Counter()
    answer_s = 0.05 if quick else 0.12
    number, ends_s = -1, monotonic() + seconds
    while number < _LEAST_ROUNDS or monotonic() < ends_s:
        for size, batch in _questions(quick=quick):
            for path in _rotated(paths, number):
                if size not in path.sizes or failures[path.rig] > 1:
                    continue
                question = Question(op=path.op, size_bytes=size, batch=batch, seconds=answer_s)
                try:
                    answer = rigs[path.rig].ask(question if number >= 0 else _warming_up(question, path))
                except RigFailed as error:
                    failures[path.rig] += 1
                    report.note(f"{path.label}: failed at {name_of(size)} x {batch}: {error}")
                    _restart(rigs, path.rig, failures)
                    continue
                if number >= 0:
                    measured[path.label, replace(question, seconds=0.0)][number] = answer
        number += 1
    report.note(f"{number} rounds; answers of {answer_s:g} s; pools on ordinary pages, touched before")
    return measured


def _warming_up(question: Question, path: MeasuredPath) -> Question:
    """Our own receivers map a pool page by page when they first copy from it: walk over all of it."""
    walk = min(64, POOL_BYTES // (question.size_bytes * BATCH))
    is_ours = path.rig not in PEERS and question.batch == BATCH
    return replace(question, seconds=0.0, least_calls=max(3, walk) if is_ours else 3)


def _restart(rigs: dict[str, Rig], name: str, failures: Counter[str]) -> None:
    rigs[name].close()
    try:
        rigs[name] = _rig(name)
    except (RigFailed, NotInstalled):
        failures[name] += 1


def _questions(*, quick: bool) -> list[tuple[int, int]]:
    sizes = _QUICK_SIZES if quick else SIZES
    return [(_SMALLEST, 1), *[(size, batch) for size in sizes for batch in (1, BATCH)]]


def _rotated(paths: Sequence[MeasuredPath], number: int) -> list[MeasuredPath]:
    """Another one first in each round: nobody always comes after the same neighbour."""
    start = number * 5 % len(paths)
    return [*paths[start:], *paths[:start]]


# --- the life of a messenger ------------------------------------------------------------------------------------------


def _judge_life(rig: Rig, report: TransferReport, transfers: int) -> None:
    """Starting with a large arena, and what many small transfers leave behind."""
    for op, what in (
        ("start", "start of a messenger with a 1 GiB arena, to the first worker's mapping"),
        ("map", "of that, registration and mapping of an arena that was touched, every page reached"),
    ):
        answer = rig.ask(Question(op=op, size_bytes=1 << 30, batch=1, seconds=0.0))
        report.row(what, answer.p50_us / 1e6, "s", aim="< 1", met=answer.p50_us < 1e6, n=answer.calls)
    small = Question(op="singly", size_bytes=64 << 10, batch=_AT_ONCE, seconds=1e9)
    rig.ask(replace(small, most_calls=transfers // _AT_ONCE // 10))
    descriptors, memory_bytes = rig.descriptors_and_bytes()
    answer = rig.ask(replace(small, most_calls=transfers // _AT_ONCE))
    descriptors_after, memory_bytes_after = rig.descriptors_and_bytes()
    grown_mib = (memory_bytes_after - memory_bytes) / 2**20
    report.row("small transfers between messengers", answer.calls * _AT_ONCE / answer.seconds, "1/s", n=transfers)
    report.row(
        f"descriptors opened by {transfers:,} transfers",
        descriptors_after - descriptors,
        "",
        aim="0",
        met=descriptors_after <= descriptors,
        baseline=descriptors,
    )
    report.row(
        f"memory taken by {transfers:,} transfers",
        grown_mib,
        "MiB",
        aim="< 4",
        met=grown_mib < 4,
        baseline=memory_bytes / 2**20,
    )


if __name__ == "__main__":
    main()
