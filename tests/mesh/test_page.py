"""The page of a live mesh: what its endpoint tells, and, where there is a Chromium, what a browser makes of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_mesh.gateway import api_keys
from mooncake_mesh.mesh import key_folder
from tests.mesh import clients
from tests.mesh.browser import Browser
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

PROMPT = "the moon, the mid-autumn moon " * 4
BLOCKS = "--fake-head-dim=32"
"""Blocks of 8 KiB: an arena has 128, for 2048 tokens."""

LONG = "word " * 600
"""More tokens than any arena here has room for."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    ssd = tmp_path_factory.mktemp("ssd")
    flags = {
        "messenger0": [f"--ssd-dir={ssd}", "--ssd-bytes=4MiB"],
        "prefill": ["--fake-output=utf8", BLOCKS],
        "decode": ["--fake-output=utf8", BLOCKS, "--fake-decode-s-base=0.003"],
    }
    with Mesh(flags=flags, prefill_nodes=(0, 2), arena_bytes="1MiB") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def browser(chromium: None) -> Iterator[Browser]:
    with Browser() as browser:
        browser.size(1200, 900)
        yield browser


def state(mesh: Mesh, after: int = 0) -> Any:
    answer = clients.get(mesh.http, f"/page/state?after={after}")
    assert answer.status == 200, answer.body
    return answer.json()


def in_page(name: str) -> str:
    return f"document.getElementById('{name}').innerText"


# --- the endpoint -----------------------------------------------------------------------------------------------------


def test_the_state_has_the_mesh_and_each_decision_with_its_reason(mesh: Mesh) -> None:
    before = state(mesh)
    known = before["decided"] or 0
    clients.complete(mesh.http, PROMPT, 4)
    mesh.wait_idle()
    told = state(mesh, known)
    assert told["conductor"] == before["conductor"] == mesh.status().cluster.conductor
    instances = {one["id"]: one for one in told["mesh"]["instances"]}
    assert list(instances) == ["gateway0", "prefill0", "prefill1", "decode0"]
    assert all(one["health"] == "alive" for one in instances.values())
    pool = {one["node"]: one for one in told["mesh"]["pool"]}
    assert set(pool) == {"node0", "node1", "node2"}
    assert pool["node0"]["ssd_slots"] > 0
    assert pool["node1"]["ssd_slots"] == 0
    (decision,) = told["decisions"]
    assert decision["number"] == told["decided"] == known + 1
    assert decision["decode"] == "decode0"
    assert {one["instance_id"] for one in decision["prefill_candidates"]} == {"prefill0", "prefill1"}
    assert decision["why"]
    assert state(mesh, told["decided"])["decisions"] == []


def test_a_refusal_is_a_decision_too(mesh: Mesh) -> None:
    known = state(mesh)["decided"] or 0
    answer = clients.post(mesh.http, "/v1/completions", clients.completion_fields(LONG, 4))
    assert answer.status == 503, answer.body
    decisions = state(mesh, known)["decisions"]
    assert decisions, "more than one while the conductor has just begun"
    for decision in decisions:
        assert decision["reason"] == "prefill_pool_too_small"
        assert decision["why"] == "the prompt has more blocks than any prefill node"
        assert (decision["prefill"], decision["decode"]) == ("", "")


# --- the browser ------------------------------------------------------------------------------------------------------


def test_a_chat_is_streamed_and_tells_ttft_and_cached_tokens(mesh: Mesh, browser: Browser) -> None:
    browser.open(mesh.http)
    browser.until(f"{in_page('verdict')} === 'healthy'")
    for turn in (1, 2):
        browser.value("document.getElementById('message').focus()")
        browser.write(PROMPT)
        browser.press_enter()
        browser.until(f"document.querySelectorAll('.turn.assistant small')[{turn - 1}]?.innerText.includes('TTFT')")
        assert browser.value("document.getElementById('log').getAttribute('aria-busy')") == "false"
    first, second = browser.value("[...document.querySelectorAll('.turn.assistant small')].map(one => one.innerText)")
    assert "256 tokens in" in first
    cached = int(second.split(" · ")[1].split(" of ")[0].replace(",", ""))
    assert cached >= 128, second  # the first turn's prompt and answer, but for their last block
    assert "naïve façade" in browser.value(in_page("log"))
    assert browser.problems == []


