"""The context caching API behind the ZeroMQ door: the calls of caching_door.py, for SDK clients."""

import time
from typing import assert_never

import orjson

from mooncake_mesh.gateway.context_cache import CachingOff, Json
from mooncake_mesh.gateway.context_caching import ContextCaching, NoContextCaching
from mooncake_mesh.gateway.doorkeeper import Doorkeeper
from mooncake_mesh.gateway.rate_limits import TenantRates
from mooncake_mesh.mesh.rpc import Caller
from mooncake_proto.client import CachingAction, CachingAnswer, CachingCall


class CachingSdkDoor:
    def __init__(self, caching: ContextCaching | NoContextCaching, doorkeeper: Doorkeeper, rates: TenantRates) -> None:
        self._caching = caching
        self._doorkeeper = doorkeeper
        self._rates = rates

    async def answer(self, call: CachingCall, _: Caller) -> CachingAnswer:
        """Counts as one of the tenant's requests. Raises CachingOff in a gateway without a file for caches."""
        tenant = self._doorkeeper.admit(call.api_key)
        if isinstance(self._caching, NoContextCaching):
            raise CachingOff()
        self._rates.take_request(tenant, time.monotonic())
        return CachingAnswer(response=orjson.dumps(await _answer(self._caching, call, tenant)))


async def _answer(caching: ContextCaching, call: CachingCall, tenant: str) -> Json:
    match call.action:
        case CachingAction.CREATE:
            return await caching.create(call.request, tenant)
        case CachingAction.LIST:
            return await caching.page(call.query, tenant)
        case CachingAction.GET:
            return await caching.get(call.name, tenant)
        case CachingAction.UPDATE:
            return await caching.update(call.name, call.request, tenant)
        case CachingAction.DELETE:
            return await caching.delete(call.name, tenant)
        case CachingAction.POINT_TAG:
            return await caching.point_tag(call.request, tenant)
        case CachingAction.LIST_TAGS:
            return await caching.tag_page(call.query, tenant)
        case CachingAction.GET_TAG:
            return await caching.tag(call.name, tenant)
        case CachingAction.TAG_CONTENT:
            return await caching.tag_content(call.name, tenant)
        case CachingAction.DELETE_TAG:
            return await caching.delete_tag(call.name, tenant)
        case never:
            assert_never(never)
