"""What this gateway's requests experienced, and how the conductor hears of it. Pure but for :meth:`Ledger.run`."""

import asyncio
from array import array
from collections.abc import Callable
from typing import Final

import structlog

from mooncake_mesh.errors import MeshError, MooncakeError, Rejected
from mooncake_mesh.gateway.api import TokenEvent, TokenRequest
from mooncake_mesh.policy.slo import longest_mean_s
from mooncake_proto.ids import InstanceId
from mooncake_proto.serving import Ending, Outcome, Outcomes, Placement

log = structlog.get_logger(__name__)

_REPORT_S: Final = 0.5
_MOST_UNREPORTED: Final = 10_000


class RequestAccount:
    """The times of one request, taken as its tokens are handed out."""

    def __init__(self, request: TokenRequest, started_s: float) -> None:
        self._request = request
        self._started_s = started_s
        self._first_s: float | None = None
        self._last_s = started_s
        self._intervals_s = array("d")
        self._cached_tokens = 0
        self._ending: Ending | None = None
        self._reason = ""

    def token(self, event: TokenEvent, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
            self._cached_tokens = event.cached_tokens or 0
        else:
            self._intervals_s.append(now_s - self._last_s)
        self._last_s = now_s
        if event.finish is not None:
            self._ending = Ending.FINISHED

    def satisfied(self) -> None:
        """The text is whole, whatever more could be drawn."""
        self._ending = Ending.FINISHED

    def failed(self, error: MooncakeError) -> None:
        is_refused = isinstance(error, Rejected) and self._first_s is None
        self._ending = Ending.REFUSED if is_refused else Ending.FAILED
        self._reason = error.reason if isinstance(error, Rejected) else error.code

    def outcome(self, computed_tokens: int, placement: Placement | None) -> Outcome:
        """How it ended; cancelled, if nobody has said anything else."""
        n = 0 if self._first_s is None else len(self._intervals_s) + 1
        return Outcome(
            ending=self._ending or Ending.CANCELLED,
            priority=self._request.priority,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=self._cached_tokens,
            computed_tokens=computed_tokens,
            generated_tokens=n,
            ttft_s=None if self._first_s is None else self._first_s - self._started_s,
            tbt_s=longest_mean_s(self._intervals_s),
            reason=self._reason,
            prefill="" if placement is None else placement.prefill.instance_id,
            decode="" if placement is None else placement.decode.instance_id,
        )


class Ledger:
    """Outcomes that the conductor has not heard of; the oldest go where there are too many."""

    def __init__(self) -> None:
        self._unreported: list[Outcome] = []

    def note(self, outcome: Outcome) -> None:
        self._unreported.append(outcome)
        del self._unreported[:-_MOST_UNREPORTED]

    async def run(self, instance_id: InstanceId, post: Callable[[Outcomes], None]) -> None:
        """Report until cancelled. What could not be sent is tried again."""
        while True:
            await asyncio.sleep(_REPORT_S)
            if not self._unreported:
                continue
            try:
                post(Outcomes(instance_id=instance_id, outcomes=tuple(self._unreported)))
            except MeshError as error:
                log.debug("outcomes_unreported", waiting=len(self._unreported), code=error.code)
            else:
                self._unreported.clear()
