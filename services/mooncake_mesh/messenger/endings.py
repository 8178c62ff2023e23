"""Transfers of which the other end may yet ask: its word comes by another way, and may be late or early. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeVar

from mooncake_proto.ids import TransferId

_T = TypeVar("_T")

_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a landing ended that is gone with its job; ``failure`` is empty for one that had landed."""

    failure: str


class Endings:
    """Landings that ended, and senders that gave up before there was a landing. The newest of each are remembered."""

    def __init__(self) -> None:
        self._ended: OrderedDict[TransferId, Ended] = OrderedDict()
        self._given_up: OrderedDict[TransferId, str] = OrderedDict()

    def get(self, transfer_id: TransferId) -> Ended | None:
        return self._ended.get(transfer_id)

    def ended(self, transfer_id: TransferId, failure: str) -> None:
        _remember(self._ended, transfer_id, Ended(failure=failure))

    def given_up(self, transfer_id: TransferId, why: str) -> None:
        """The sender of a transfer sends no more, and there is no landing. Means nothing for one that has ended."""
        if transfer_id not in self._ended:
            _remember(self._given_up, transfer_id, why)

    def take_given_up(self, transfer_id: TransferId) -> str | None:
        """Why the sender of a landing that is opened now has given up, if it has. Forgotten then."""
        return self._given_up.pop(transfer_id, None)


def _remember(table: OrderedDict[TransferId, _T], transfer_id: TransferId, what: _T) -> None:
    table[transfer_id] = what
    if len(table) > _REMEMBERED:
        table.popitem(last=False)
