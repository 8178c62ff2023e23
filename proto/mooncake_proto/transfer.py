"""Blocks and slices: workers ↔ their node's messenger, and messenger ↔ messenger.

A worker first connects to the messenger's Unix socket (Attach tells its path), which hands it the arena's file
descriptor and, by staying open, proves that the worker is alive: when it closes, all that the worker held is released.

Moving KV, sender A and receiver B::

    decode  → B   Acquire(landing)     reserves the blocks the KV will land in; answered when all of it has landed
    prefill → A   StartSend            A asks B for the plan: OpenTransfer, answered by TransferPlan
    prefill → A   SliceReady           one-way, after the forward that wrote the slice has finished
            A → B SliceOffer | a TCP frame    B copies (shm), reads (rdma) or receives (tcp) it, and acknowledges
    prefill → A   FinishSend           answered when every slice is acknowledged, or by Failure; the job is released

An arena is written only by processes of its own node: a sender never writes into another node's memory, so revoking a
transfer needs nobody's consent but the receiver's. Plans are explicit: (logical block → arena block, generation).
"""

from dataclasses import dataclass, field

from mooncake_proto.codec import message
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.rdma import RdmaMemory
from mooncake_proto.shapes import HexSecret, HexSha256, Natural, PackedKeys


@message("transfer.attach")
@dataclass(frozen=True, slots=True, kw_only=True)
class Attach:
    """Worker or peer messenger → messenger. Answered by ArenaInfo; refused when block sizes differ.

    ``layout`` says what the bytes of a block mean (model, dtype, tokens): blocks kept on SSD are of one layout only.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    block_bytes: Natural
    layout: str = ""


@message("transfer.arena_info")
@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaInfo:
    """``socket_path`` hands out the arena's descriptor to processes of the same host (``host_id``)."""

    node_id: NodeId
    incarnation: Incarnation
    host_id: str
    socket_path: str
    block_bytes: Natural
    n_blocks: Natural


@message("transfer.acquire")
@dataclass(frozen=True, slots=True, kw_only=True)
class Acquire:
    """Blocks for one job: sealed ones under the longest known prefix of ``keys``, fresh ones for the rest.

    ``n_blocks`` counts all of them. At most ``max_cached_blocks`` come from the pool (the last prompt token is always
    computed), and SSD is read for none beyond ``read_limit_blocks``. They count for ``tenant``, who may have a quota.
    With ``fetch_from`` the messenger first tries to copy missing prefix blocks from that messenger. With
    ``landing`` set, the fresh blocks below ``landing_blocks`` are opened for that transfer, and the answer comes when
    their KV has landed (``Acquired.landed``) or the transfer has failed. Where the sender's messenger
    (``landing_from``) is the one that is asked, nothing is reserved before: the job gets the sender's blocks.
    Answered by Acquired or by Failure. Waits for room; cancelling the call or its deadline ends the wait.
    """

    job_id: JobId
    instance_id: InstanceId
    incarnation: Incarnation
    keys: PackedKeys
    n_blocks: Natural
    max_cached_blocks: Natural
    fetch_from: str = ""
    fetch_blocks: Natural = 0
    landing: TransferId | None = None
    landing_blocks: Natural = 0
    landing_layers: Natural = 0
    landing_from: str = ""
    tenant: str = ""
    read_limit_blocks: Natural | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """How the KV of a landing came in; times count from the moment it was reserved."""

    received_bytes: Natural
    first_slice_s: float
    last_slice_s: float


@message("transfer.acquired")
@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """``blocks`` in logical order; the first ``cached_blocks`` held valid KV already.

    ``fetched_blocks`` of those were copied from another node for this job.
    """

    job_id: JobId
    blocks: tuple[Natural, ...]
    cached_blocks: Natural
    fetched_blocks: Natural = 0
    landed: Landed | None = None


@message("transfer.grow")
@dataclass(frozen=True, slots=True, kw_only=True)
class Grow:
    """Job → how many more blocks it would like. Answered by Grown."""

    wanted: dict[str, Natural]


@message("transfer.grown")
@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """Job → its new blocks, perhaps fewer than wanted; a job that is missing got none (pool exhausted)."""

    blocks: dict[str, tuple[Natural, ...]]


@message("transfer.seal")
@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """One-way, worker → messenger: blocks ``first_block`` onwards of the job are whole; ``keys`` shares them."""

    job_id: JobId
    first_block: Natural
    keys: PackedKeys


@message("transfer.open_write")
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenWrite:
    """Stage of a prefill instance → messenger: it writes its layers of blocks ``first_block`` onwards of a job now.

    The job is that of another process, the instance's head, which may end at any time; its blocks go to nobody else
    before the write is closed, or the stage is gone. Answered by Ok, or by Failure when the job has ended already.
    """

    job_id: JobId
    instance_id: InstanceId
    incarnation: Incarnation
    first_block: Natural
    n_blocks: Natural


@message("transfer.close_write")
@dataclass(frozen=True, slots=True, kw_only=True)
class CloseWrite:
    """The write of OpenWrite is over. Answered by Ok, after every SliceReady that the stage sent before."""

    job_id: JobId
    incarnation: Incarnation
    first_block: Natural


