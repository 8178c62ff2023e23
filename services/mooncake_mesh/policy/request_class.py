"""Priorities, and the classes that requests are counted by.

A priority is a whole number, lower is more urgent, 0 is the default: the convention of vLLM's servers. The largest one
is that of batch work, which has no objective of its own and only fills what others leave idle.
"""

from enum import Enum
from typing import Final

MOST_URGENT: Final = -100
BATCH_PRIORITY: Final = 100
BEGUN: Final = MOST_URGENT - 1
"""How urgent a prompt counts that is overtaken by nobody any more."""


class RequestClass(Enum):
    URGENT = "urgent"
    STANDARD = "standard"
    BACKGROUND = "background"
    BATCH = "batch"


def is_batch(priority: int) -> bool:
    """Whether a request only fills idle capacity; it has no objectives."""
    return priority >= BATCH_PRIORITY


def class_of(priority: int) -> RequestClass:
    if is_batch(priority):
        return RequestClass.BATCH
    if priority == 0:
        return RequestClass.STANDARD
    return RequestClass.URGENT if priority < 0 else RequestClass.BACKGROUND
