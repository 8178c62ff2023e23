"""Answers in the shapes of OpenAI's chat and completion endpoints, whole and as stream chunks.

Log-probabilities are natural logarithms. A token that is not UTF-8 by itself (a part of a character) is written
``bytes:\\xe2\\x82``, as OpenAI's completions do; ``bytes`` always has the exact bytes, and is null for special tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from mooncake_mesh.gateway.text import Piece
from mooncake_mesh.gateway.tokenizer import Tokenizer
from mooncake_mesh.gateway.tool_reader import CallArguments, CallBegins, Content, Part
from mooncake_proto.serving import TokenLogprob

Json = dict[str, Any]

# JSON has no infinity; OpenAI writes this for a token of probability zero.
_LEAST_LOGPROB: Final = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request: each prompt once, however many choices; every drawn token, shown or not."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def json(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True, kw_only=True)
class Choice:
    """One choice as it grows. ``drawn`` are all tokens; ``pieces`` those whose text was let out, a prefix of them."""

    index: int
    prompt: tuple[int, ...]
    prompt_text: str = ""
    texts: list[str] = field(default_factory=list)
    calls: list["CallSoFar"] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def hidden_tokens(self) -> list[int]:
        """Drawn tokens without shown text: of the stop string, or the stop token."""
        return self.drawn[len(self.pieces) :]

    def add(self, part: Part) -> None:
        match part:
            case Content(text=text):
                self.texts.append(text)
            case CallBegins(id=call_id, name=name):
                self.calls.append(CallSoFar(id=call_id, name=name))
            case CallArguments(index=index, text=text):
                self.calls[index].arguments += text


@dataclass(slots=True, kw_only=True)
class CallSoFar:
    """One call of a tool as it grows."""

    id: str
    name: str
    arguments: str = ""

    def json(self) -> Json:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What every chunk repeats. ``logprobs`` and ``token_ids`` say whether choices carry them."""

    id: str
    created: int
    model: str
    logprobs: bool
    token_ids: bool


