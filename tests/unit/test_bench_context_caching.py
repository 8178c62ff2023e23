"""The benchmark of context caches: whom it asks what, and what it makes of the answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench import context_caching
from bench.context_caching import Bench, Pair, Turn, lose, tell
from bench.mesh import LocalMesh
from bench.report import Report
from mooncake_mesh.client import ContextCache, PeerUnreachable
from mooncake_mesh.client.caching_answers import CacheError


def cache_of(status: str, error: CacheError | None = None) -> ContextCache:
    shown: dict[str, Any] = dict.fromkeys(("created_at", "expired_at", "tokens"), 0)
    shown |= dict.fromkeys(("model", "name", "description"), "")
    return ContextCache(id="cache-1", status=status, messages=(), tools=(), metadata={}, error=error, raw={}, **shown)


class Client:
    """Stands in for the SDK: ``states`` are what is said of the cache, one after the other."""

    def __init__(self, *states: ContextCache | Exception) -> None:
        self.states = list(states)
        self.asked: list[dict[str, Any]] = []
        self.caching = SimpleNamespace(create=self._create, get=self._get)

    def _create(self, messages: list[dict[str, Any]], *, name: str) -> ContextCache:
        self.asked.extend(messages)
        return cache_of("pending")

    def _get(self, cache_id: str) -> ContextCache:
        state = self.states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    def stream_chat(self, messages: list[dict[str, Any]], **_: Any) -> "Stream":
        self.asked.append(messages[0])
        return Stream(cached=96 if messages[0]["role"] == "cache" else 0)


class Stream:
    def __init__(self, cached: int) -> None:
        self.answer = SimpleNamespace(usage=SimpleNamespace(prompt_tokens=100, cached_tokens=cached))
        self._chunks = iter("ab")

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> str:
        return next(self._chunks)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_caching, "_ASK_EVERY_S", 0.0)


class Process:
    """Tells what is done to it."""

    def __init__(self, name: str, told: list[str]) -> None:
        self._name = name
        self._told = told

    def kill(self) -> None:
        self._told.append(f"kill {self._name}")

    def wait(self, timeout: float) -> None:
        self._told.append(f"wait {self._name}")


def bench_of(client: Client) -> Bench:
    return Bench(client, prefix_tokens=130, seed=1)  # type: ignore[arg-type]


def test_pairs_alternate_and_no_system_prompt_is_sent_twice() -> None:
    client = Client(cache_of("pending"), cache_of("ready"))
    bench = bench_of(client)
    pairs = bench.pairs(bench.keep(), 3)
    assert [(pair.plain.cached_tokens, pair.kept.cached_tokens) for pair in pairs] == [(0, 96)] * 3
    assert [first["role"] for first in client.asked[1:]] == ["system", "cache"] * 4  # one pair more than is reported
    texts = [first["content"] for first in client.asked if first["role"] == "system"]
    assert len(set(texts)) == len(texts) == 5
    assert {first["content"] for first in client.asked if first["role"] == "cache"} == {"cache_id=cache-1"}


def test_a_cache_that_fails_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="no_room"):
        bench_of(Client(cache_of("error", CacheError(type="t", message="no_room")))).keep()


def test_who_knows_of_the_cache_or_holds_it_is_killed() -> None:
    told: list[str] = []
    names = ("gateway0", "messenger0", "messenger1", "decode0")
    processes = {name: Process(name, told) for name in names}
    mesh = LocalMesh(host="", port=0, model="", sdk="", conductor="", processes=processes)
    answers: list[bool | Exception] = [PeerUnreachable("gone"), False, True]

    def is_back() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    lose(mesh, is_back)
    victims = ["gateway0", "messenger0", "messenger1"]
    assert told == [f"{what} {name}" for what in ("kill", "wait") for name in victims]
    assert answers == []


@pytest.mark.parametrize(("kept_s", "cached", "met"), [(0.1, 99, [True, True]), (0.2, 97, [False, False])])
def test_aims_are_reported_as_met_or_missed(kept_s: float, cached: int, met: list[bool]) -> None:
    pairs = [
        Pair(
            plain=Turn(ttft_s=1.0, prompt_tokens=100, cached_tokens=0),
            kept=Turn(ttft_s=kept_s * factor, prompt_tokens=100, cached_tokens=cached),
        )
        for factor in (0.5, 1.0, 3.0)
    ]
    report = Report("context caching", "test")
    tell(report, "now", pairs)
    assert [row.met for row in report.rows] == met
    assert report.rows[0].ratio == report.rows[0].value == kept_s
    assert report.rows[0].spread == (kept_s * 0.5, kept_s * 3.0)