@message("transfer.release")
@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The job is over at this worker and writes no more. Aborts its transfers.

    Answered by Ok; an unknown job is fine.
    """

    job_id: JobId


@message("transfer.start_send")
@dataclass(frozen=True, slots=True, kw_only=True)
class StartSend:
    """Prefill worker → its messenger, one-way: slices of ``job_id`` will go to the messenger at ``target``."""

    job_id: JobId
    transfer_id: TransferId
    target: str
    n_blocks: Natural
    layers: Natural
    deadline_s: float


@message("transfer.slice_ready")
@dataclass(frozen=True, slots=True, kw_only=True)
class SliceReady:
    """``n_layers`` layers from ``layer`` on of ``n_blocks`` logical blocks are written and will not change."""

    transfer_id: TransferId
    layer: Natural
    n_layers: Natural
    first_block: Natural
    n_blocks: Natural


@message("transfer.finish_send")
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishSend:
    """Answered by SendReport when all announced slices are acknowledged, by Failure when the transfer failed.

    Either way the job of the transfer is released then.
    """

    transfer_id: TransferId


@message("transfer.send_report")
@dataclass(frozen=True, slots=True, kw_only=True)
class SendReport:
    """``overlapped_bytes`` were acknowledged before FinishSend came, that is while prefill still computed."""

    transfer_id: TransferId
    transport: str
    sent_bytes: Natural
    overlapped_bytes: Natural
    skipped_blocks: Natural
    elapsed_s: float


@message("transfer.open")
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransfer:
    """Sender's messenger → receiver's. Waits for the landing to be reserved. Answered by TransferPlan or Failure.

    ``was_asked_for``: by PushBlocks, so the landing is reserved already, or its messenger began another life meanwhile.
    ``transports`` are those the sender would use, best first; ``rdma`` is its arena for those who read it by RDMA.
    """

    transfer_id: TransferId
    source: ArenaInfo
    transports: tuple[str, ...]
    rdma: RdmaMemory | None = None
    was_asked_for: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Logical block → block of the receiver's arena, with the generation that the right to write it is bound to."""

    logical: Natural
    block: Natural
    generation: Natural


@message("transfer.plan")
@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """``transport`` is what the receiver chose of those offered.

    Over tcp and tcp+tls ``link_secret`` proves at ``tcp_host``, ``tcp_port`` that the sender may connect; it is empty
    otherwise. Over tcp+tls the sender is to speak to the holder of the certificate ``tls_fingerprint`` only.
    """

    transfer_id: TransferId
    transport: str
    tcp_host: str
    tcp_port: Natural
    token: str
    slots: tuple[Slot, ...]
    link_secret: HexSecret = field(default="", repr=False)
    tls_fingerprint: HexSha256 = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedSlice:
    """``n_layers`` layers from ``layer`` on of one logical block, in the sender's arena block ``source_block``.

    ``checksum`` is XXH3-64 of its bytes, where the sender was configured to compute it.
    """

    logical: Natural
    layer: Natural
    n_layers: Natural
    source_block: Natural
    checksum: int | None


@message("transfer.slice_offer")
@dataclass(frozen=True, slots=True, kw_only=True)
class SliceOffer:
    """Sender's messenger → receiver's (shm, rdma): copy these. Answered by SliceAck or Failure."""

    transfer_id: TransferId
    slices: tuple[OfferedSlice, ...]


@message("transfer.slice_ack")
@dataclass(frozen=True, slots=True, kw_only=True)
class SliceAck:
    transfer_id: TransferId
    slices: Natural


@message("transfer.abort")
@dataclass(frozen=True, slots=True, kw_only=True)
class AbortTransfer:
    """Messenger → messenger: this end has given up. Answered by Ok after the last write has ended."""

    transfer_id: TransferId
    reason: str


@message("transfer.push_blocks")
@dataclass(frozen=True, slots=True, kw_only=True)
class PushBlocks:
    """Messenger → the messenger that holds a prefix: send the sealed blocks ``keys`` into our ``transfer_id``.

    Logical block i of the transfer is the block under the i-th key. ``job_id`` is whom it is for, ``tenant`` whose it
    is. Answered by Pushing.
    """

    transfer_id: TransferId
    target: str
    keys: PackedKeys
    deadline_s: float
    job_id: JobId | None = None
    tenant: str = ""


@message("transfer.pushing")
@dataclass(frozen=True, slots=True, kw_only=True)
class Pushing:
    """How many blocks, from the first key on, the holder really has and now sends."""

    transfer_id: TransferId
    n_blocks: Natural


@message("transfer.read_ahead")
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead:
    """One-way, conductor → messenger: ``job_id`` was placed and will want the prefix ``keys``, part of which is on SSD.

    It comes as a job of this node, or as a peer's PushBlocks for it. Forgotten with that job, or after ``keep_s``.
    """

    job_id: JobId
    keys: PackedKeys
    keep_s: float
    tenant: str = ""


@message("transfer.replicate")
@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    """One-way, conductor → messenger: keep a copy of the prefix ``keys``, which the messenger ``source`` holds.

    Nobody waits for it. One that is too many at a time, or for which there is no room, is not done.
    """

    keys: PackedKeys
    source: str
    tenant: str = ""


@message("transfer.pin_prefix")
@dataclass(frozen=True, slots=True, kw_only=True)
class PinPrefix:
    """Gateway → messenger: give up the prefix ``keys`` after all others, for ``keep_s`` from now on.

    It replaces what ``pin_id`` pinned before; without keys that ends. Answered by PrefixPinned: what is not in the
    arena is not pinned.
    """

    pin_id: str
    keys: PackedKeys
    keep_s: float


@message("transfer.prefix_pinned")
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPinned:
    """``n_blocks`` leading blocks of the prefix are in the arena, and pinned."""

    n_blocks: Natural
