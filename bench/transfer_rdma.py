"""``scripts/rdma-vm python -m bench.transfer_rdma``: the RDMA engine beside a bare pyverbs loop, on real verbs.

Both read another process's memory, slice for slice of the same size and with the same number in flight; the bare loop
does nothing else and busy-polls. Their rounds are interleaved. Under Soft-RoCE the ratio means something and the
figures do not: the kernel of scripts/rdma-vm has one CPU, which is the NIC as well.
"""

import argparse
import asyncio
import dataclasses
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Final

import numpy as np
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

try:  # as rdma-core named it from version 57 on
    from pyverbs import libibverbs_enums as ibv
except ImportError:
    from pyverbs import enums as ibv

from bench.report import Report
from bench.transfer_child import SIZES, Answer, Question, offsets, timed, timed_async
from mooncake_mesh.config_rdma import MTUS, RdmaConfig
from mooncake_mesh.errors import TransferError
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_mesh.mesh.rpc import RpcServer
from mooncake_mesh.messenger.transports.rdma.batch import Piece, cut
from mooncake_mesh.messenger.transports.rdma.engine import RdmaEngine
from mooncake_mesh.messenger.transports.rdma.memory import LocalMemory
from mooncake_proto.rdma import ConnectQp, NicKey, QpConnected, QpEnd, RdmaMemory

POOL_BYTES: Final = 64 << 20
BATCH: Final = 4
LEAST_RATIO: Final = 0.85
_LONE: Final = (4 << 10, 64 << 10)
_ENGINE, _BARE = "rdma read", "bare pyverbs read"
_CONFIG: Final = RdmaConfig()

