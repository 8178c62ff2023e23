"""What a worker's JobFailed is to the client of its request."""

from typing import Final

from mooncake_mesh.errors import MooncakeError, Rejected
from mooncake_proto.serving import JobFailed

_LEAST_RETRY_AFTER_S: Final = 1.0


def refusal_of(failed: JobFailed) -> Rejected:
    """What a worker's refusal is to the client: one like that of the conductor."""
    return Rejected(failed.message, unavailable=False, retry_after_s=failed.retry_after_s or _LEAST_RETRY_AFTER_S)


class JobError(MooncakeError):
    """A worker's own word on why a job failed."""

    def __init__(self, failed: JobFailed) -> None:
        super().__init__(f"{failed.instance_id}: {failed.message}")
        self.code = failed.code  # type: ignore[misc]
        self.retryable = failed.retryable  # type: ignore[misc]
