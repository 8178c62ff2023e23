"""Wait for a mesh to be ready by asking its gateway, and show what is missing when that takes a while."""

import asyncio
import itertools
import json
from typing import Final, TextIO

_ASK_EVERY_S: Final = 0.1
_ANSWER_WITHIN_S: Final = 2.0
_SHOW_AFTER_S: Final = 1.0
_LONGEST_ANSWER_BYTES: Final = 65536
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


async def wait_until_ready(host: str, port: int, *, progress: TextIO) -> None:
    """Ask ``GET /ready`` until it answers 200. On a terminal *progress* gets a line that is removed at the end."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    shown = False
    try:
        for frame in itertools.cycle(_FRAMES):
            missing = await ask(host, port)
            if missing is None:
                return
            if progress.isatty() and loop.time() - started > _SHOW_AFTER_S:
                line = f"{frame} {loop.time() - started:.0f} s, waiting for: {missing}"
                progress.write(f"\r\x1b[K{line[:100]}\r")
                progress.flush()
                shown = True
            await asyncio.sleep(_ASK_EVERY_S)
    finally:
        if shown:
            progress.write("\r\x1b[K")
            progress.flush()


async def ask(host: str, port: int) -> str | None:
    """None when the gateway says that the mesh is ready, otherwise what is missing."""
    try:
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            answer = await _get(host, port, "/ready")
    except (OSError, TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError):
        return "the gateway"
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    return None if status == [b"200"] else _reasons(body)


async def _get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        answer = b""
        while (part := await reader.read(_LONGEST_ANSWER_BYTES)) and len(answer) < _LONGEST_ANSWER_BYTES:
            answer += part
        return answer
    finally:
        writer.close()


def _reasons(body: bytes) -> str:
    """The ``reasons`` of the answer's body, if it has any."""
    try:
        reasons = json.loads(body)["reasons"]
        return ", ".join(str(reason) for reason in reasons)
    except (ValueError, KeyError, TypeError):
        return "the mesh"
