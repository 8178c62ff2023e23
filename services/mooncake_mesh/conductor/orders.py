"""What the conductor's decisions lead to besides answers: word to messengers and workers. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from mooncake_proto.control import SwitchRole
from mooncake_proto.transfer import ReadAhead, Replicate

_MAX_ORDERS: Final = 256

OrderedMessage = ReadAhead | Replicate | SwitchRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``message`` goes to the messenger, or SwitchRole to the worker, at ``endpoint``."""

    endpoint: str
    message: OrderedMessage


class Orders:
    """Orders since they were last taken. Where nobody takes them (a simulation), the oldest are forgotten."""

    def __init__(self) -> None:
        self._orders: deque[Order] = deque(maxlen=_MAX_ORDERS)

    def add(self, endpoint: str, message: OrderedMessage) -> None:
        """Without an endpoint there is nobody to tell."""
        if endpoint:
            self._orders.append(Order(endpoint=endpoint, message=message))

    def take(self) -> list[Order]:
        taken = list(self._orders)
        self._orders.clear()
        return taken
