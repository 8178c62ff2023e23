"""What clients ask under random faults: the same for the same numbers, and of real engines only what has one answer."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from bench import fault_work
from bench.fault_mesh import Ask, Books
from bench.fault_work import FakeWork, OneNodeWork, RealWork
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh


def test_the_same_numbers_ask_the_same() -> None:
    work = FakeWork()
    first, second = ([work.ask(rng) for _ in range(20)] for rng in (random.Random("a"), random.Random("a")))
    assert first == second
    assert len({ask.prompt.split(" tells ")[0] for ask in first}) > 1, "several families"
    assert {ask.seed is None for ask in first} == {True, False}


def test_one_node_has_one_messenger_for_all_workers() -> None:
    mesh = OneNodeWork().mesh()  # not started
    try:
        workers = {"prefill0", "prefill1", "decode0", "decode1"}
        assert set(mesh.names) == {"conductor", "gateway0", "messenger0", *workers}
    finally:
        mesh.end_by_force()


@dataclass(slots=True)
class Script:
    """A mesh whose answers to unsteady prompts differ each time. Notes whether the books were opened."""

    unsteady: frozenset[int]
    http: str = "http://mesh"
    asked: list[str] = field(default_factory=list)
    opened: bool = False

    def answer(self, ask: Ask) -> Ask:
        self.asked.append(ask.prompt)
        number = int(ask.prompt.split(".")[0].removeprefix("Story "))
        times = self.asked.count(ask.prompt) if number in self.unsteady else 0
        ask.stream = cast(Stream, Answer(text=f"answer {number}.{times}"))
        return ask

    def note(self) -> None:
        self.opened = True


@dataclass(slots=True)
class Answer:
    text: str
    errors: list[Any] = field(default_factory=list)

    def wait_over(self, *, timeout_s: float) -> None:
        assert timeout_s > 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> RealWork:
    monkeypatch.setattr(fault_work, "resolve_model", lambda _: Path("/model"))
    return RealWork()


def begun(work: RealWork, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ask, "start", lambda ask, _: script.answer(ask))
    work.begin(cast(Mesh, script), cast(Books, script))


def test_only_answers_that_are_the_same_in_a_crowd_count(work: RealWork, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(unsteady=frozenset({0, 5}))
    begun(work, script, monkeypatch)
    assert script.opened
    rng = random.Random(1)
    asks = [work.ask(rng) for _ in range(200)]
    assert {ask.expected() for ask in asks} == {f"answer {n}.0" for n in range(12) if n not in script.unsteady}
    assert {ask.more["model"] for ask in asks} == {"/model"}
    salts = [ask.more["cache_salt"] for ask in asks if "cache_salt" in ask.more]
    assert len(set(salts)) == len(salts)
    assert 50 < len(salts) < 150, "about half are computed anew"


def test_a_machine_on_which_most_answers_waver_is_no_witness(work: RealWork, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="5 of 12 answers"):
        begun(work, Script(unsteady=frozenset(range(7))), monkeypatch)
