"""A client for any OpenAI-compatible server: streamed completions, with the time of every event.

The same for all servers that are compared, and light, since on two cores it takes from what it measures.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Final

import orjson
from tokenizers import Tokenizer

_TIMEOUT_S: Final = 900.0
_FIRST_PLAIN_ID: Final = 256  # behind the tokens of single bytes


class RequestFailed(Exception):
    """The server refused the request, or broke the stream off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """``events_s``: when text came, on the clock of ``sent_s``; one event a token, or fewer where a server bundles."""

    sent_s: float
    events_s: tuple[float, ...]
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.events_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.events_s[-1] - self.events_s[0]) / max(1, self.output_tokens - 1)

    @property
    def intervals_s(self) -> list[float]:
        return [after - before for before, after in zip(self.events_s, self.events_s[1:], strict=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a server answers, and as what it knows the model. ``extra``: what its requests need beside OpenAI's."""

    host: str
    port: int
    model: str
    extra: dict[str, object]


class Prompts:
    """Texts of a given number of tokens, never the same twice: words that are one token each.

    They are seeded, so that two runs ask the same; two prompts have less than a block in common.
    """

    def __init__(self, tokenizer: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._random = random.Random(seed)
        ids = range(_FIRST_PLAIN_ID, self._tokenizer.get_vocab_size())
        pieces = (self._tokenizer.decode([token]) for token in ids)
        self._words = [word for word in pieces if word.startswith(" ") and word[1:].isalpha() and word.isascii()]

    def text(self, n_tokens: int) -> str:
        text = "".join(self._random.choices(self._words, k=n_tokens))
        n_encoded = len(self._tokenizer.encode(text).ids)
        if n_encoded != n_tokens:
            raise ValueError(f"{n_tokens} words made {n_encoded} tokens")
        return text


async def complete(target: Target, prompt: str, max_tokens: int) -> Reply:
    """One greedy streamed completion of exactly *max_tokens* where the server can be told so.

    Raises RequestFailed, OSError, TimeoutError.
    """
    body: dict[str, object] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **target.extra,
    }
    payload = orjson.dumps(body)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {target.host}:{target.port}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    async with asyncio.timeout(_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            sent_s = perf_counter()
            writer.write(head.encode() + payload)
            return await _read(reader, sent_s, max_tokens)
        except asyncio.IncompleteReadError as error:
            raise RequestFailed("the connection was closed within the answer") from error
        finally:
            writer.close()
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, sent_s: float, max_tokens: int) -> Reply:
    head = await reader.readuntil(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0]
    if b" 200 " not in status + b" ":
        raise RequestFailed(f"{status.decode()}: {(await reader.read(300)).decode(errors='replace')}")
    stream = _EventStream()
    while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
        chunk = await reader.readexactly(size + 2)
        stream.feed(chunk[:-2], perf_counter())
    if not stream.events_s:
        raise RequestFailed("no text came")
    return Reply(sent_s=sent_s, events_s=tuple(stream.events_s), output_tokens=stream.output_tokens or max_tokens)


class _EventStream:
    """Server-sent events out of the pieces of a body."""

    def __init__(self) -> None:
        self.events_s: list[float] = []
        self.output_tokens = 0
        self._rest = b""

    def feed(self, piece: bytes, now_s: float) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(orjson.loads(line[6:]), now_s)

    def _event(self, event: dict[str, object], now_s: float) -> None:
        if event.get("error"):
            raise RequestFailed(str(event["error"]))
        if isinstance(usage := event.get("usage"), dict):
            self.output_tokens = int(usage["completion_tokens"])
        choices = event.get("choices")
        if isinstance(choices, list) and choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
            self.events_s.append(now_s)


async def closed_loop(target: Target, prompts: Sequence[str], max_tokens: int, concurrency: int) -> list[Reply]:
    """All *prompts*, *concurrency* at a time: whoever has its answer asks the next one. Raises as :func:`complete`."""
    waiting = list(reversed(prompts))
    replies: list[Reply] = []

    async def client() -> None:
        while waiting:
            replies.append(await complete(target, waiting.pop(), max_tokens))

    try:
        async with asyncio.TaskGroup() as clients:
            for _ in range(concurrency):
                clients.create_task(client())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return replies
