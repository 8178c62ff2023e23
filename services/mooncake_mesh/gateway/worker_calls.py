"""What a gateway tells and asks workers about jobs that they have already."""

import asyncio
from time import monotonic
from typing import Final

import structlog

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_proto.control import Ok
from mooncake_proto.ids import JobId
from mooncake_proto.job_query import JobQuery, JobStanding
from mooncake_proto.serving import CancelJob, WorkerRef

log = structlog.get_logger(__name__)

_CANCEL_TIMEOUT_S: Final = 30.0
_CANCEL_FOR_S: Final = 60.0
_CANCEL_PAUSE_S: Final = 0.2
_QUERY_TIMEOUT_S: Final = 2.0


class WorkerCalls:
    """Over the connections of *workers*, until :meth:`close`, which comes before theirs."""

    def __init__(self, workers: Phonebook) -> None:
        self._workers = workers
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    async def cancel(self, worker: WorkerRef, job_id: JobId, reason: str) -> None:
        """Returns when nothing of the job is left there, or nobody has answered for a minute.

        A worker that was stopped, and given up for that, still has its jobs when it goes on. A next life on its address
        knows nothing of the job, and says so.
        """
        request = CancelJob(job_id=job_id, reason=reason)
        until_s = monotonic() + _CANCEL_FOR_S
        while not self._is_closed:
            try:
                await self._workers.get(worker.endpoint).call(request, Ok, timeout_s=_CANCEL_TIMEOUT_S)
                return
            except MooncakeError as error:
                log.info("cancel_undelivered", job_id=job_id, instance_id=worker.instance_id, code=error.code)
                if not error.retryable or monotonic() > until_s:
                    return
            await asyncio.sleep(_CANCEL_PAUSE_S)

    async def has_forgotten(self, worker: WorkerRef, job_id: JobId) -> bool:
        """Whether the worker says that it does not have the job. Its silence is for its lease to judge."""
        try:
            query = JobQuery(job_id=job_id)
            standing = await self._workers.get(worker.endpoint).call(query, JobStanding, timeout_s=_QUERY_TIMEOUT_S)
        except MooncakeError as error:
            log.info("job_query_unanswered", job_id=job_id, instance_id=worker.instance_id, code=error.code)
            return False
        return not standing.known
