"""Emoji and CJK through a live mesh: tokens are single bytes here, so every character is split over several of them."""

from collections.abc import Iterator

import pytest

from mooncake_mesh.engine.fake import UTF8_TEXT
from tests.mesh import clients
from tests.mesh.clients import Stream
from tests.mesh.harness import Mesh

pytestmark = pytest.mark.mesh

_BYTES = UTF8_TEXT.encode()


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    flags = ["--fake-output=utf8"]
    with Mesh(flags={"prefill": flags, "decode": flags}) as mesh:
        yield mesh


def _said(n_bytes: int) -> str:
    """The first *n_bytes* of the engine's endless text; a character that is cut off at the end is replaced."""
    return (_BYTES * (n_bytes // len(_BYTES) + 1))[:n_bytes].decode(errors="replace")


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 50, 81, 82, 83, 84, len(_BYTES), 2 * len(_BYTES) + 40])
def test_a_stream_concatenates_to_the_whole_text(mesh: Mesh, max_tokens: int) -> None:
    prompt = f"say {max_tokens} bytes"
    whole = clients.complete(mesh.http, prompt, max_tokens)
    assert whole == _said(max_tokens)
    with Stream(mesh.http, prompt, max_tokens) as stream:
        assert stream.result() == whole


@pytest.mark.parametrize(
    "stop", ["🥮🏮", "🏮", "こんにちは", "は世", "👩‍🚀", "\u200d", "🇳", "ć g", "😀 plain", "ç√∫ 😀"]
)
def test_stop_strings_across_token_boundaries_never_leak(mesh: Mesh, stop: str) -> None:
    before = UTF8_TEXT[: UTF8_TEXT.index(stop)]
    assert clients.complete(mesh.http, "stop there", 400, stop=stop) == before
    with Stream(mesh.http, "stop there", 400, {"stop": [stop, "never said"]}) as stream:
        assert stream.result() == before
        assert stream.finish_reasons == ["stop"]


def test_the_beginning_of_a_stop_string_that_does_not_go_on_is_said(mesh: Mesh) -> None:
    with Stream(mesh.http, "go on", 60, {"stop": ["月饼圆又方"]}) as stream:
        assert stream.result() == _said(60)
        assert stream.finish_reasons == ["length"]
