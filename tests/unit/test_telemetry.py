"""One event a line, with its origin; third-party loggers in the same form; no prompts."""

import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import structlog

from mooncake_mesh import telemetry
from mooncake_mesh.config import LogFormat, LogLevel


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    structlog.reset_defaults()


def _configured(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    out = io.StringIO()
    telemetry.configure("prefill", "prefill0", level, log_format, stream=out)
    return out


def _events(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_json_event_names_its_origin() -> None:
    out = _configured(LogFormat.JSON)
    structlog.get_logger().info("request_placed", request_id="r1", prefix_blocks=12)
    (event,) = _events(out)
    timestamp = event.pop("timestamp")
    assert isinstance(timestamp, str)
    assert timestamp.endswith("Z")
    assert event == {
        "level": "info",
        "role": "prefill",
        "instance": "prefill0",
        "event": "request_placed",
        "request_id": "r1",
        "prefix_blocks": 12,
    }


def test_console_has_no_colours_off_a_terminal() -> None:
    out = _configured(LogFormat.CONSOLE)
    structlog.get_logger().warning("peer_lost", peer="decode0")
    line = out.getvalue()
    assert "\x1b" not in line
    for part in ("warning", "peer_lost", "peer=decode0", "role=prefill", "instance=prefill0"):
        assert part in line


def test_console_has_colours_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    telemetry.configure("prefill", "prefill0", LogLevel.INFO, LogFormat.CONSOLE, stream=out)
    structlog.get_logger().info("ready")
    assert "\x1b[" in out.getvalue()


def test_level_filters_ours_and_theirs() -> None:
    out = _configured(LogFormat.JSON, LogLevel.WARNING)
    structlog.get_logger().info("small_talk")
    logging.getLogger("somebody").info("small talk")
    structlog.get_logger().error("trouble")
    assert [event["event"] for event in _events(out)] == ["trouble"]


def test_standard_library_loggers_have_the_same_form() -> None:
    out = _configured(LogFormat.JSON)
    logging.getLogger("uvicorn.error").warning("port %d is slow", 8000)
    logging.getLogger("uvicorn.error").info("not a word of this")
    (event,) = _events(out)
    assert event["event"] == "port 8000 is slow"
    assert event["logger"] == "uvicorn.error"
    assert (event["role"], event["instance"], event["level"]) == ("prefill", "prefill0", "warning")


def test_warnings_are_logged() -> None:
    out = _configured(LogFormat.JSON)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("mind the step", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    (event,) = _events(out)
    assert event["logger"] == "py.warnings"
    assert "mind the step" in str(event["event"])


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_content_is_withheld(log_format: LogFormat) -> None:
    out = _configured(log_format)
    structlog.get_logger().info(
        "request_failed", prompt="my secret", messages=[{"content": "my secret"}], tokens=3, queued_tokens=7
    )
    assert "my secret" not in out.getvalue()
    assert "<9 withheld>" in out.getvalue()
    assert "tokens=3" in out.getvalue().replace('"tokens": 3', "tokens=3")  # a count is no content


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_nobody_outside_writes_lines_of_a_log(log_format: LogFormat) -> None:
    out = _configured(log_format)
    structlog.get_logger().info(
        "client_gone", path="/x\n2026 fake\r\x1b[31mred\x9b\u2028\udcff äö", instance_id="i" * 9000
    )
    text = out.getvalue()
    assert text.count("\n") == 1
    assert "äö" in text
    assert not {"\r", "\x1b", "\x9b", "\u2028", "\udcff"} & set(text)
    assert len(text) < 3000


@pytest.mark.parametrize("log_format", list(LogFormat))
def test_traceback_shows_no_local_variables(log_format: LogFormat) -> None:
    out = _configured(log_format)

    def fail(prompt: str) -> None:
        raise RuntimeError(f"no luck with {len(prompt)} characters")

    try:
        fail("".join(["my ", "secret"]))
    except RuntimeError:
        structlog.get_logger().exception("job_failed")
    assert "no luck with 9 characters" in out.getvalue()
    assert "Traceback" in out.getvalue()
    assert "my secret" not in out.getvalue()
