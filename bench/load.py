"""A light client for load: one connection per stream, completions over HTTP, arrival times of every token.

It parses just enough of HTTP and SSE to count tokens, so that on a small machine it is the server that is measured.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

import orjson


@dataclass(slots=True)
class StreamTimes:
    """``sent_s`` and ``tokens_s`` (one entry a token) on one clock; ``error`` is empty when the stream ended well."""

    sent_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.tokens_s[0] - self.sent_s


class Connection:
    """One keep-alive HTTP connection."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def stream(self, body: dict[str, object]) -> StreamTimes:
        """POST one streaming completion and read it to its end."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address)
        payload = orjson.dumps({**body, "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(payload)}\r\n\r\n"
        times = StreamTimes(sent_s=perf_counter())
        self._writer.write(head.encode() + payload)
        status = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n", 1)[0]:
            times.error = status.split(b"\r\n", 1)[0].decode()
            await self.close()
            return times
        await self._read_events(self._reader, times)
        return times

    async def _read_events(self, reader: asyncio.StreamReader, times: StreamTimes) -> None:
        """Chunked body; each chunk carries one or more whole events."""
        while True:
            size = int((await reader.readuntil(b"\r\n"))[:-2], 16)
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                return
            now_s = perf_counter()
            if b'"error"' in chunk:
                times.error = chunk.decode(errors="replace")
            times.tokens_s.extend([now_s] * chunk.count(b'"finish_reason":null'))

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            await self._writer.wait_closed()
        self._reader = self._writer = None
