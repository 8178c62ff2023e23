"""The stages of one prefill instance: its head ↔ the further stages. Activations take another way.

::

    head → each stage     JoinPipeline   answered by StageJoined; last stage first: each is told the next one's door
    head → each far one   DeliverKv      answered by Ok: from now on KV of its layers goes there
    head → each stage     StageChunk     answered by StageChunkDone or Failure, when the stage is done with that chunk
    head → each stage     DropJob        one-way: chunks of that job are answered with Failure, sooner than computed;
                                         nothing of it is kept

Activations go from stage to stage over the transports that KV takes too, as slice *n* for the chunk of number *n*.
Its place is slot ``n % slots``, free again when every stage has answered chunk *n*: the head sends no more before.

A *far* stage is on another node than its head. It computes on memory of its own, whose blocks the head gives to jobs.
Over the transports go, before the first chunk, the K and V of its layers of what was cached (as slices of the stage's
blocks), and those of each chunk to the head's door (as slices named by chunk and block; see prefill/far_core.py).
"""

from dataclasses import dataclass, field

from mooncake_proto.codec import message
from mooncake_proto.ids import Incarnation, InstanceId, JobId, NodeId, TransferId
from mooncake_proto.serving import Sampling, TokenLogprob
from mooncake_proto.shapes import HexSecret, HexSha256, Natural, PackedKeys, PackedTokens, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDoor:
    """Where a process takes what another sends it. ``shm_path`` is for processes of the same host (``host_id``).

    Over tcp ``link_secret`` proves that the sender may connect; with ``tls_fingerprint``, that of the receiver's
    certificate, the connection is encrypted.
    """

    host_id: str
    shm_path: str
    tcp_host: str
    tcp_port: Natural
    token: str
    link_secret: HexSecret = field(repr=False)
    tls_fingerprint: HexSha256 = ""


@message("pipeline.join")
@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPipeline:
    """``pipeline`` is drawn anew for each attempt: what a stage had of a former one it drops.

    ``stage`` counts from 0, the head. ``next_door`` is the next stage's, absent for the last one. A stage of another
    node than ``node_id``, the head's, is a far one.
    """

    pipeline: Incarnation
    stage: Natural
    stages: Natural
    slots: Positive
    slot_tokens: Positive
    next_door: StageDoor | None
    node_id: NodeId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a far stage computes on: ``n_blocks`` blocks. ``door`` takes what of them is cached."""

    n_blocks: Positive
    door: StageDoor


@message("pipeline.joined")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageJoined:
    """The stage has layers ``first_layer`` .. ``end_layer - 1`` of ``layers``; ``door`` takes activations for it.

    ``arena`` is the messenger whose arena it writes, which must be the head's; a far one has a ``memory`` instead.
    """

    instance_id: InstanceId
    incarnation: Incarnation
    arena: Incarnation
    fingerprint: str
    dtype: str
    first_layer: Natural
    end_layer: Natural
    layers: Natural
    hidden_bytes: Natural
    door: StageDoor
    memory: StageMemory | None = None


@message("pipeline.deliver_kv")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverKv:
    """``door`` is the head's. A chunk has at most ``chunk_blocks`` blocks, by which slices are named."""

    pipeline: Incarnation
    door: StageDoor
    chunk_blocks: Positive


@message("pipeline.chunk")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageChunk:
    """Positions ``start`` .. ``start + n_tokens - 1`` of a job whose KV lies in ``blocks`` of the node's arena, or of a
    far stage's memory.

    Layers that are written are announced under ``transfer_id``, if there is one. ``sampling`` says that a token is to
    be drawn (the last chunk, at the last stage): after the whole prompt ``tokens``, of which the last ``drawn_tokens``
    were drawn before.

    ``keys`` are those of the whole blocks of the prompt of ``prompt_tokens``. They come with its first chunk, as the
    stage may have the prefix of another sequence, and with its last one, as another may begin like this one.
    """

    pipeline: Incarnation
    number: Natural
    job_id: JobId
    transfer_id: TransferId | None
    start: Natural
    n_tokens: Positive
    blocks: tuple[Natural, ...]
    sampling: Sampling | None = None
    tokens: PackedTokens = b""
    drawn_tokens: Natural = 0
    banned: tuple[Natural, ...] = ()
    prompt_tokens: Natural = 0
    keys: PackedKeys = b""


@message("pipeline.chunk_done")
@dataclass(frozen=True, slots=True, kw_only=True)
class StageChunkDone:
    """The chunk's KV is written and announced, or has come to the head; its activations are at the next stage.

    ``token``: what was drawn. ``compute_s`` is the engine's time, ``waited_s`` how long the stage had nothing to do
    before.
    """

    number: Natural
    compute_s: float
    waited_s: float
    token: Natural | None = None
    logprob: TokenLogprob | None = None


@message("pipeline.drop")
@dataclass(frozen=True, slots=True, kw_only=True)
class DropJob:
    pipeline: Incarnation
    job_id: JobId
