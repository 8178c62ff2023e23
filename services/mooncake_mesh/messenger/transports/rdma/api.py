"""The words that the engine, its caller and the verbs share."""

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mooncake_proto.rdma import ConnectQp, QpConnected, RdmaMemory


class Verb(enum.Enum):
    READ = "read"
    WRITE = "write"
    WRITE_WITH_IMM = "write_with_imm"


class RdmaAccess(enum.Enum):
    """What the other end may do with our memory."""

    NONE = "none"
    READ = "read"
    READ_WRITE = "read_write"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An engine has written into our memory and says so with a number of its choice."""

    engine: str
    number: int


Connect = Callable[[RdmaMemory, ConnectQp], Awaitable[QpConnected]]
"""Carries ConnectQp to the engine that owns the memory, over whatever channel there is. Raises MooncakeError."""
