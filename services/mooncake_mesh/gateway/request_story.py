"""What became of the last requests, for who asks afterwards (``mooncake trace``): pure.

All that happens to a request passes its gateway, so the story is whole without any other process. Times within a worker
(queue, prefill) are the worker's own and end with the message that brought them.
"""

from collections import OrderedDict
from typing import Final

from mooncake_mesh.errors import MooncakeError, Rejected
from mooncake_mesh.gateway.api import TokenRequest
from mooncake_mesh.gateway.request_events import (
    CallerLeft,
    DeadlinePassed,
    JobsAccepted,
    NotPlaced,
    Placed,
    RequestEvent,
    Started,
    WorkerLost,
)
from mooncake_proto.client import RequestTrace, TraceStep
from mooncake_proto.serving import DecodeGranted, FirstToken, JobFailed, Placement, TokenEntry

_MAX_STEPS: Final = 64
_MAX_STORIES: Final = 512
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_")


class RequestStory:
    """One choice of a request, from its core's events. ``started_at`` is in Unix seconds, all else monotonic."""

    def __init__(self, request: TokenRequest, started_s: float, started_at: float) -> None:
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.is_over = False
        self._prompt_tokens = len(request.prompt)
        self._started_s = started_s
        self._started_at = started_at
        self._steps: list[TraceStep] = []
        self._asked_s = started_s
        self._placement: Placement | None = None
        self._decoding_s: float | None = None
        self._token_s = started_s
        self._slowest_s = 0.0
        self._tokens = 0
        self._handing_s: float | None = None

    def trace(self) -> RequestTrace:
        return RequestTrace(
            request_id=self.request_id,
            started_at=self._started_at,
            is_over=self.is_over,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._tokens,
            steps=tuple(self._steps),
        )

    def note(self, event: RequestEvent, now_s: float) -> None:
        """*event* happens to the request. Those that come too late for it are noted as well."""
        match event:
            case TokenEntry():  # first: every token passes here
                self._token(event, now_s)
            case Started():
                self._step(now_s, "received")
            case Placed(placement=placement):
                self._placed(placement, now_s)
            case NotPlaced(error=error):
                self._step(now_s, "not placed", took_s=now_s - self._asked_s, detail=_reason(error))
                self._asked_s = now_s
            case JobsAccepted():
                self._step(now_s, "jobs accepted", where=self._workers())
            case FirstToken():
                self._first_token(event, now_s)
            case DecodeGranted():
                self._handed_over(now_s, "all of it is there")
                self._step(now_s, "decoding granted", where=self._decode())
            case JobFailed(instance_id=instance_id, code=code, message=message):
                self._step(now_s, "job failed", where=instance_id, detail=f"{code}: {message}")
                self._asked_s = now_s
            case WorkerLost(instance_id=instance_id):
                self._step(now_s, "worker lost", where=instance_id)
                self._asked_s = now_s
            case CallerLeft():
                self._left(now_s)
            case DeadlinePassed():
                self._step(now_s, "deadline passed")

    def _placed(self, placement: Placement, now_s: float) -> None:
        self._placement, self._handing_s = placement, None
        cached = f"{placement.local_prefix_blocks} blocks cached there"
        if placement.fetch_from:
            cached = f"{placement.fetch_prefix_blocks} blocks to be copied"
        detail = f"first token expected after {placement.ttft_est_s:.3f} s, {cached}"
        self._step(now_s, "placed", took_s=now_s - self._asked_s, where=self._workers(), detail=detail)

    def _first_token(self, first: FirstToken, now_s: float) -> None:
        where = "" if self._placement is None else self._placement.prefill.instance_id
        begun_s = now_s - first.prefill_s
        if first.acquire_s > 0:
            acquired_s = begun_s - first.queue_s + first.acquired_s
            self._step(acquired_s, "acquiring", took_s=first.acquire_s, where=where, detail=self._prefix())
        self._step(begun_s, "queued", took_s=first.queue_s, where=where)
        detail = f"{first.cached_tokens} tokens were cached"
        self._step(now_s, "prefill", took_s=first.prefill_s, where=where, detail=detail)
        self._tokens = first.position + 1
        self._token_s, self._decoding_s, self._slowest_s = now_s, None, 0.0
        if first.finish is not None:
            self._step(now_s, "finished", detail=first.finish.value)
        elif self._is_apart():
            self._handing_s = now_s

    def _token(self, entry: TokenEntry, now_s: float) -> None:
        if entry.position == self._tokens:  # else it came before the first token
            self._handed_over(now_s, "and the first step of decoding")
        if self._decoding_s is None:
            self._decoding_s = self._token_s
        self._slowest_s = max(self._slowest_s, now_s - self._token_s)
        self._token_s = now_s
        self._tokens = entry.position + 1
        if entry.finish is not None:
            self._decoded(now_s)
            self._step(now_s, "finished", detail=entry.finish.value)

    def _left(self, now_s: float) -> None:
        """Whoever asked has all that was wanted, or is gone. The story ends here in any case."""
        if not self._steps or self._steps[-1].what != "finished":
            self._decoded(now_s)
            self._step(now_s, "ended")
        self.is_over = True

    def _decoded(self, now_s: float) -> None:
        if self._decoding_s is not None:
            detail = f"{self._tokens} tokens drawn, the slowest after {self._slowest_s:.3f} s"
            self._step(now_s, "decode", took_s=now_s - self._decoding_s, where=self._decode(), detail=detail)
            self._decoding_s = None

    def _handed_over(self, now_s: float, until: str) -> None:
        """The KV is with the decode worker. Most of it went while the prompt was computed: this is what was left."""
        if self._handing_s is not None:
            detail = f"what was left after the first token, {until}"
            self._step(now_s, "kv transfer", took_s=now_s - self._handing_s, where=self._workers(), detail=detail)
            self._handing_s = None

    def _step(self, now_s: float, what: str, *, took_s: float = 0.0, where: str = "", detail: str = "") -> None:
        if len(self._steps) < _MAX_STEPS:
            at_s = now_s - self._started_s
            self._steps.append(TraceStep(at_s=at_s, what=what, took_s=took_s, where=where, detail=detail))

    def _workers(self) -> str:
        if self._placement is None:
            return ""
        prefill, decode = self._placement.prefill.instance_id, self._placement.decode.instance_id
        return decode if prefill == decode else f"{prefill}, {decode}"

    def _prefix(self) -> str:
        copied = self._placement is not None and self._placement.fetch_from
        return "room, and a prefix from another node" if copied else "room, and the prefix that is there"

    def _is_apart(self) -> bool:
        """Whether the KV has to go from one instance to another."""
        return self._placement is not None and (
            self._placement.prefill.instance_id != self._placement.decode.instance_id
        )

    def _decode(self) -> str:
        return "" if self._placement is None else self._placement.decode.instance_id


class Stories:
    """The last requests of one gateway, those that run included."""

    def __init__(self) -> None:
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()

    def begin(self, request: TokenRequest, started_s: float, started_at: float) -> RequestStory:
        story = RequestStory(request, started_s, started_at)
        self._stories[request.request_id] = story
        if len(self._stories) > _MAX_STORIES:
            self._stories.popitem(last=False)
        return story

    def find(self, request_id: str, tenant: str) -> tuple[RequestTrace, ...]:
        """All choices of *tenant*'s request, which is named as in its answer."""
        for prefix in _PREFIXES:
            request_id = request_id.removeprefix(prefix)
        return tuple(
            story.trace()
            for story in self._stories.values()
            if story.tenant == tenant and request_id in (story.request_id, story.request_id.rpartition("-")[0])
        )


def _reason(error: MooncakeError) -> str:
    return error.reason if isinstance(error, Rejected) else error.code
