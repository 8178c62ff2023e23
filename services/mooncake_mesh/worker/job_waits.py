"""What a worker remembers of jobs beside its core: waits that a stop must end, and cancels that came first."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from mooncake_mesh.errors import Aborted
from mooncake_proto.ids import JobId

_MAX_EARLY_CANCELS: Final = 4096


class JobWaits:
    """Waits that can be ended from outside, without a task of their own: one at a time for each job."""

    def __init__(self) -> None:
        self._scopes: dict[JobId, asyncio.Timeout] = {}

    @asynccontextmanager
    async def interruptible(self, job_id: JobId) -> AsyncIterator[None]:
        """Raises Aborted when :meth:`interrupt` ends what is awaited inside; a call inside tells its peer.

        What is done already when the interrupt comes stays done: look at the job's ``stop`` afterwards.
        """
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[job_id] = scope
                try:
                    yield
                finally:
                    self._scopes.pop(job_id, None)
        except TimeoutError:
            raise Aborted(f"job {job_id} was stopped") from None

    def interrupt(self, job_id: JobId) -> None:
        """End the wait of a job, if it is in one."""
        scope = self._scopes.pop(job_id, None)
        if scope is not None:
            scope.reschedule(asyncio.get_running_loop().time())


class EarlyCancels:
    """Cancels of jobs that have not arrived (yet). Job ids are unique for ever, so remembering one harms nobody."""

    def __init__(self) -> None:
        self._job_ids: OrderedDict[JobId, None] = OrderedDict()

    def add(self, job_id: JobId) -> None:
        self._job_ids[job_id] = None
        if len(self._job_ids) > _MAX_EARLY_CANCELS:
            self._job_ids.popitem(last=False)

    def check(self, job_id: JobId) -> None:
        """Raise Aborted for a job whose cancel overtook it."""
        if job_id in self._job_ids:
            raise Aborted(f"job {job_id} was cancelled before it came")