class ResponseShape(Protocol):
    """How one endpoint writes its answers. Chunks come without ``usage``: the caller adds it where it was asked for."""

    def opening(self, choice: Choice) -> Json | None:
        """The chunk that comes before the choice's first text, if the endpoint has one."""

    def delta(self, choice: Choice, part: Part, pieces: Sequence[Piece]) -> Json: ...

    def closing(self, choice: Choice) -> Json: ...

    def usage_only(self) -> Json:
        """The last chunk when usage was asked for; its choices are empty."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json: ...


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer) -> None:
        self._head = head
        self._names = TokenNames(tokenizer)

    def opening(self, choice: Choice) -> Json:
        chunk = self._chunk(choice.index, {"role": "assistant", "content": ""}, None, None)
        if self._head.token_ids:
            chunk["prompt_token_ids"] = choice.prompt
        return chunk

    def delta(self, choice: Choice, part: Part, pieces: Sequence[Piece]) -> Json:
        logprobs = self._logprobs(pieces) if self._head.logprobs else None
        chunk = self._chunk(choice.index, _delta(part), logprobs, None)
        if self._head.token_ids:
            chunk["choices"][0]["token_ids"] = [piece.token for piece in pieces]
        return chunk

    def closing(self, choice: Choice) -> Json:
        chunk = self._chunk(choice.index, {}, None, choice.finish_reason)
        if self._head.token_ids:
            chunk["choices"][0]["token_ids"] = choice.hidden_tokens()
        return chunk

    def usage_only(self) -> Json:
        return _envelope(self._head, "chat.completion.chunk", [])

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        response = _envelope(self._head, "chat.completion", [self._finished(choice) for choice in choices])
        if self._head.token_ids:
            response["prompt_token_ids"] = choices[0].prompt
        return {**response, "usage": usage.json()}

    def _finished(self, choice: Choice) -> Json:
        message: Json = {"role": "assistant", "content": "".join(choice.texts), "refusal": None}
        if choice.calls:
            message |= {"content": message["content"] or None, "tool_calls": [call.json() for call in choice.calls]}
        logprobs = self._logprobs(choice.pieces) if self._head.logprobs else None
        finished = {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        return {**finished, "token_ids": choice.drawn} if self._head.token_ids else finished

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return _envelope(self._head, "chat.completion.chunk", [choice])

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        return {"content": [self._entry(piece) for piece in pieces if piece.logprob is not None], "refusal": None}

    def _entry(self, piece: Piece) -> Json:
        logprob = _known(piece.logprob)
        top = [self._token(token, value) for token, value in logprob.top]
        return {**self._token(piece.token, logprob.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> Json:
        values = self._names.bytes_of(token)
        return {"token": self._names.name(token), "logprob": _finite(logprob), "bytes": values}


class CompletionShape:
    """``text_completion``, whole and streamed. ``echo`` puts the prompt's text first."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer, *, echo: bool) -> None:
        self._head = head
        self._names = TokenNames(tokenizer)
        self._echo = echo

    def opening(self, choice: Choice) -> Json | None:
        if not (self._echo or self._head.token_ids):
            return None
        chunk = self._chunk(choice.index, choice.prompt_text if self._echo else "", None, None)
        if self._head.token_ids:
            chunk["choices"][0]["prompt_token_ids"] = choice.prompt
        return chunk

    def delta(self, choice: Choice, part: Part, pieces: Sequence[Piece]) -> Json:
        text = part.text if isinstance(part, Content) else ""  # there are no tools here to be called
        chunk = self._chunk(choice.index, text, self._logprobs(pieces) if self._head.logprobs else None, None)
        if self._head.token_ids:
            chunk["choices"][0]["token_ids"] = [piece.token for piece in pieces]
        return chunk

    def closing(self, choice: Choice) -> Json:
        chunk = self._chunk(choice.index, "", None, choice.finish_reason)
        if self._head.token_ids:
            chunk["choices"][0]["token_ids"] = choice.hidden_tokens()
        return chunk

    def usage_only(self) -> Json:
        return _envelope(self._head, "text_completion", [])

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Json:
        finished = [self._finished(choice) for choice in choices]
        return {**_envelope(self._head, "text_completion", finished), "usage": usage.json()}

    def _finished(self, choice: Choice) -> Json:
        text = "".join(choice.texts)
        finished = {
            "index": choice.index,
            "text": choice.prompt_text + text if self._echo else text,
            "logprobs": self._logprobs(choice.pieces) if self._head.logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._head.token_ids:
            finished |= {"prompt_token_ids": choice.prompt, "token_ids": choice.drawn}
        return finished

    def _chunk(self, index: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        return _envelope(self._head, "text_completion", [choice])

    def _logprobs(self, pieces: Sequence[Piece]) -> Json:
        reported = [(piece, piece.logprob) for piece in pieces if piece.logprob is not None]
        return {
            "tokens": [self._names.name(piece.token) for piece, _ in reported],
            "token_logprobs": [_finite(logprob.logprob) for _, logprob in reported],
            "top_logprobs": [self._top(piece.token, logprob) for piece, logprob in reported],
            "text_offset": [piece.offset for piece, _ in reported],
        }

    def _top(self, token: int, logprob: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and always the drawn one: up to ``logprobs`` + 1 entries."""
        entries: dict[str, float] = {}
        for other, value in (*logprob.top, (token, logprob.logprob)):
            entries.setdefault(self._names.name(other), _finite(value))
        return entries


class TokenNames:
    """How single tokens are written in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def name(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token: int) -> list[int] | None:
        return None if token in self._tokenizer.special_ids else list(self._tokenizer.token_bytes(token))


def _delta(part: Part) -> Json:
    """What a chunk adds to the message; a call's name comes with the first chunk of it."""
    match part:
        case Content(text=text):
            return {"content": text}
        case CallBegins(index=index, id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _envelope(head: ResponseHead, kind: str, choices: list[Json]) -> Json:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model, "choices": choices}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _known(logprob: TokenLogprob | None) -> TokenLogprob:
    assert logprob is not None
    return logprob
