"""Structured logs: one event a line on stderr, as JSON or for people.

``structlog.get_logger()`` is all that other modules need. Events of this project go straight to the stream; those of
the standard library's loggers (uvicorn, asyncio, warnings) pass through the same processors, so that every line has the
same form. What users say to the model never enters a log: values under the names in ``_CONTENT`` are replaced by their
length. Nor can anybody outside write a log's lines: text is one line of bounded length, without control characters.
"""

import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from mooncake_mesh.config import LogFormat, LogLevel

_CONTENT: Final = frozenset(
    {"body", "chunk", "completion", "content", "delta", "messages", "prompt", "request", "text", "token_ids", "tokens"}
    | {"api_key", "authorization", "secret"}
)
_LONGEST_TEXT: Final = 2000
_QUIET: Final = ("asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "urllib3", "uvicorn")
_FIRST: Final = ("timestamp", "level", "role", "instance", "event")


def configure(
    role: str, instance_id: str, level: LogLevel, log_format: LogFormat, *, stream: TextIO | None = None
) -> None:
    """Set up logging for this process; *stream* is stderr unless a test says otherwise.

    Start uvicorn with ``log_config=None``, so that it leaves this in place. Call before transformers is imported: it
    reads its own verbosity once.
    """
    out = sys.stderr if stream is None else stream
    threshold = logging.getLevelNamesMapping()[level.name]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Origin(role, instance_id),
        withhold_content,
        one_line,
    ]
    final = _renderers(log_format, out)
    structlog.configure(
        processors=[*common, *final],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
        )
    )
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(threshold)
    logging.captureWarnings(True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def withhold_content(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Processor: what a user wrote, or a model answered, is not for logs; its size is."""
    for name in _CONTENT & event.keys():
        value = event[name]
        if isinstance(value, str | bytes | Sequence | dict):
            event[name] = f"<{len(value)} withheld>"
    return event


def one_line(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Processor: ids, paths and messages may come from strangers, who would like to add lines, colours or gigabytes."""
    for name, value in event.items():
        if isinstance(value, str) and (len(value) > _LONGEST_TEXT or not value.isprintable()):
            event[name] = _escaped(value[:_LONGEST_TEXT]) + ("…" if len(value) > _LONGEST_TEXT else "")
    return event


def _escaped(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class _Origin:
    """Processor: which process speaks."""

    def __init__(self, role: str, instance_id: str) -> None:
        self._role = role
        self._instance_id = instance_id

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["role"] = self._role
        event["instance"] = self._instance_id
        return event


def _renderers(log_format: LogFormat, out: TextIO) -> list[Processor]:
    if log_format is LogFormat.JSON:
        return [structlog.processors.format_exc_info, _in_order, structlog.processors.JSONRenderer(_to_json)]
    # A plain traceback: the pretty ones print local variables, prompts among them.
    colours = out.isatty() and not os.environ.get("NO_COLOR")
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback)]


def _in_order(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {name: event.pop(name) for name in _FIRST if name in event} | dict(event)


def _to_json(event: EventDict, **options: object) -> str:
    return json.dumps(event, ensure_ascii=False, default=str)
