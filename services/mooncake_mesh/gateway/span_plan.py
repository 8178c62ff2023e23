"""The life of one choice as spans of a distributed trace: what ``mooncake trace`` shows, for OpenTelemetry. Pure.

::

    choice                      from its arrival at the gateway to its end
    ├─ placing                  the question to the conductor; again for each new attempt
    ├─ acquiring                blocks for the prompt from the messenger, which fetches its prefix from other nodes
    ├─ queued                   at the prefill instance, acquiring included
    ├─ prefill                  computing the rest of the prompt
    ├─ kv transfer              what was left of it after the first token
    └─ decode                   from the first token to the last one, the transfer included

What takes no time (jobs accepted, a worker lost, …) is an event of the choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from mooncake_proto.client import RequestTrace, TraceStep

Attributes = Mapping[str, str | int]

_NAMES: Final = MappingProxyType({"placed": "placing", "not placed": "placing"})
_SPANS: Final = frozenset({"placed", "not placed", "acquiring", "queued", "prefill", "kv transfer", "decode"})
_TROUBLES: Final = frozenset({"not placed", "job failed", "worker lost", "deadline passed"})
_FINISHED: Final = "finished"
_AFTERWARDS: Final = frozenset({"decode", "ended"})
"""What is told when a choice ends, whatever ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvent:
    """Times are in Unix seconds."""

    name: str
    at_s: float
    attributes: Attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpan:
    """``error`` says what went wrong, empty where nothing did. Times are in Unix seconds."""

    name: str
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""
    events: tuple[PlannedEvent, ...] = ()
    children: tuple["PlannedSpan", ...] = ()


def planned(trace: RequestTrace) -> PlannedSpan:
    """The spans of one choice that is over."""
    end_s = max((step.at_s for step in trace.steps), default=0.0)
    return PlannedSpan(
        name="choice",
        start_s=trace.started_at,
        end_s=trace.started_at + end_s,
        attributes=_of_choice(trace),
        error=_error(trace.steps),
        events=tuple(_event(step, trace.started_at) for step in trace.steps if step.what not in _SPANS),
        children=tuple(_span(step, trace.started_at) for step in trace.steps if step.what in _SPANS),
    )


def _of_choice(trace: RequestTrace) -> Attributes:
    finish = next((step.detail for step in trace.steps if step.what == _FINISHED), "")
    return {
        "mooncake.choice_id": trace.request_id,
        "gen_ai.usage.input_tokens": trace.prompt_tokens,
        "gen_ai.usage.output_tokens": trace.generated_tokens,
        **({"mooncake.finish_reason": finish} if finish else {}),
    }


def _span(step: TraceStep, started_at: float) -> PlannedSpan:
    """A step began at most when the request came: queue and prefill are measured by another clock."""
    return PlannedSpan(
        name=_NAMES.get(step.what, step.what),
        start_s=started_at + max(0.0, step.at_s - step.took_s),
        end_s=started_at + max(0.0, step.at_s),
        attributes=_of_step(step),
        error=step.detail if step.what in _TROUBLES else "",
    )


def _event(step: TraceStep, started_at: float) -> PlannedEvent:
    return PlannedEvent(name=step.what, at_s=started_at + step.at_s, attributes=_of_step(step))


def _of_step(step: TraceStep) -> Attributes:
    given = {"mooncake.instances": step.where, "mooncake.detail": step.detail}
    return {name: value for name, value in given.items() if value}


def _error(steps: tuple[TraceStep, ...]) -> str:
    """What ended the choice, if it was trouble: a loss that it got over is none, nor is a reader who leaves."""
    rest = [step for step in steps if step.what not in _AFTERWARDS]
    if not rest or rest[-1].what not in _TROUBLES:
        return ""
    return f"{rest[-1].what}: {rest[-1].detail or rest[-1].where}".removesuffix(": ")
