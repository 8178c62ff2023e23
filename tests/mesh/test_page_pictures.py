"""The page through a day of a mesh, in pictures: nothing asked yet, load, overload, an instance dead and back again.

Each scene is photographed wide and narrow, light and dark, into the folder that pytest keeps for the test. The pictures
are for people and never part of the repository (docs/page.md says how to get them). What a test can judge of them is
judged here: nothing wider than the window, no text too pale, no word from the console.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.mesh import clients
from tests.mesh.browser import Browser
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

WIDE, NARROW = (1280, 900), (400, 800)
LEAST_CONTRAST = 4.5
"""WCAG 2 AA, for text of every size."""

PALE = """
(() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = parse(getComputedStyle(e).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const isShown = element.checkVisibility() && walker.currentNode.data.trim() && !element.disabled;
    if (!isShown || element.closest("option, script, noscript, .skip")) continue;
    const style = getComputedStyle(element);
    const ink = parse(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(ground(element))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < LEAST) found.push(`${contrast.toFixed(2)}: ${walker.currentNode.data.trim().slice(0, 40)}`);
  }
  return found;
})()
""".replace("LEAST", str(LEAST_CONTRAST))

COST = {
    "format": "mooncake-mesh/cost/1",
    "prefill_base_s": 0.001,
    "prefill_token_s": 0.002,
    "prefill_pair_s": 0.0,
    "cached_token_s": 0.0,
    "step_base_s": 0.0,
    "step_sequence_s": 0.03,
    "step_context_token_s": 0.0,
    "transfer_base_s": 0.001,
    "transfer_byte_s": 1e-9,
}
"""What the engines' flags below make them cost: three sequences to a decode instance are too many for 87 ms, and
two are not, also where steps take half as long again on a busy machine."""


@pytest.fixture(scope="module")
def mesh(chromium: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("mesh")
    profile = folder / "cost.json"
    profile.write_text(json.dumps(COST))
    slos = ["--tbt-slo-s=0.087", "--ttft-slo-s=5", "--wip-limit=100", "--admission=early"]
    flags = {
        "conductor": [*slos, f"--cost-profile={profile}"],
        "messenger0": [f"--ssd-dir={folder}", "--ssd-bytes=4MiB"],
        "prefill": ["--fake-output=utf8", "--fake-prefill-s-per-token=0.002", "--fake-head-dim=32"],
        "decode": ["--fake-output=utf8", "--fake-decode-s-per-slot=0.03", "--fake-head-dim=32"],
    }
    with Mesh(flags=flags, prefill_nodes=(0, 2), decode_nodes=(1, 1), arena_bytes="2MiB") as mesh:
        yield mesh


@pytest.fixture(scope="module")
def browser(mesh: Mesh) -> Iterator[Browser]:
    with Browser() as browser:
        browser.size(*WIDE)
        browser.open(mesh.http)
        browser.until("document.getElementById('verdict').innerText === 'healthy'")
        yield browser


@pytest.fixture
def photograph(browser: Browser, tmp_path: Path) -> Any:
    def photograph(scene: str) -> None:
        for size, (width, height) in {"wide": WIDE, "narrow": NARROW}.items():
            browser.size(width, height)
            assert browser.value("document.documentElement.scrollWidth") <= width, scene
            for scheme in ("light", "dark"):
                browser.scheme(scheme)
                assert browser.value(PALE) == [], (scene, scheme)
                browser.picture(tmp_path / f"{scene}-{size}-{scheme}.png")
        browser.size(*WIDE)
        assert browser.problems == []

    return photograph


def in_page(name: str) -> str:
    return f"document.getElementById('{name}').innerText"


def test_nothing_was_asked_yet(browser: Browser, photograph: Any) -> None:
    assert "No request has ended yet." in browser.value(in_page("classes"))
    photograph("empty")


def prompt(conversation: int, turn: int) -> str:
    return f"conversation {conversation}: " + "the moon is made of " * 12 + f"what? (turn {turn})"


def asking(mesh: Mesh, stack: ExitStack, n: int, turn: int) -> list[Stream]:
    return [stack.enter_context(Stream(mesh.http, prompt(number, turn), 300)) for number in range(n)]


def test_load_is_seen(mesh: Mesh, browser: Browser, photograph: Any) -> None:
    for turn in range(3):
        for conversation in range(3):
            clients.complete(mesh.http, prompt(conversation, turn), 8)
    with ExitStack() as stack:
        for each in asking(mesh, stack, 3, turn=9):
            each.wait_chunks(1)
        browser.until(f"{in_page('decode-now')}.startsWith('3 decoded')")
        for chart in ("decode", "requests"):
            drawn = browser.value(f"document.querySelector('#{chart}-chart .line.first').getAttribute('d')")
            assert len({point.split(",")[1] for point in drawn[1:].split(" L")}) > 1, "a line that is not flat"
        browser.value("document.querySelector('#decisions .placed summary').click()")
        photograph("load")


def test_a_chart_tells_what_is_under_the_pointer(browser: Browser, photograph: Any) -> None:
    browser.point_at("#decode-chart", 0.99)
    browser.until("document.querySelectorAll('.tip:not([hidden])').length === 3")
    assert "decoded" in browser.value("document.querySelector('#decode-chart ~ .tip').innerText")
    photograph("pointer")
    browser.point_at("h1", 0.5)
    browser.until("document.querySelectorAll('.tip:not([hidden])').length === 0")


def test_overload_is_seen(mesh: Mesh, browser: Browser, photograph: Any) -> None:
    with ExitStack() as stack:
        asking(mesh, stack, 8, turn=10)
        asking(mesh, stack, 8, turn=11)
        browser.until("parseFloat(document.querySelector('#requests-now .bad + b').innerText) > 0")
        browser.until(f"{in_page('decisions')}.includes('rejected')")
        browser.until(f"{in_page('classes')}.includes('Refused')")
        photograph("overload")
    mesh.wait_idle()


def test_a_chat_is_seen(mesh: Mesh, browser: Browser, photograph: Any) -> None:
    browser.until(f"{in_page('decode-now')}.startsWith('0 decoded')")
    browser.value("document.getElementById('longest').value = '64'")
    for turn, text in enumerate(("What does the conductor do?", "And who holds the KVCache meanwhile?")):
        browser.value("document.getElementById('message').focus()")
        browser.write(text)
        browser.press_enter()
        browser.until(f"document.querySelectorAll('.turn.assistant small')[{turn}]?.innerText.includes('TTFT')")
    photograph("chat")


def test_an_instance_that_dies_and_returns_is_seen(mesh: Mesh, browser: Browser, photograph: Any) -> None:
    mesh.kill("prefill1")
    browser.until(f"{in_page('banner')}.includes('prefill1 is dead')")
    photograph("dead")
    mesh.start("prefill1")
    browser.until(f"{in_page('verdict')} === 'healthy'")
    photograph("back")


def test_a_conductor_that_is_away_is_seen(mesh: Mesh, browser: Browser, photograph: Any) -> None:
    mesh.kill("conductor")
    browser.until(f"{in_page('verdict')} === 'no conductor'")
    assert "no conductor" in browser.value("document.title")
    photograph("no-conductor")
    mesh.start("conductor")
    browser.until(f"{in_page('verdict')} === 'healthy'")
