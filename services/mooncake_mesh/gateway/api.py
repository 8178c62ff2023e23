"""The seam inside the gateway: doors (HTTP, SDK) above, the mesh below."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from mooncake_proto.client import RequestTrace
from mooncake_proto.control import ModelCard, StatusReport
from mooncake_proto.decisions import DecisionsReport
from mooncake_proto.ids import RequestId
from mooncake_proto.serving import FinishReason, Sampling, Stopping, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """One choice of one client request, tokenised: the unit the mesh runs.

    ``request_id`` is unique for each choice. ``cache_salt`` enters the root of the block keys, and so does ``tenant``
    unless tenants share their cache. Lower ``priority`` is more urgent (policy/request_class.py); requests of one
    priority share the mesh fairly between tenants, and between the ids in ``fairness_id`` where there are none.
    """

    request_id: RequestId
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    stopping: Stopping
    deadline_s: float
    tenant: str = ""
    cache_salt: str = ""
    priority: int = 0
    fairness_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One drawn token. The last event of a stream has ``finish`` set; a drawn stop token is reported too, in ``token``.

    Set on the first event: ``cached_tokens``, the prompt tokens found in the pool; and, as the worker says, how long
    the prompt waited for its turn and took to compute.
    """

    token: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """``ready`` when at least one prefill and one decode instance can serve; else ``reasons`` says what is missing."""

    ready: bool
    reasons: tuple[str, ...]


class Mesh(Protocol):
    """What the doors ask of the mesh."""

    def models(self) -> tuple[ModelCard, ...]:
        """Models that somebody serves now; empty while no worker is registered."""

    def readiness(self) -> Readiness: ...

    def generate(self, request: TokenRequest) -> AsyncGenerator[TokenEvent, None]:
        """Tokens of one choice as they are drawn.

        Ends after the event with ``finish``; or raises a RequestError (Rejected, Aborted, DeadlineExceeded …) or
        MeshError. Closing the generator early (``aclose``, or cancellation of the consuming task) cancels the request
        everywhere.
        """

    def satisfied(self, request_id: RequestId) -> None:
        """The consumer has the whole answer (a stop string): closing the generator is no loss of it."""

    def traces(self, request_id: str, tenant: str) -> tuple[RequestTrace, ...]:
        """What became of *tenant*'s request, for each of its choices; empty when it is not known any more."""

    async def report(self) -> StatusReport | None:
        """What the conductor knows; None while it does not answer."""

    async def decisions(self, *, after: int) -> DecisionsReport | None:
        """What the conductor decided after number *after*; None while it does not answer."""
