"""The conversation's bookkeeping, and turns against a scripted client."""

import asyncio
import io
import sys
import types
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, ClassVar, Self

import pytest

from mooncake_mesh.cli import chat
from mooncake_mesh.cli.chat import Answer, Conversation
from mooncake_mesh.client import ChatChunkChoice, ChatCompletionChunk, Delta, Usage
from mooncake_mesh.config_commands import ChatConfig
from mooncake_mesh.errors import Rejected


def _chunk(text: str, *, role: str | None = None, usage: Usage | None = None) -> ChatCompletionChunk:
    choices = () if usage else (ChatChunkChoice(index=0, delta=Delta(role=role, content=text)),)
    return ChatCompletionChunk(id="chatcmpl-1", created=0, model="m", choices=choices, usage=usage, raw={})


ROLE_CHUNK = _chunk("", role="assistant")
USAGE_CHUNK = _chunk("", usage=Usage(prompt_tokens=30, completion_tokens=2, total_tokens=32, cached_tokens=16))


class ScriptedClient:
    """Stands in for the SDK: answers each question with the next script and records what was asked."""

    scripts: ClassVar[list[list[ChatCompletionChunk | BaseException]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []
    closed_early: ClassVar[int] = 0

    def __init__(self, endpoint: str, keys: object = None) -> None:
        self.endpoint = endpoint

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def stream_chat(
        self, messages: list[dict[str, str]], **options: Any
    ) -> AbstractAsyncContextManager[AsyncGenerator[ChatCompletionChunk, None]]:
        self.asked.append({"messages": messages, **options})
        return aclosing(self._chunks())

    async def _chunks(self) -> AsyncGenerator[ChatCompletionChunk, None]:
        ended = False
        try:
            for item in self.scripts.pop(0):
                await asyncio.sleep(0)
                if isinstance(item, BaseException):
                    raise item
                yield item
            ended = True
        finally:
            type(self).closed_early += not ended


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedClient]:
    module = types.ModuleType("mooncake_mesh.client")
    module.MooncakeClient = ScriptedClient  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake_mesh.client", module)
    ScriptedClient.scripts, ScriptedClient.asked, ScriptedClient.closed_early = [], [], 0
    return ScriptedClient


def _talk(monkeypatch: pytest.MonkeyPatch, *lines: str, config: ChatConfig | None = None) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return chat.run(config or ChatConfig())


def test_answer_collects_text_and_times_the_first() -> None:
    answer = Answer(started_s=10.0)
    assert answer.take(ROLE_CHUNK, 10.1) == ""
    assert answer.take(_chunk("Hel"), 10.25) == "Hel"
    assert answer.take(_chunk("lo"), 11.0) == "lo"
    assert answer.take(USAGE_CHUNK, 11.1) == ""
    assert answer.text == "Hello"
    assert answer.summary() == "[TTFT 250 ms, 30 prompt tokens, 16 of them cached_tokens, 2 new]"


def test_answer_without_tokens_or_usage() -> None:
    assert Answer(started_s=0.0).summary() == "[no token]"


def test_conversation_grows_and_is_forgotten() -> None:
    conversation = Conversation("be brief")
    conversation.answered("a", "b")
    conversation.answered("never answered", "")
    assert [message["content"] for message in conversation.asking("c")] == ["be brief", "a", "b", "c"]
    conversation.reset()
    assert conversation.asking("d") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "d"}]


def test_piped_questions(
    client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.scripts = [[_chunk("Paris"), USAGE_CHUNK], [_chunk("2 "), _chunk("million"), USAGE_CHUNK], [_chunk("Hi")]]
    config = ChatConfig(temperature=0.0, seed=7)
    assert _talk(monkeypatch, "Capital?", "", "People?", "/reset", "Hello", "/quit", "unread", config=config) == 0
    out = capsys.readouterr().out
    assert out.startswith("Paris\n[TTFT ")
    assert "2 million\n[TTFT" in out
    assert "16 of them cached_tokens" in out
    assert [[message["content"] for message in request["messages"]] for request in client.asked] == [
        ["Capital?"],
        ["Capital?", "Paris", "People?"],
        ["Hello"],
    ]
    assert {key: value for key, value in client.asked[0].items() if key != "messages"} == {
        "model": None,
        "temperature": 0.0,
        "max_tokens": 512,
        "seed": 7,
    }


def test_refusal_is_told_and_the_conversation_goes_on(
    client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Rejected("overloaded", unavailable=False, retry_after_s=1.0)
    client.scripts = [[_chunk("half"), refusal], [_chunk("whole")]]
    assert _talk(monkeypatch, "one", "two") == 0
    assert capsys.readouterr().err == "mooncake chat: rejected: overloaded\n"
    assert [message["content"] for message in client.asked[1]["messages"]] == ["one", "half", "two"]


def test_exit_code_tells_that_the_last_question_failed(
    client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.scripts = [[Rejected("overloaded", unavailable=False, retry_after_s=1.0)]]
    assert _talk(monkeypatch, "one") == 1


def test_interrupt_cancels_the_answer_only(
    client: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.scripts = [[_chunk("never "), KeyboardInterrupt()], [_chunk("fine")]]
    assert _talk(monkeypatch, "one", "two") == 0
    out = capsys.readouterr().out
    assert "never \n(cancelled)" in out
    assert "fine" in out
    assert client.closed_early == 1


def test_interrupt_at_the_prompt_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    script: list[str | BaseException] = [KeyboardInterrupt(), "/quit"]

    def answer(_: str) -> str:
        item = script.pop(0)
        if isinstance(item, BaseException):
            raise item
        return item

    monkeypatch.setattr("builtins.input", answer)
    assert chat.run(ChatConfig()) == 0
    assert script == []
