"""Chat and completion requests as both doors (HTTP, ZeroMQ SDK) serve them: admission, deadline, outcome.

Temperature is 1 unless the request says otherwise, as OpenAI documents it: of a model's generation_config.json only the
end-of-sequence ids count.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from mooncake_mesh.errors import DeadlineExceeded, Draining, InvalidRequest, Rejected
from mooncake_mesh.gateway.api import Mesh
from mooncake_mesh.gateway.generation import Door, Generation
from mooncake_mesh.gateway.metrics import DoorMetrics, Outcome
from mooncake_mesh.gateway.openai_requests import ChatRequest, parse_chat, parse_completion
from mooncake_mesh.gateway.preparation import Preparation, Prepared
from mooncake_mesh.gateway.rate_limits import TenantRates, no_limits
from mooncake_mesh.gateway.standing import NO_STANDING, Standing
from mooncake_mesh.gateway.tokenizer import Tokenizer
from mooncake_mesh.gateway.tracing import NO_HEADERS, NoTracing, Tracing
from mooncake_proto.client import Operation
from mooncake_proto.ids import RequestId

log = structlog.get_logger()

_FULL_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionLimits:
    """``deadline_s`` is the longest life of a request; more than ``max_concurrent_requests`` are answered 429.

    Of a request with many prompts ``max_concurrent_prompts`` run at a time.
    """

    deadline_s: float = 600.0
    max_concurrent_requests: int = 1024
    max_concurrent_prompts: int = 4


class Completions:
    """Serves chat and completion requests of every door."""

    def __init__(
        self,
        mesh: Mesh,
        tokenizers: Mapping[str, Tokenizer],
        metrics: DoorMetrics,
        limits: CompletionLimits,
        rates: TenantRates | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._mesh = mesh
        self._tracing = tracing or NoTracing()
        self._metrics = metrics
        for name in tokenizers:
            metrics.vllm.serve(name)
        self._limits = limits
        self.rates = rates or TenantRates(no_limits)
        self.preparation = Preparation(mesh, tokenizers)
        self._running = 0
        self._draining = False

    @property
    def running(self) -> int:
        """Requests in flight."""
        return self._running

    @property
    def draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Refuse new requests from now on; those in flight go on."""
        self._draining = True

    def close(self) -> None:
        """Release the tokenizer thread. Call when no request runs."""
        self.preparation.close()

    def check_admission(self) -> None:
        """Raises Draining or Rejected when a request would be refused right now, whatever it says."""
        if self._draining:
            raise Draining("this gateway is shutting down")
        if self._running >= self._limits.max_concurrent_requests:
            raise Rejected("gateway_full", unavailable=False, retry_after_s=_FULL_RETRY_AFTER_S)

    async def serve(
        self,
        operation: Operation,
        body: bytes,
        door: Door,
        *,
        request_id: RequestId,
        tenant: str,
        standing: Standing = NO_STANDING,
        found: Callable[[int], None] = lambda _: None,
        headers: Mapping[str, str] = NO_HEADERS,
        read_chat: Callable[[dict[str, Any]], ChatRequest] = parse_chat,
    ) -> None:
        """Answer one request of *tenant*, the JSON object in *body*, through *door*; *standing* wins over the body.

        *found* hears how many prompt tokens were found in the pool, before the door hears anything. Of *headers* only
        ``traceparent`` and ``tracestate`` are read. *read_chat* makes a chat of a body that says it in other words.

        *request_id* is the server's own and unique. Raises a MooncakeError when the request fails, before or after its
        first chunk. Cancelling this coroutine cancels the request everywhere.
        """
        started_at = time.monotonic()
        traced = self._tracing.request(operation, request_id, headers)
        with self._accounted(operation, started_at), traced as span:
            self.rates.take_request(tenant, started_at)
            prepared = await self._prepare(operation, body, request_id, tenant, read_chat)
            prompt_tokens = sum(len(prompt.tokens) for prompt in prepared.prompts)
            self.rates.take_tokens(tenant, prompt_tokens, time.monotonic())
            generation = Generation(
                self._mesh,
                self._metrics,
                replace(prepared, options=standing.applied_to(prepared.options)),
                door,
                request_id=request_id,
                tenant=tenant,
                started_at=started_at,
                deadline_at=started_at + self._limits.deadline_s,
                max_concurrent_prompts=self._limits.max_concurrent_prompts,
                found=found,
            )
            try:
                await self._run_to_deadline(generation, started_at)
            except Rejected:  # before anything was shown
                self.rates.charge_tokens(tenant, -prompt_tokens, time.monotonic())
                raise
            finally:
                usage = generation.usage()
                span.answered(prepared.options.model, usage, generation.finish_reasons())
                self.rates.charge_tokens(tenant, usage.completion_tokens, time.monotonic())
                self._metrics.tokens(
                    prompt=usage.prompt_tokens, cached=usage.cached_tokens, generated=usage.completion_tokens
                )
            await generation.finish()
            log.info(
                "request_finished",
                request_id=request_id,
                endpoint=operation.value,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                elapsed_s=round(time.monotonic() - started_at, 4),
            )

    async def _prepare(
        self,
        operation: Operation,
        body: bytes,
        request_id: RequestId,
        tenant: str,
        read_chat: Callable[[dict[str, Any]], ChatRequest],
    ) -> Prepared:
        if operation is Operation.CHAT:
            return await self.preparation.chat(await self.preparation.parse(body, read_chat), request_id, tenant)
        return await self.preparation.completion(
            await self.preparation.parse(body, parse_completion), request_id, tenant
        )

    async def _run_to_deadline(self, generation: Generation, started_at: float) -> None:
        spent_s = time.monotonic() - started_at
        deadline = asyncio.timeout(self._limits.deadline_s - spent_s)
        try:
            async with deadline:
                await generation.run()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"not finished within {self._limits.deadline_s:g} s") from None

    @contextmanager
    def _accounted(self, operation: Operation, started_at: float) -> Iterator[None]:
        """Admits one request; counts it while it runs, and its outcome when it ends, however it ends."""
        outcome = Outcome.ERROR
        try:
            self.check_admission()
            self._running += 1
            try:
                with self._metrics.running():
                    yield
            finally:
                self._running -= 1
            outcome = Outcome.OK
        except InvalidRequest:
            outcome = Outcome.INVALID
            raise
        except (Rejected, Draining):
            outcome = Outcome.REJECTED
            raise
        except DeadlineExceeded:
            outcome = Outcome.DEADLINE
            raise
        except asyncio.CancelledError:
            outcome = Outcome.CANCELLED
            raise
        finally:
            self._metrics.ended(operation.value, outcome, time.monotonic() - started_at)