Samples = dict[tuple[str, Question], list[Answer]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transfer_rdma", description=__doc__)
    Report.add_flags(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure of a round")
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        asyncio.run(_serve(args.serve))
        return
    samples = _measure(args.rounds, args.seconds)
    report = Report("transfer_rdma", "one-sided reads between two processes, Soft-RoCE")
    _rows(samples, report)
    report.finish(args)


# --- the process that is read -----------------------------------------------------------------------------------------


async def _refuse(*_: object) -> QpConnected:
    raise TransferError("asks for nothing")


async def _serve(endpoint: str) -> None:
    engine = RdmaEngine(_CONFIG, engine_id=f"served-{os.getpid()}", connect=_refuse)
    memory = memoryview(mmap.mmap(-1, POOL_BYTES))
    np.frombuffer(memory, np.uint8)[:] = 1
    local = engine.register(memory)
    async with asyncio.TaskGroup() as tasks:
        RpcServer(endpoint, {ConnectQp: lambda request, _: engine.accept(request)}, tasks)
        print(json.dumps(dataclasses.asdict(local.describe(engine.engine_id, endpoint))), flush=True)
        await asyncio.Event().wait()


def _described(line: str) -> RdmaMemory:
    fields = json.loads(line)
    for name in ("preferred", "secondary"):
        fields[name] = tuple(NicKey(**key) for key in fields[name])
    return RdmaMemory(**fields)


# --- the process that reads -------------------------------------------------------------------------------------------


def _measure(rounds: int, seconds: float) -> Samples:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "bench.transfer_rdma", "--serve", f"ipc://{folder}/served.ipc"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
            try:
                assert served.stdout is not None
                return asyncio.run(_interleaved(rounds, seconds, _described(served.stdout.readline())))
            finally:
                served.kill()


async def _interleaved(rounds: int, seconds: float, remote: RdmaMemory) -> Samples:
    peers = Phonebook()

    async def connect(owner: RdmaMemory, request: ConnectQp) -> QpConnected:
        return await peers.get(owner.endpoint).call(request, QpConnected, timeout_s=30.0)

    memory = memoryview(mmap.mmap(-1, POOL_BYTES))
    np.frombuffer(memory, np.uint8)[:] = 0
    engine = RdmaEngine(_CONFIG, engine_id="reader", connect=connect)
    local = engine.register(memory)
    bare = _BareReader(engine, memory, remote)
    bare.connect((await connect(remote, bare.request)).end)
    samples: Samples = {}
    for _ in range(rounds):
        for question in _questions(seconds):
            answer = await timed_async(question, partial(_read, engine, local, remote, question))
            samples.setdefault((_ENGINE, question), []).append(answer)
            answer = timed(question, partial(_read_bare, bare, question))
            samples.setdefault((_BARE, question), []).append(answer)
    assert np.frombuffer(memory, np.uint8).all(), "not everything was read"
    bare.close()
    engine.close()
    peers.close()
    return samples


async def _read(engine: RdmaEngine, local: LocalMemory, remote: RdmaMemory, question: Question, call: int) -> None:
    await engine.read(local, remote, _pieces(question, call))


def _read_bare(bare: "_BareReader", question: Question, call: int) -> None:
    bare.read(_pieces(question, call))


def _pieces(question: Question, call: int) -> list[Piece]:
    places = offsets(question, call, POOL_BYTES)
    return [Piece(local_offset=at, remote_offset=at, size_bytes=question.size_bytes) for at in places]


def _questions(seconds: float) -> list[Question]:
    sizes = [(size, batch) for batch in (1, BATCH) for size in SIZES] + [(4 << 10, 1)]
    return [Question(op="read", size_bytes=size, batch=batch, seconds=seconds) for size, batch in sizes]


class _BareReader:
    """A queue pair of its own and a loop around it, nothing more."""

    def __init__(self, engine: RdmaEngine, memory: memoryview, remote: RdmaMemory) -> None:
        nic = engine.nics[0]
        self._nic, self._remote = nic, remote
        self._context = Context(name=nic.name)
        self._pd = PD(self._context)
        self._cq = CQ(self._context, 2 * _CONFIG.window)
        self._address = np.frombuffer(memory, np.uint8).ctypes.data
        self._mr = MR(self._pd, len(memory), ibv.IBV_ACCESS_LOCAL_WRITE, address=self._address)
        cap = QPCap(max_send_wr=_CONFIG.window, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=ibv.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=1)
        self._qp = QP(self._pd, init)
        mtu = MTUS[self._context.query_port(nic.port).active_mtu - 1]
        end = QpEnd(qp_num=self._qp.qp_num, psn=1, gid=str(nic.gid.address), lid=0, mtu=mtu, max_reads=16)
        self.request = ConnectQp(engine="bare", nic=nic.name, peer_nic=remote.preferred[0].nic, end=end)

    def connect(self, peer: QpEnd) -> None:
        attributes = QPAttr(port_num=self._nic.port)
        attributes.qp_access_flags = ibv.IBV_ACCESS_LOCAL_WRITE
        attributes.path_mtu = MTUS.index(min(peer.mtu, self.request.end.mtu)) + 1
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.qp_num, peer.psn, 1
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(16, peer.max_reads)
        attributes.min_rnr_timer, attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = 12, 14, 6, 6
        # The peer's address is ours: both are on this machine's only device.
        route = GlobalRoute(dgid=GID(self._nic.gid.address.exploded), sgid_index=self._nic.gid.index, hop_limit=64)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=self._nic.port)
        self._qp.to_rts(attributes)

    def read(self, pieces: Sequence[Piece]) -> None:
        slices = cut(pieces, _CONFIG.slice_bytes)
        rkey = self._remote.preferred[0].rkey
        posted = done = 0
        while done < len(slices):
            while posted < len(slices) and posted - done < _CONFIG.window:
                piece = slices[posted]
                element = SGE(self._address + piece.local_offset, piece.size_bytes, self._mr.lkey)
                request = SendWR(opcode=ibv.IBV_WR_RDMA_READ, num_sge=1, sg=[element], send_flags=ibv.IBV_SEND_SIGNALED)
                request.set_wr_rdma(rkey, self._remote.address + piece.remote_offset)
                self._qp.post_send(request)
                request.close()
                element.close()
                posted += 1
            count, completions = self._cq.poll(_CONFIG.window)
            assert all(entry.status == ibv.IBV_WC_SUCCESS for entry in completions)
            done += count

    def close(self) -> None:
        for part in (self._qp, self._mr, self._cq, self._pd, self._context):
            part.close()


# --- rows -------------------------------------------------------------------------------------------------------------


def _rows(samples: Samples, report: Report) -> None:
    for (label, question), answers in samples.items():
        if label == _ENGINE:
            _compare(question, answers, samples[_BARE, question], report)
    for label in (_ENGINE, _BARE):
        for size in _LONE:
            answers = next(
                a for (name, q), a in samples.items() if name == label and (q.size_bytes, q.batch) == (size, 1)
            )
            for name, values in (("p50", [a.p50_us for a in answers]), ("p99", [a.p99_us for a in answers])):
                report.row(
                    f"{label}, lone {size >> 10} KiB {name}", median(values), "µs", n=sum(a.calls for a in answers)
                )


def _compare(question: Question, ours: Sequence[Answer], bare: Sequence[Answer], report: Report) -> None:
    """Small blocks are compared without an aim: there the loop's turn counts, not the data."""
    size, values = question.size_bytes, [answer.gb_per_s for answer in ours]
    ratio = median(mine.gb_per_s / other.gb_per_s for mine, other in zip(ours, bare, strict=True))
    judged = size >= 1 << 20
    report.row(
        f"{_ENGINE} / {_BARE}, {f'{size >> 20} MiB' if judged else f'{size >> 10} KiB'} x {question.batch}",
        median(values),
        "GB/s",
        baseline=median(answer.gb_per_s for answer in bare),
        aim=f"≥ {LEAST_RATIO:g} x" if judged else "",
        met=ratio >= LEAST_RATIO if judged else None,
        n=sum(answer.calls for answer in ours),
        spread=(min(values), max(values)),
        cpu_s_per_gb=median(answer.cpu_s_per_gb for answer in ours),
    )


if __name__ == "__main__":
    main()
