"""How a request stands beside others, where not its body but who passed it on says so: HTTP headers of a proxy."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.openai_requests import MAX_LABEL_CHARS, GenerationOptions
from mooncake_mesh.policy.request_class import BATCH_PRIORITY, MOST_URGENT

PRIORITY_HEADER: Final = "x-mooncake-priority"
FAIRNESS_HEADER: Final = "x-mooncake-fairness-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """None where nothing was said."""

    priority: int | None = None
    fairness_id: str | None = None

    def applied_to(self, options: GenerationOptions) -> GenerationOptions:
        """*options* as they count: what is said here wins over what the body says."""
        return replace(
            options,
            priority=options.priority if self.priority is None else self.priority,
            fairness_id=options.fairness_id if self.fairness_id is None else self.fairness_id,
        )


NO_STANDING: Final = Standing()


def standing_of(headers: Mapping[str, str]) -> Standing:
    """Raises InvalidRequest for a header that says nothing sensible."""
    return Standing(priority=_priority(headers.get(PRIORITY_HEADER)), fairness_id=_label(headers.get(FAIRNESS_HEADER)))


def _priority(text: str | None) -> int | None:
    if text is None:
        return None
    digits = text.removeprefix("-")
    value = int(text) if digits.isascii() and digits.isdecimal() and len(digits) <= 4 else None
    if value is None or not MOST_URGENT <= value <= BATCH_PRIORITY:
        message = f"{PRIORITY_HEADER} must be an integer between {MOST_URGENT} and {BATCH_PRIORITY}"
        raise InvalidRequest(message, param=PRIORITY_HEADER)
    return value


def _label(text: str | None) -> str | None:
    if text is not None and (len(text) > MAX_LABEL_CHARS or not text.isprintable()):
        message = f"{FAIRNESS_HEADER} must be printable and no longer than {MAX_LABEL_CHARS} characters"
        raise InvalidRequest(message, param=FAIRNESS_HEADER)
    return text
