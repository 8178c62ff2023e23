"""Root of the project's error tree, and the errors of the wire itself.

Every leaf has a stable ``code`` (it travels in error replies and in HTTP bodies) and says whether the same call may
succeed when it is tried again (``retryable``).
"""

from typing import ClassVar


class MooncakeError(Exception):
    """Base of every error this project raises on purpose."""

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False


class WireError(MooncakeError):
    """A message broke the wire contract; nothing of it was acted upon."""

    code = "wire_error"


class VersionMismatch(WireError):
    """The version frame is not ours."""

    code = "version_mismatch"


class MalformedMessage(WireError):
    """A frame is missing, not JSON, or a field has the wrong type.

    ``path`` names the bad field from the root of the body, such as ``sampling.top_p`` or ``entries[3].token``.
    """

    code = "malformed_message"

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class UnknownKind(WireError):
    """The kind frame names no message of this protocol version."""

    code = "unknown_kind"
