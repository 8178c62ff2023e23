"""The only module that knows pyverbs. Importing it needs pyverbs and libibverbs; see the package for what to do then.

pyverbs never releases the GIL, so nothing here may block: completions are awaited on a file descriptor and polled when
it is readable. Work requests are freed by hand (pyverbs' own destructor for them has no effect), exactly once.
"""

import ipaddress
import os
import resource
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

try:  # as rdma-core named it from version 57 on
    from pyverbs import libibverbs_enums as ibv
except ImportError:
    from pyverbs import enums as ibv

from mooncake_mesh.config_rdma import MTUS, RdmaConfig
from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports.rdma.api import RdmaAccess, Verb
from mooncake_mesh.messenger.transports.rdma.devices import LinkLayer
from mooncake_mesh.messenger.transports.rdma.selection import Nic
from mooncake_proto.rdma import QpEnd

_OPCODES: Final = {
    Verb.READ: ibv.IBV_WR_RDMA_READ,
    Verb.WRITE: ibv.IBV_WR_RDMA_WRITE,
    Verb.WRITE_WITH_IMM: ibv.IBV_WR_RDMA_WRITE_WITH_IMM,
}
_REFUSED: Final = frozenset(
    {
        ibv.IBV_WC_LOC_LEN_ERR,
        ibv.IBV_WC_LOC_PROT_ERR,
        ibv.IBV_WC_REM_INV_REQ_ERR,
        ibv.IBV_WC_REM_ACCESS_ERR,
    }
)
_ERRORS: Final = {
    ibv.IBV_WC_LOC_LEN_ERR: "local length error",
    ibv.IBV_WC_LOC_QP_OP_ERR: "local queue pair error",
    ibv.IBV_WC_LOC_PROT_ERR: "local protection error",
    ibv.IBV_WC_WR_FLUSH_ERR: "flushed: the queue pair is in error",
    ibv.IBV_WC_REM_INV_REQ_ERR: "remote end: invalid request",
    ibv.IBV_WC_REM_ACCESS_ERR: "remote end: no access to that memory",
    ibv.IBV_WC_REM_OP_ERR: "remote end: operation failed",
    ibv.IBV_WC_RETRY_EXC_ERR: "no answer from the remote end",
    ibv.IBV_WC_RNR_RETRY_EXC_ERR: "remote end takes no more notices",
}
_POLL_BATCH: Final = 64
_MOST_READS: Final = 16
_MIN_RNR_TIMER: Final = 12  # 0.64 ms
_RNR_RETRIES: Final = 6
_SCRATCH_BYTES: Final = 64
RECEIVES: Final = 16
"""Receive requests that a queue pair keeps posted for notices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request: ``size_bytes`` between an address here and one there. ``immediate`` goes with WRITE_WITH_IMM."""

    number: int
    verb: Verb
    address: int
    lkey: int
    remote_address: int
    rkey: int
    size_bytes: int
    immediate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """``error`` is empty where all went well. ``immediate`` is set for a notice that came in on ``qp_num``."""

    number: int
    qp_num: int
    error: str
    is_refusal: bool
    immediate: int | None


