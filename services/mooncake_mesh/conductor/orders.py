"""What a placement leads to besides its answer: word to messengers, which nobody waits for. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from mooncake_proto.transfer import ReadAhead, Replicate

_MAX_ORDERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``message`` goes to the messenger at ``endpoint``."""

    endpoint: str
    message: ReadAhead | Replicate


class Orders:
    """Orders since they were last taken. Where nobody takes them (a simulation), the oldest are forgotten."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque(maxlen=_MAX_ORDERS)

    def add(self, endpoint: str, message: ReadAhead | Replicate) -> None:
        """Without an endpoint there is nobody to tell."""
        if endpoint:
            self._orders.append(Order(endpoint=endpoint, message=message))

    def take(self) -> list[Order]:
        taken = list(self._orders)
        self._orders.clear()
        return taken
