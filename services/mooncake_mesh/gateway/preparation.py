"""A parsed request becomes token prompts within the model's limits."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from mooncake_mesh.engine.grammar import check_grammar
from mooncake_mesh.errors import InvalidRequest, ModelNotFound, Rejected, TooLong
from mooncake_mesh.gateway.api import Mesh
from mooncake_mesh.gateway.json_fields import UnsupportedParameter, read_json_object
from mooncake_mesh.gateway.openai_requests import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationOptions,
)
from mooncake_mesh.gateway.openai_responses import ChatShape, CompletionShape, ResponseHead, ResponseShape
from mooncake_mesh.gateway.tokenizer import SpecialTokens, Tokenizer
from mooncake_mesh.gateway.tools import ChatMessage, Tool, ToolChoice
from mooncake_proto.grammar import Grammar
from mooncake_proto.ids import RequestId
from mooncake_proto.serving import Stopping

_T = TypeVar("_T")

# Below this an encoding takes less than a millisecond, and a hop to the thread would cost more than it spares others.
_INLINE_CHARS: Final = 2048
_BODY_BYTES_PER_CHAR: Final = 16  # parsing is that much faster than encoding
_NO_WORKERS_RETRY_AFTER_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that somebody serves now, with its tokenizer. ``max_context_tokens`` is the least of its instances'."""

    name: str
    tokenizer: Tokenizer
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """``text`` is what ``echo`` shows; empty for chats."""

    tokens: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Ready to run: ``stopping`` belongs to ``prompts`` one to one. Calls of tools are looked for unless that is not
    wanted."""

    options: GenerationOptions
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    stopping: tuple[Stopping, ...]
    shape: ResponseShape
    tool_choice: ToolChoice = ToolChoice.NONE


class Preparation:
    """Looks models up, parses, tokenises. Long inputs are worked on in a thread, so that streams do not stutter."""

    def __init__(self, mesh: Mesh, tokenizers: Mapping[str, Tokenizer]) -> None:
        self._mesh = mesh
        self._tokenizers = dict(tokenizers)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._thread.shutdown()

    def served(self) -> tuple[ServedModel, ...]:
        """Models with both a tokenizer here and somebody who serves them, by name."""
        found: dict[str, ServedModel] = {}
        for card in sorted(self._mesh.models(), key=lambda card: (card.name, card.max_context_tokens)):
            tokenizer = self._tokenizers.get(card.name)
            if tokenizer is not None and card.name not in found:
                found[card.name] = ServedModel(
                    name=card.name, tokenizer=tokenizer, max_context_tokens=card.max_context_tokens
                )
        return tuple(found.values())

    def model(self, name: str) -> ServedModel:
        """Raises ModelNotFound, or Rejected while nobody serves a model that this gateway knows."""
        for model in self.served():
            if model.name == name:
                return model
        if name in self._tokenizers:
            raise Rejected("no_instances", unavailable=True, retry_after_s=_NO_WORKERS_RETRY_AFTER_S)
        raise ModelNotFound(f"the model {name!r} does not exist", param="model")

    async def parse(self, body: bytes, parse: Callable[[dict[str, Any]], _T]) -> _T:
        """*parse* of the JSON object in *body*. Raises InvalidRequest."""
        return await self._off_loop(len(body) // _BODY_BYTES_PER_CHAR, lambda: parse(read_json_object(body)))

    async def chat(self, request: ChatRequest, request_id: RequestId, tenant: str) -> Prepared:
        """Raises InvalidRequest, ModelNotFound, TooLong or Rejected."""
        model = self.model(request.options.model)
        _check_chars(model, sum(len(message.content) for message in request.messages), "messages")
        use = request.tool_use
        tools, scope = () if use is None else use.tools, _scope(tenant, request.options)
        tokens = await self.encode_chat(model.tokenizer, request.messages, tools, scope)
        options = await _ruled(model, request.options)
        head = _head(options, f"chatcmpl-{request_id}")
        shape = ChatShape(head, model.tokenizer)
        prepared = _prepared(model, options, (Prompt(tokens=tokens),), "messages", None, shape)
        return prepared if use is None else replace(prepared, tool_choice=use.choice)

    async def completion(self, request: CompletionRequest, request_id: RequestId, tenant: str) -> Prepared:
        """Raises InvalidRequest, ModelNotFound, TooLong or Rejected."""
        model = self.model(request.options.model)
        options = await _ruled(model, request.options)
        special = SpecialTokens.ADD if options.add_special_tokens else SpecialTokens.KEEP
        scope = _scope(tenant, options)
        prompts = [await self._prompt(model, prompt, special, scope, request.echo) for prompt in request.prompts]
        shape = CompletionShape(_head(options, f"cmpl-{request_id}"), model.tokenizer, echo=request.echo)
        return _prepared(model, options, tuple(prompts), "prompt", DEFAULT_COMPLETION_TOKENS, shape)

    async def _prompt(
        self, model: ServedModel, prompt: str | tuple[int, ...], special: SpecialTokens, scope: str, echo: bool
    ) -> Prompt:
        tokenizer = model.tokenizer
        if isinstance(prompt, str):
            _check_chars(model, len(prompt), "prompt")
            return Prompt(tokens=await self.encode(tokenizer, prompt, special, scope), text=prompt if echo else "")
        check_tokens(tokenizer, prompt, "prompt")
        return Prompt(tokens=prompt, text=await self.decode(tokenizer, prompt) if echo else "")

    async def encode(
        self, tokenizer: Tokenizer, text: str, special: SpecialTokens, scope: str | None = None
    ) -> tuple[int, ...]:
        return await self._off_loop(len(text), lambda: tuple(tokenizer.encode(text, special, scope)))

    async def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...] = (),
        scope: str | None = None,
    ) -> tuple[int, ...]:
        chars = sum(len(message.content) for message in messages)
        return await self._off_loop(chars, lambda: tuple(tokenizer.encode_chat(messages, tools, scope)))

    async def decode(self, tokenizer: Tokenizer, tokens: tuple[int, ...]) -> str:
        return await self._off_loop(len(tokens), lambda: tokenizer.decode(tokens))

    async def _off_loop(self, size: int, work: Callable[[], _T]) -> _T:
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _scope(tenant: str, options: GenerationOptions) -> str:
    """Who shares blocks may notice that others asked something alike, nobody else."""
    return f"{tenant}\0{options.cache_salt}"


def check_tokens(tokenizer: Tokenizer, tokens: tuple[int, ...], param: str) -> None:
    """Raises InvalidRequest when an id is outside the vocabulary."""
    if tokens and max(tokens) >= tokenizer.vocab_size:
        message = f"{param} holds token id {max(tokens)}; this model's ids end at {tokenizer.vocab_size - 1}"
        raise InvalidRequest(message, param=param)


def _check_chars(model: ServedModel, chars: int, param: str) -> None:
    """Refuses a text that no tokenisation could fit into the context, before any work on it. Raises TooLong."""
    if chars > model.max_context_tokens * model.tokenizer.longest_token_bytes:
        message = (
            f"{param} of {chars} characters cannot fit into this model's context of {model.max_context_tokens} tokens"
        )
        raise TooLong(message, param=param)


def _head(options: GenerationOptions, response_id: str) -> ResponseHead:
    return ResponseHead(
        id=response_id,
        created=int(time.time()),
        model=options.model,
        logprobs=options.sampling.top_logprobs is not None,
        token_ids=options.return_token_ids,
    )


async def _ruled(model: ServedModel, options: GenerationOptions) -> GenerationOptions:
    """*options* with the grammar that they ask for. Raises InvalidRequest when it is none."""
    check_tokens(model.tokenizer, tuple(token for token, _ in options.sampling.logit_bias), "logit_bias")
    given = options.grammar
    if given is None:
        return options
    if not model.tokenizer.stop_ids:
        message = "this model has no token that ends a text, so its answers cannot be given a form"
        raise UnsupportedParameter(message, param=given.param)
    try:
        await asyncio.to_thread(check_grammar, given.kind, given.text)
    except InvalidRequest as error:
        raise InvalidRequest(f"{given.param}: {error}", param=given.param) from None
    grammar = Grammar(kind=given.kind, text=given.text, end_tokens=model.tokenizer.stop_ids)
    return replace(options, sampling=replace(options.sampling, grammar=grammar))


def _prepared(
    model: ServedModel,
    options: GenerationOptions,
    prompts: tuple[Prompt, ...],
    param: str,
    default_tokens: int | None,
    shape: ResponseShape,
) -> Prepared:
    check_tokens(model.tokenizer, options.stop_token_ids, "stop_token_ids")
    ends = set(options.stop_token_ids)
    is_free = options.grammar is None  # a grammar says itself where the text may end, and where it must
    if not (options.ignore_eos and is_free):
        ends.update(model.tokenizer.stop_ids)
    stopping = tuple(
        Stopping(
            max_new_tokens=_max_new_tokens(model, options, len(prompt.tokens), param, default_tokens),
            min_new_tokens=options.text.min_tokens if is_free else 0,
            stop_token_ids=tuple(sorted(ends)),
        )
        for prompt in prompts
    )
    return Prepared(options=options, tokenizer=model.tokenizer, prompts=prompts, stopping=stopping, shape=shape)


def _max_new_tokens(
    model: ServedModel, options: GenerationOptions, prompt_tokens: int, param: str, default_tokens: int | None
) -> int:
    """Tokens to generate. An explicit number must fit into the context; a default shrinks to what is left of it."""
    if prompt_tokens == 0:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    left = model.max_context_tokens - prompt_tokens
    if left < 1:
        raise TooLong(
            f"{param} comes to {prompt_tokens} tokens; this model's context holds {model.max_context_tokens}, at least"
            " one of them generated",
            param=param,
        )
    if options.max_tokens is None:
        tokens = left if default_tokens is None else min(left, max(default_tokens, options.text.min_tokens))
    elif options.max_tokens > left:
        raise TooLong(
            f"{options.max_tokens_param} asks for {options.max_tokens} tokens behind {prompt_tokens} of the prompt;"
            f" this model's context holds {model.max_context_tokens}",
            param=options.max_tokens_param,
        )
    else:
        tokens = options.max_tokens
    if options.text.min_tokens > tokens:
        raise TooLong(f"min_tokens is more than the context has left ({tokens})", param="min_tokens")
    return tokens