class Adapter:
    """An open NIC with everything that its queue pairs share. ``fd`` is readable when there are completions."""

    def __init__(self, nic: Nic, config: RdmaConfig, *, max_outstanding: int) -> None:
        self.nic = nic
        self._config = config
        with _explained(f"{nic.name}: cannot be opened"):
            self._context = Context(name=nic.name)
            port, device = self._context.query_port(nic.port), self._context.query_device()
            self._lid: int = port.lid
            self._mtu = min(MTUS[port.active_mtu - 1], config.mtu or MTUS[-1])
            self._max_reads = min(_MOST_READS, device.max_qp_rd_atom, device.max_qp_init_rd_atom)
            self._pd = PD(self._context)
            self._channel, self.fd = _with_descriptor(lambda: CompChannel(self._context))
            if max_outstanding > device.max_cqe:
                raise TransferError(
                    f"{nic.name}: takes {device.max_cqe} requests at a time, the settings allow {max_outstanding}: "
                    "lower window or max_queue_pairs"
                )
            self._cq = CQ(self._context, max_outstanding, None, self._channel, 0)
            self._cq.req_notify()
            self._scratch = MR(self._pd, _SCRATCH_BYTES, ibv.IBV_ACCESS_LOCAL_WRITE)
        os.set_blocking(self.fd, False)

    def register(self, address: int, size_bytes: int, access: RdmaAccess) -> "Region":
        """Pin memory and let the NIC at it. The memory must stay mapped until the region is closed."""
        flags = ibv.IBV_ACCESS_LOCAL_WRITE | _remote_flags(access)
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        with _explained(f"{self.nic.name}: cannot register {size_bytes} bytes (memlock limit: {shown}; see ulimit -l)"):
            return Region(MR(self._pd, size_bytes, flags, address=address))

    def queue_pair(self, access: RdmaAccess, *, depth: int) -> "QueuePair":
        """A queue pair that is not connected yet; *access* is what the other end may do through it."""
        cap = QPCap(max_send_wr=depth, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=ibv.IBV_QPT_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=1)
        with _explained(f"{self.nic.name}: no queue pair"):
            return QueuePair(QP(self._pd, init), self._scratch, self._template(), _remote_flags(access), self)

    def completions(self) -> Iterator[Completion]:
        """All that is there. Call when ``fd`` is readable; it is armed again for what comes later."""
        self._channel.get_cq_event(self._cq)
        self._cq.ack_events(1)
        self._cq.req_notify()  # before polling: what completes from here on makes the descriptor readable
        return self.poll()

    def poll(self) -> Iterator[Completion]:
        """All that is there by now, at any time; costs no system call."""
        while True:
            count, entries = self._cq.poll(_POLL_BATCH)
            yield from (_completion(entry) for entry in entries)
            if count < _POLL_BATCH:
                return

    def close(self) -> None:
        """Everything that was made from this adapter must be closed before."""
        for part in (self._scratch, self._cq, self._channel, self._pd, self._context):
            part.close()

    def connection(self, end: QpEnd, peer: QpEnd, remote_flags: int) -> Any:
        """Attributes that take the queue pair at *end* to its ready state, connected to *peer*."""
        attributes = QPAttr(port_num=self.nic.port)
        attributes.pkey_index = self.nic.pkey_index
        attributes.qp_access_flags = ibv.IBV_ACCESS_LOCAL_WRITE | remote_flags
        attributes.path_mtu = MTUS.index(min(end.mtu, peer.mtu)) + 1
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = peer.qp_num, peer.psn, end.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = min(end.max_reads, peer.max_reads)
        attributes.min_rnr_timer, attributes.rnr_retry = _MIN_RNR_TIMER, _RNR_RETRIES
        attributes.timeout, attributes.retry_cnt = self._config.ack_timeout, self._config.retries
        attributes.ah_attr = self._route(peer)
        return attributes

    def _route(self, peer: QpEnd) -> Any:
        """On Ethernet by address; on InfiniBand by LID, and by address only into another subnet."""
        there = ipaddress.IPv6Address(peer.gid)
        is_ethernet = self.nic.link_layer is LinkLayer.ETHERNET
        if not is_ethernet and int(there) >> 64 == int(self.nic.gid.address) >> 64:
            return AHAttr(dlid=peer.lid, is_global=0, port_num=self.nic.port)
        route = GlobalRoute(
            dgid=GID(there.exploded),
            sgid_index=self.nic.gid.index,
            hop_limit=64,
            traffic_class=self._config.traffic_class,
        )
        return AHAttr(dlid=peer.lid, gr=route, is_global=1, port_num=self.nic.port)

    def _template(self) -> QpEnd:
        return QpEnd(
            qp_num=0,
            psn=secrets.randbits(24),
            gid=str(self.nic.gid.address),
            lid=self._lid,
            mtu=self._mtu,
            max_reads=self._max_reads,
        )


class Region:
    """Memory that a NIC may use."""

    def __init__(self, mr: Any) -> None:
        self._mr = mr
        self.lkey: int = mr.lkey
        self.rkey: int = mr.rkey

    def close(self) -> None:
        self._mr.close()


