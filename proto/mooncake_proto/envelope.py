"""Frames of one message, and the envelope that travels in its header.

::

    frame 0   b"mooncake/1"              protocol version
    frame 1   b"serving.prefill_job"     kind, UTF-8
    frame 2   {"id": .., "re": .., "deadline_s": .., "cause": .., "body": {..}, "frames": ["tokens", "keys"]}
    frame 3+  one payload frame for each name in "frames": the fields of type bytes

On a ROUTER socket the routing identity stands before frame 0. ``re`` ties a reply to its request, ``deadline_s`` is
relative (clocks of two machines are never compared), ``cause`` carries the id of what set this message off into every
log line that it leads to. Payload frames are named, never positional.
"""

from dataclasses import dataclass
from typing import Final

from mooncake_proto.ids import MessageId

PROTOCOL_VERSION: Final = 1
VERSION_FRAME: Final = b"mooncake/%d" % PROTOCOL_VERSION

MAX_HEADER_BYTES: Final = 8 << 20
MAX_PAYLOAD_BYTES: Final = 64 << 20
MAX_FRAMES: Final = 16

NO_MESSAGE: Final = MessageId("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What surrounds a body. ``id`` is empty on one-way messages, ``re`` on everything but replies."""

    id: MessageId = NO_MESSAGE
    re: MessageId = NO_MESSAGE
    deadline_s: float | None = None
    cause: str = ""