def test_everything_is_shown_and_nothing_is_cut_off(mesh: Mesh, browser: Browser) -> None:
    clients.complete(mesh.http, PROMPT, 4)
    clients.post(mesh.http, "/v1/completions", clients.completion_fields(LONG, 4))
    browser.open(mesh.http)
    browser.until(f"{in_page('classes')}.includes('goodput')")
    browser.until(f"{in_page('decisions')}.includes('rejected: prefill pool too small')")
    shown = browser.value("document.body.innerText")
    for text in ("prefill1", "decode0", "node1", "DRAM", "SSD", "TTFT", "TBT", "p99", "objective", "→ decode0"):
        assert text in shown, text
    assert browser.value("document.querySelectorAll('#decode-chart .line').length") == 2
    browser.value("document.querySelector('#decisions .placed summary').click()")
    browser.until("document.querySelector('.candidates')?.innerText.includes('Prefill candidates, 2 of 2')")
    browser.value("document.querySelector('#wanted').value = 'placed'")
    browser.value("document.querySelector('#wanted').dispatchEvent(new Event('change'))")
    assert "rejected" not in browser.value(in_page("decisions"))
    browser.size(400, 800)
    assert browser.value("document.documentElement.scrollWidth") <= 400
    browser.size(1200, 900)
    assert browser.problems == []


def test_light_and_dark_are_told_apart(mesh: Mesh, browser: Browser) -> None:
    browser.open(mesh.http)
    grounds = set()
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        grounds.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_the_page_is_asked_for_nothing_while_nobody_sees_it(mesh: Mesh, browser: Browser) -> None:
    browser.open(mesh.http)
    browser.until(f"{in_page('verdict')} === 'healthy'")
    browser.value("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    browser.value("window.asked = 0, window.real = fetch, window.fetch = (...a) => (window.asked++, window.real(...a))")
    assert browser.value("new Promise(done => setTimeout(() => done(window.asked), 1500))") == 0
    browser.value("delete document.hidden, document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("window.asked > 0")


def test_an_instance_that_dies_and_returns_is_seen_to(mesh: Mesh, browser: Browser) -> None:
    browser.open(mesh.http)
    browser.until(f"{in_page('verdict')} === 'healthy'")
    mesh.kill("prefill1")
    browser.until(f"{in_page('banner')}.includes('prefill1 is dead')")
    assert browser.value(in_page("verdict")) == "not healthy"
    mesh.start("prefill1")
    browser.until(f"{in_page('verdict')} === 'healthy'")
    assert browser.value("document.getElementById('banner').hidden")
    assert browser.problems == []


def test_with_keys_in_use_the_page_asks_for_one(mesh: Mesh, browser: Browser, tmp_path: Path) -> None:
    browser.open("about:blank")  # no page that still asks for its state while the gateway is away
    browser.problems.clear()
    mesh.wait_idle()
    folder = key_folder.create(tmp_path / "keys", "node0").folder
    key = api_keys.add(folder / api_keys.FILE_NAME, "app", "acme", None)
    mesh.restart("gateway0", f"--keys={folder}")
    mesh.wait_healthy()
    browser.open(mesh.http)
    browser.until(f"{in_page('verdict')} === 'locked'")
    assert browser.value("document.activeElement.id") == "key"
    assert browser.problems == []  # it did not even try
    browser.picture(tmp_path / "locked.png")
    browser.write("mk-wrong")
    browser.press_enter()
    browser.until(f"{in_page('key-problem')}.includes('not known')")
    browser.problems.clear()  # the browser tells of a 401
    browser.write(key)
    browser.press_enter()
    browser.until(f"{in_page('verdict')} === 'healthy'")
    assert browser.value("sessionStorage.length === 1 && localStorage.length === 0")
    browser.value("document.getElementById('forget').click()")
    assert browser.value("sessionStorage.length") == 0
    assert browser.value("document.getElementById('main').hidden")
    assert browser.problems == []
