"""One request under way: its prompts and choices run on the mesh, their text goes to the door.

Every choice is a request of its own to the mesh. The first choice of a prompt goes ahead; its siblings start when its
first token is there, so that they find the prompt's KV in the pool. All live in one TaskGroup: an error, or a cancel
from outside, ends them all.

Without a seed a random one is drawn. Choice k of a prompt draws with a seed derived from the request's and k; choice 0
with the seed itself, so a prompt among several answers as it would alone.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol

from mooncake_mesh.errors import Aborted
from mooncake_mesh.gateway.api import Mesh, TokenEvent, TokenRequest
from mooncake_mesh.gateway.metrics import DoorMetrics
from mooncake_mesh.gateway.openai_responses import Choice, Json, Usage
from mooncake_mesh.gateway.preparation import Prepared
from mooncake_mesh.gateway.text import Piece, TextDelta, TextStream
from mooncake_mesh.gateway.tool_reader import Content, Part, ToolCallReader
from mooncake_mesh.gateway.tools import ToolChoice
from mooncake_mesh.gateway.vllm_metrics import ChoiceMetrics
from mooncake_proto.ids import RequestId
from mooncake_proto.serving import FinishReason, Sampling

_SEED_MASK: Final = (1 << 63) - 1


class Door(Protocol):
    """Where an answer goes. Nothing comes here before the first token of the request is known."""

    async def chunk(self, chunk: Json) -> None:
        """One stream chunk, in order within each choice; from several tasks. Only for streaming requests."""

    async def whole(self, response: Json) -> None:
        """The complete answer, once, at the end; for streaming requests too."""


class Generation:
    """Runs *prepared* once. *deadline_at* is on the monotonic clock and travels to the mesh as what is left of it.

    *found* hears how many prompt tokens were found in the pool, before the door hears anything.
    """

    def __init__(
        self,
        mesh: Mesh,
        metrics: DoorMetrics,
        prepared: Prepared,
        door: Door,
        *,
        request_id: RequestId,
        tenant: str,
        started_at: float,
        deadline_at: float,
        max_concurrent_prompts: int,
        found: Callable[[int], None],
    ) -> None:
        self._mesh = mesh
        self._metrics = metrics
        self._prepared = prepared
        self._options = prepared.options
        self._door = door
        self._request_id = request_id
        self._tenant = tenant
        self._started_at = started_at
        self._deadline_at = deadline_at
        self._slots = asyncio.Semaphore(max_concurrent_prompts)
        given = self._options.seed
        self._seed = secrets.randbits(63) if given is None else given & _SEED_MASK
        self._cached_tokens = 0
        self._found = found
        self._readers: dict[int, ToolCallReader] = {}
        n = self._options.n
        self.choices = [
            Choice(index=index * n + k, prompt=prompt.tokens, prompt_text=prompt.text)
            for index, prompt in enumerate(prepared.prompts)
            for k in range(n)
        ]

    async def run(self) -> None:
        """Generate every choice and stream it. The first error of a choice is raised as it is, after all have ended."""
        try:
            async with asyncio.TaskGroup() as prompts:
                for index in range(len(self._prepared.prompts)):
                    prompts.create_task(self._run_prompt(index))
        except BaseExceptionGroup as group:
            raise _first_leaf(group) from None

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=sum(len(prompt.tokens) for prompt in self._prepared.prompts),
            completion_tokens=sum(len(choice.drawn) for choice in self.choices),
            cached_tokens=self._cached_tokens,
        )

    def finish_reasons(self) -> tuple[str, ...]:
        """Of the choices that have finished."""
        return tuple(choice.finish_reason for choice in self.choices if choice.finish_reason is not None)

    async def finish(self) -> None:
        """Send the usage chunk where it was asked for, and the whole answer."""
        stream, shape, usage = self._options.stream, self._prepared.shape, self.usage()
        if stream is not None and stream.include_usage:
            await self._door.chunk({**shape.usage_only(), "usage": usage.json()})
        await self._door.whole(shape.whole(self.choices, usage))

    async def _run_prompt(self, index: int) -> None:
        n = self._options.n
        first, *siblings = self.choices[index * n : index * n + n]
        first_token = asyncio.Event()
        async with self._slots, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._run_choice(first, index, 0, first_token))
            if siblings:
                await first_token.wait()
                for k, choice in enumerate(siblings, 1):
                    tasks.create_task(self._run_choice(choice, index, k, None))

    async def _run_choice(self, choice: Choice, prompt: int, k: int, first_token: asyncio.Event | None) -> None:
        """Run one choice to its end. A prompt's first choice sets *first_token* and tells what was cached."""
        told = self._metrics.vllm.choice(
            self._options.model, prompt_tokens=len(choice.prompt), arrived_s=self._started_at
        )
        with told:
            await self._draw(choice, prompt, k, first_token, told)

    async def _draw(
        self, choice: Choice, prompt: int, k: int, first_token: asyncio.Event | None, told: ChoiceMetrics
    ) -> None:
        if self._prepared.tool_choice is not ToolChoice.NONE:
            self._readers[choice.index] = ToolCallReader()
        stream = TextStream(self._prepared.tokenizer, self._options.text)
        previous_at = None
        async with aclosing(self._mesh.generate(self._token_request(choice, prompt, k))) as events:
            async for event in events:
                now = time.monotonic()
                told.token(event, now)
                if previous_at is not None:
                    self._metrics.observe_tbt_s(now - previous_at)
                else:
                    if first_token is not None:
                        self._metrics.observe_ttft_s(now - self._started_at)
                        self._cached_tokens += event.cached_tokens or 0
                        self._found(self._cached_tokens)
                        first_token.set()
                    await self._open(choice)
                previous_at = now
                await self._take(choice, stream, event, self._prepared.stopping[prompt].stop_token_ids)
                if choice.finish_reason is not None and event.finish is None:
                    self._mesh.satisfied(self._choice_id(choice))
                    told.satisfied()
                    break  # a stop string: closing the generator cancels the rest
        if choice.finish_reason is None:
            raise Aborted("the answer broke off")

    async def _take(
        self, choice: Choice, stream: TextStream, event: TokenEvent, stop_token_ids: tuple[int, ...]
    ) -> None:
        """One event's share of the answer; the last one's sets the finish reason."""
        if event.finish is FinishReason.CANCELLED:
            raise Aborted("the request was cancelled inside the mesh")
        choice.drawn.append(event.token)
        hidden = event.finish is FinishReason.STOP and event.token in stop_token_ids
        if self._options.text.include_stop or not hidden:
            delta = stream.feed(event.token, event.logprob)
            await self._show(choice, delta)
            if delta.stopped:
                await self._close(choice, FinishReason.STOP)
                return
        if event.finish is not None:
            rest = stream.finish()
            await self._show(choice, rest)
            await self._close(choice, FinishReason.STOP if rest.stopped else event.finish)

    def _choice_id(self, choice: Choice) -> RequestId:
        return RequestId(f"{self._request_id}-{choice.index}")

    def _token_request(self, choice: Choice, prompt: int, k: int) -> TokenRequest:
        options = self._options
        sampling: Sampling = replace(options.sampling, seed=choice_seed(self._seed, k))
        return TokenRequest(
            request_id=self._choice_id(choice),
            model=options.model,
            prompt=choice.prompt,
            sampling=sampling,
            stopping=self._prepared.stopping[prompt],
            deadline_s=max(0.001, self._deadline_at - time.monotonic()),
            tenant=self._tenant,
            cache_salt=options.cache_salt,
            priority=options.priority,
            fairness_id=options.fairness_id,
        )

    async def _open(self, choice: Choice) -> None:
        if self._options.stream is not None:
            chunk = self._prepared.shape.opening(choice)
            if chunk is not None:
                await self._send(chunk)

    async def _show(self, choice: Choice, delta: TextDelta) -> None:
        choice.pieces.extend(delta.pieces)
        reader = self._readers.get(choice.index)
        if reader is not None:
            await self._show_parts(choice, reader.feed(delta.text), delta.pieces)
        else:
            await self._show_parts(choice, [Content(text=delta.text)] if delta.text else [], delta.pieces)

    async def _show_parts(self, choice: Choice, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
        for part in parts:
            choice.add(part)
        if self._options.stream is None:
            return
        if not parts and pieces and self._tokens_matter:
            parts = [Content(text="")]
        for part in parts:
            await self._send(self._prepared.shape.delta(choice, part, pieces))
            pieces = ()

    async def _close(self, choice: Choice, reason: FinishReason) -> None:
        reader = self._readers.get(choice.index)
        if reader is not None:
            await self._show_parts(choice, reader.finish(), ())
        choice.finish_reason = reason.value
        if choice.calls and reason is FinishReason.STOP and self._prepared.tool_choice is not ToolChoice.NAMED:
            choice.finish_reason = "tool_calls"  # OpenAI's word where the model had a choice
        if self._options.stream is not None:
            await self._send(self._prepared.shape.closing(choice))

    async def _send(self, chunk: Json) -> None:
        stream = self._options.stream
        if stream is not None and stream.continuous_usage_stats:
            chunk["usage"] = self.usage().json()
        elif stream is not None and stream.include_usage:
            chunk["usage"] = None
        await self._door.chunk(chunk)

    @property
    def _tokens_matter(self) -> bool:
        """Whether a token without text is worth a chunk."""
        return self._options.return_token_ids or self._options.sampling.top_logprobs is not None


def choice_seed(seed: int, k: int) -> int:
    """The 63-bit seed of choice *k*; that of choice 0 is *seed* itself."""
    if k == 0:
        return seed
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + k.to_bytes(8, "little"), digest_size=8, person=b"mooncake-choice"
    )
    return int.from_bytes(digest.digest(), "little") & _SEED_MASK


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    leaf: BaseException = group
    while isinstance(leaf, BaseExceptionGroup):
        leaf = leaf.exceptions[0]
    return leaf
