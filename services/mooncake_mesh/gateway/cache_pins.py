"""Pins of context caches at the messengers: asks each of them to keep a prefix, and hears how much of it is there."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from mooncake_mesh.errors import MooncakeError
from mooncake_mesh.gateway.mesh import MeshClient
from mooncake_mesh.kv.block_hash import chain, join_keys
from mooncake_mesh.mesh.phonebook import Phonebook
from mooncake_proto.ids import BLOCK_KEY_BYTES
from mooncake_proto.transfer import PinPrefix, PrefixPinned

log = structlog.get_logger(__name__)

_PIN_TIMEOUT_S: Final = 2.0
_REMEMBERED: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """Of a prefix of ``n_blocks`` whole blocks one messenger has the first ``n_pinned``, and none has more."""

    n_blocks: int
    n_pinned: int

    @property
    def is_whole(self) -> bool:
        return self.n_pinned >= self.n_blocks


class CachePins(Protocol):
    """What the keeper of caches asks of the mesh."""

    async def pin(self, pin_id: str, prefix: bytes, *, model: str, tenant: str, keep_s: float) -> PinState | None:
        """Pin the tokens *prefix* (as on the wire) wherever they are; None while nobody serves *model*."""

    async def unpin(self, pin_id: str) -> None: ...


class MessengerPins:
    """Implements ``CachePins``. Whichever messenger does not answer has nothing pinned."""

    def __init__(self, mesh: MeshClient) -> None:
        self._mesh = mesh
        self._messengers = Phonebook()
        self._keys: OrderedDict[tuple[str, bytes], bytes] = OrderedDict()  # a chain of 8,192 blocks takes 10 ms

    def close(self) -> None:
        self._messengers.close()

    async def pin(self, pin_id: str, prefix: bytes, *, model: str, tenant: str, keep_s: float) -> PinState | None:
        space = self._mesh.key_space(model, tenant, "")
        if space is None:
            return None
        keys = self._keys.get((pin_id, space.root))
        if keys is None:
            keys = await asyncio.to_thread(lambda: join_keys(chain(space.root, prefix, space.block_tokens)))
            self._keys[pin_id, space.root] = keys
            if len(self._keys) > _REMEMBERED:
                self._keys.popitem(last=False)
        pinned = await self._ask_all(PinPrefix(pin_id=pin_id, keys=keys, keep_s=keep_s))
        return PinState(n_blocks=len(keys) // BLOCK_KEY_BYTES, n_pinned=max(pinned, default=0))

    async def unpin(self, pin_id: str) -> None:
        await self._ask_all(PinPrefix(pin_id=pin_id, keys=b"", keep_s=0.0))

    async def _ask_all(self, request: PinPrefix) -> list[int]:
        return await asyncio.gather(*(self._ask(endpoint, request) for endpoint in self._mesh.messengers()))

    async def _ask(self, endpoint: str, request: PinPrefix) -> int:
        try:
            reply = await self._messengers.get(endpoint).call(request, PrefixPinned, timeout_s=_PIN_TIMEOUT_S)
        except MooncakeError as error:
            log.info("pin_undelivered", pin_id=request.pin_id, endpoint=endpoint, code=error.code)
            return 0
        return reply.n_blocks
