"""Identifiers. One NewType per category, so that the type checker refuses a request id where an instance id is due."""

import secrets
from typing import Final, NewType

RequestId = NewType("RequestId", str)
"""One client request, minted by the gateway (a client's own id is a label only)."""

JobId = NewType("JobId", str)
"""One attempt to run one choice of a request on a pair of instances; unique for ever."""

TransferId = NewType("TransferId", str)
InstanceId = NewType("InstanceId", str)
NodeId = NewType("NodeId", str)
MessageId = NewType("MessageId", str)

Incarnation = NewType("Incarnation", str)
"""Drawn anew at every start of a process: a restarted worker is a different one on the same address."""

BlockId = NewType("BlockId", int)
"""Index of a block in its node's arena."""

BlockKey = NewType("BlockKey", bytes)
"""Hash of a block and of its whole prefix, BLOCK_KEY_BYTES long."""

BLOCK_KEY_BYTES: Final = 16


def new_incarnation() -> Incarnation:
    """A fresh 64-bit random incarnation, 16 hex digits."""
    return Incarnation(secrets.token_hex(8))