class QueuePair:
    """A reliable connection. After close() the NIC touches no memory on its behalf."""

    def __init__(self, qp: Any, scratch: Any, template: QpEnd, remote_flags: int, adapter: Adapter) -> None:
        self._qp = qp
        self._scratch = scratch
        self._remote_flags = remote_flags
        self._adapter = adapter
        self.qp_num: int = qp.qp_num
        self.end = QpEnd(
            qp_num=self.qp_num,
            psn=template.psn,
            gid=template.gid,
            lid=template.lid,
            mtu=template.mtu,
            max_reads=template.max_reads,
        )

    def connect(self, peer: QpEnd) -> None:
        """Be ready to send to *peer* and to be asked by it. Raises TransferError (wrong address, no route)."""
        if peer.mtu not in MTUS:
            raise TransferError(f"{self._adapter.nic.name}: the other end has an MTU of {peer.mtu}")
        with _explained(f"{self._adapter.nic.name}: cannot connect to {peer.gid} (GID, MTU or route)"):
            self._qp.to_rts(self._adapter.connection(self.end, peer, self._remote_flags))

    def post(self, works: Sequence[Work]) -> None:
        """Hand *works* to the NIC, in order and with one call. After TransferError only close() helps."""
        if not works:
            return
        elements: list[Any] = []
        requests: list[Any] = []
        try:
            for work in reversed(works):
                elements.append(SGE(work.address, work.size_bytes, work.lkey))
                request = SendWR(
                    wr_id=work.number,
                    opcode=_OPCODES[work.verb],
                    num_sge=1,
                    sg=[elements[-1]],
                    send_flags=ibv.IBV_SEND_SIGNALED,
                    imm_data=socket.htonl(work.immediate),
                    next_wr=requests[-1] if requests else None,
                )
                requests.append(request)
                request.set_wr_rdma(work.rkey, work.remote_address)
            with _explained(f"{self._adapter.nic.name}: cannot send"):
                self._qp.post_send(requests[-1])
        finally:
            for part in (*requests, *elements):
                part.close()

    def post_receives(self, count: int) -> None:
        """Take *count* more notices. A notice has no payload; pyverbs wants an element all the same."""
        for _ in range(count):
            element = SGE(self._scratch.buf, 0, self._scratch.lkey)
            request = RecvWR(num_sge=1, sg=[element])
            try:
                with _explained(f"{self._adapter.nic.name}: cannot receive"):
                    self._qp.post_recv(request)
            finally:
                request.close()
                element.close()

    def break_off(self) -> None:
        """Into the error state, as after a failure on the wire: everything posted completes as flushed."""
        with _explained(f"{self._adapter.nic.name}: cannot be broken off"):
            self._qp.modify(QPAttr(qp_state=ibv.IBV_QPS_ERR), ibv.IBV_QP_STATE)

    def close(self) -> None:
        self._qp.close()


class _explained:
    """Turns pyverbs' errors into TransferError that begins with *what*."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, PyverbsError):
            raise TransferError(f"{self._what}: {error}") from error


def _remote_flags(access: RdmaAccess) -> int:
    flags = {
        RdmaAccess.NONE: 0,
        RdmaAccess.READ: ibv.IBV_ACCESS_REMOTE_READ,
        RdmaAccess.READ_WRITE: ibv.IBV_ACCESS_REMOTE_READ | ibv.IBV_ACCESS_REMOTE_WRITE,
    }
    return int(flags[access])


def _completion(entry: Any) -> Completion:
    status = entry.status
    is_notice = status == ibv.IBV_WC_SUCCESS and entry.opcode == ibv.IBV_WC_RECV_RDMA_WITH_IMM
    return Completion(
        number=entry.wr_id,
        qp_num=entry.qp_num,
        error="" if status == ibv.IBV_WC_SUCCESS else _ERRORS.get(status, f"completion status {status}"),
        is_refusal=status in _REFUSED,
        immediate=socket.ntohl(entry.imm_data) if is_notice else None,
    )


def _with_descriptor(make: Callable[[], Any]) -> tuple[Any, int]:
    """A completion channel and its descriptor. pyverbs before 45 does not tell it: it is the one that is new."""
    before = _event_descriptors()
    channel = make()
    known = getattr(channel, "fd", None)
    if known is not None:
        return channel, int(known)
    (new,) = _event_descriptors() - before
    return channel, new


def _event_descriptors() -> set[int]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if "infinibandevent" in target:
            found.add(int(link.name))
    return found
