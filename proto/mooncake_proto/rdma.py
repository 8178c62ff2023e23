"""RDMA between two nodes: what one end has to know of the other's memory, and how two queue pairs find each other.

Only this travels over ZeroMQ; the data does not. Who reads opens a queue pair of its own and asks the owner of the
memory, with ConnectQp, for one at its end; after QpConnected both are ready. The owner may drop its end at any time
(the reader's next transfer fails there and connects again), and a reader that connects anew replaces its old one.
"""

from dataclasses import dataclass

from mooncake_proto.codec import message
from mooncake_proto.shapes import Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class QpEnd:
    """One end of a reliable connection: what the other one needs to send to it.

    ``psn`` is the sequence number of its first packet, ``mtu`` the largest it can take, ``max_reads`` how many reads it
    answers at a time. ``lid`` counts on InfiniBand only.
    """

    qp_num: Natural
    psn: Natural
    gid: str
    lid: Natural
    mtu: Natural
    max_reads: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class NicKey:
    """The key that opens a memory through one of its owner's NICs."""

    nic: str
    rkey: Natural


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaMemory:
    """Registered memory of the engine ``engine``, which answers ConnectQp at ``endpoint``.

    ``preferred`` NICs are near the memory, ``secondary`` ones serve when those fail.
    """

    engine: str
    endpoint: str
    address: Natural
    size_bytes: Natural
    preferred: tuple[NicKey, ...]
    secondary: tuple[NicKey, ...]


@message("rdma.connect_qp")
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectQp:
    """From the reader's ``nic`` to the owner's ``peer_nic``. Answered by QpConnected or Failure."""

    engine: str
    nic: str
    peer_nic: str
    end: QpEnd


@message("rdma.qp_connected")
@dataclass(frozen=True, slots=True, kw_only=True)
class QpConnected:
    end: QpEnd
