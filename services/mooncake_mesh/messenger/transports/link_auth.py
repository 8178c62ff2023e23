"""Who may open a link over TCP: both ends prove that they know the receiver's secret, without showing it. Pure.

The secret is drawn by the receiver for its life and told to a sender with the plan of a transfer, over the mesh's own
control channel: so whoever knows it was let in there. What travels, on each connection of a link::

    challenge  "MKC1" | nonce (32 bytes)                                              receiver → sender, at once
    hello      see frames.py | nonce (32 bytes) | proof (32 bytes)                    sender → receiver
    welcome    0x01 | proof (32 bytes)                                                receiver → sender

A proof is HMAC-SHA256 with the secret over who speaks, both nonces and the hello. Nonces are drawn for each connection,
so what was overheard opens no other one; each end has a word of its own, so its proof cannot be sent back to it.
"""

import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from mooncake_mesh.messenger.transports import frames
from mooncake_mesh.messenger.transports.frames import FrameError, Hello

SECRET_BYTES: Final = 32
_MAGIC: Final = b"MKC1"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_SENDER: Final = b"mooncake-mesh link: sender"
_RECEIVER: Final = b"mooncake-mesh link: receiver"

CHALLENGE_BYTES: Final = len(_MAGIC) + _NONCE_BYTES
HELLO_BYTES: Final = frames.HELLO.size + _NONCE_BYTES + _PROOF_BYTES
WELCOME_BYTES: Final = len(frames.WELCOME) + _PROOF_BYTES


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class Challenge:
    """The receiver's side of one connection. ``data`` goes to whoever connected."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self.data = _MAGIC + self._nonce

    def check(self, said: bytes) -> tuple[Hello, bytes]:
        """The hello in *said*, and the welcome that answers it. Raises FrameError unless *said* proves the secret."""
        if len(said) != HELLO_BYTES:
            raise FrameError("closed or cut short before the hello")
        hello, nonce = said[: frames.HELLO.size], said[frames.HELLO.size : -_PROOF_BYTES]
        if not hmac.compare_digest(said[-_PROOF_BYTES:], _proof(self._secret, _SENDER, self._nonce, nonce, hello)):
            raise FrameError("not proven to belong to this mesh")
        welcome = frames.WELCOME + _proof(self._secret, _RECEIVER, self._nonce, nonce, hello)
        return frames.unpack_hello(hello), welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The sender's side of one connection: ``said`` goes to the receiver, which must answer ``welcome``."""

    said: bytes
    welcome: bytes

    def is_welcome(self, data: bytes) -> bool:
        """Whether *data* proves that the receiver knows the secret too."""
        return hmac.compare_digest(data, self.welcome)


def answer(secret: bytes, challenge: bytes, hello: Hello) -> Answer:
    """What to say to *challenge*. Raises FrameError for bytes that are none."""
    if len(challenge) != CHALLENGE_BYTES or not challenge.startswith(_MAGIC):
        raise FrameError("not a receiver of this protocol")
    packed, theirs, ours = hello.pack(), challenge[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    return Answer(
        said=packed + ours + _proof(secret, _SENDER, theirs, ours, packed),
        welcome=frames.WELCOME + _proof(secret, _RECEIVER, theirs, ours, packed),
    )


def _proof(secret: bytes, who: bytes, receiver_nonce: bytes, sender_nonce: bytes, hello: bytes) -> bytes:
    """All parts but the last have a fixed length, so no two lists of parts make the same bytes."""
    return hmac.digest(secret, who + b"\0" + receiver_nonce + sender_nonce + hello, "sha256")
