"""``mooncake chat``: a conversation in the terminal, or with lines from a pipe, through the ZeroMQ SDK.

``/reset`` forgets the conversation, ``/quit`` (or end of input) ends it. Ctrl-C cancels the answer that is being
written and nothing else. An API key, where the gateway asks for one, comes from the variable MOONCAKE_API_KEY: a flag
could be read by others.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_mesh.config_commands import ChatConfig
from mooncake_mesh.errors import MooncakeError

if TYPE_CHECKING:
    from mooncake_mesh.client import ChatCompletionChunk, Usage

Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """What has come so far of one answer. Mutated by :meth:`take`."""

    started_s: float
    text: str = ""
    ttft_s: float | None = None
    usage: "Usage | None" = None

    def take(self, chunk: "ChatCompletionChunk", now_s: float) -> str:
        """The new text in *chunk*; the last one has the usage and no text."""
        self.usage = chunk.usage or self.usage
        if chunk.text and self.ttft_s is None:
            self.ttft_s = now_s - self.started_s
        self.text += chunk.text
        return chunk.text

    def summary(self) -> str:
        """Time to first token and what the pool already held of the prompt."""
        ttft = "no token" if self.ttft_s is None else f"TTFT {self.ttft_s * 1000:.0f} ms"
        usage = self.usage
        if usage is None:
            return f"[{ttft}]"
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        return f"[{ttft}, {prompt} prompt tokens, {usage.cached_tokens} of them cached_tokens, {completion} new]"


class Conversation:
    """The messages so far. A turn is recorded only as far as it was answered."""

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[Message] = []

    def reset(self) -> None:
        self._turns.clear()

    def asking(self, text: str) -> list[Message]:
        """Messages of a request that says *text* next."""
        return [*self._system, *self._turns, {"role": "user", "content": text}]

    def answered(self, question: str, answer: str) -> None:
        """Record a turn; one without an answer is as if never asked."""
        if answer:
            self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run(config: ChatConfig) -> int:
    """Exit code 0, or 1 when the last question failed."""
    conversation = Conversation(config.system)
    code = 0
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  gives input() line editing and a history

        _write("/reset forgets the conversation, /quit ends it, Ctrl-C cancels an answer\n")
    # One loop for all turns, run only while an answer comes: input() then keeps line editing and its own Ctrl-C.
    with asyncio.Runner() as runner:
        while (question := _next_line(prompt)) is not None:
            match question:
                case "":
                    continue
                case "/quit":
                    break
                case "/reset":
                    conversation.reset()
                case _:
                    code = _turn(runner, config, conversation, question)
    return code


def _next_line(prompt: str) -> str | None:
    """The next line of input without outer spaces; None at the end."""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            _write("\n(/quit ends the conversation)\n")


def _turn(runner: asyncio.Runner, config: ChatConfig, conversation: Conversation, question: str) -> int:
    answer = Answer(started_s=time.monotonic())
    try:
        runner.run(_ask(config, conversation.asking(question), answer, _write))
    except KeyboardInterrupt:
        _write("\n(cancelled)")
    except MooncakeError as error:
        sys.stderr.write(f"mooncake chat: {error.code}: {error}\n")
        return 1
    finally:
        conversation.answered(question, answer.text)
    _write(f"\n{answer.summary()}\n")
    return 0


async def _ask(config: ChatConfig, messages: list[Message], answer: Answer, write: Callable[[str], None]) -> None:
    from mooncake_mesh.client import MooncakeClient  # here: the first prompt need not wait for it

    async with (
        MooncakeClient(config.gateway, keys=config.keys) as client,
        client.stream_chat(
            messages,
            model=config.model,
            temperature=config.temperature,
            max_tokens=config.max_tokens,
            seed=config.seed,
        ) as chunks,
    ):
        async for chunk in chunks:
            write(answer.take(chunk, time.monotonic()))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
