"""The HTTP endpoints of context caching (docs/context-caching.md)::

POST   /v1/caching                          create
GET    /v1/caching                          list
GET    PUT DELETE /v1/caching/ID            one of them
POST   GET /v1/caching/refs/tags            point a tag to a cache; list the tags
GET    DELETE /v1/caching/refs/tags/TAG     one of them; GET …/TAG/content is the cache it points to
"""

import time
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mooncake_mesh.gateway.asgi import json_response, read_body
from mooncake_mesh.gateway.context_cache import CachingOff, Json
from mooncake_mesh.gateway.context_caching import ContextCaching, NoContextCaching
from mooncake_mesh.gateway.doorkeeper import tenant_of
from mooncake_mesh.gateway.rate_limits import TenantRates

_ALL: Final = ["GET", "POST", "PUT", "DELETE"]
_Answer = Callable[[Request, str], Awaitable[Json]]


def caching_routes(caching: ContextCaching | NoContextCaching, rates: TenantRates, max_body_bytes: int) -> list[Route]:
    """Routes under ``/v1/caching``; without context caching all of them say so."""
    if isinstance(caching, NoContextCaching):
        return [Route("/v1/caching{path:path}", _off, methods=_ALL)]
    door = _Door(caching, rates, max_body_bytes)
    table: list[tuple[str, str, _Answer]] = [
        ("POST", "/refs/tags", door.point_tag),
        ("GET", "/refs/tags", door.tags),
        ("GET", "/refs/tags/{tag}/content", door.tag_content),
        ("GET", "/refs/tags/{tag}", door.tag),
        ("DELETE", "/refs/tags/{tag}", door.delete_tag),
        ("POST", "", door.create),
        ("GET", "", door.page),
        ("GET", "/{cache_id}", door.get),
        ("PUT", "/{cache_id}", door.update),
        ("DELETE", "/{cache_id}", door.delete),
    ]
    return [Route(f"/v1/caching{path}", door.answering(answer), methods=[method]) for method, path, answer in table]


class _Door:
    def __init__(self, caching: ContextCaching, rates: TenantRates, max_body_bytes: int) -> None:
        self._caching = caching
        self._rates = rates
        self._max_body_bytes = max_body_bytes

    def answering(self, answer: _Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            """Counts as one of the tenant's requests."""
            tenant = tenant_of(request.scope)
            self._rates.take_request(tenant, time.monotonic())
            return json_response(await answer(request, tenant))

        return endpoint

    async def create(self, request: Request, tenant: str) -> Json:
        return await self._caching.create(await self._body(request), tenant)

    async def page(self, request: Request, tenant: str) -> Json:
        return await self._caching.page(request.query_params, tenant)

    async def get(self, request: Request, tenant: str) -> Json:
        return await self._caching.get(request.path_params["cache_id"], tenant)

    async def update(self, request: Request, tenant: str) -> Json:
        return await self._caching.update(request.path_params["cache_id"], await self._body(request), tenant)

    async def delete(self, request: Request, tenant: str) -> Json:
        return await self._caching.delete(request.path_params["cache_id"], tenant)

    async def point_tag(self, request: Request, tenant: str) -> Json:
        return await self._caching.point_tag(await self._body(request), tenant)

    async def tags(self, request: Request, tenant: str) -> Json:
        return await self._caching.tag_page(request.query_params, tenant)

    async def tag(self, request: Request, tenant: str) -> Json:
        return await self._caching.tag(request.path_params["tag"], tenant)

    async def tag_content(self, request: Request, tenant: str) -> Json:
        return await self._caching.tag_content(request.path_params["tag"], tenant)

    async def delete_tag(self, request: Request, tenant: str) -> Json:
        return await self._caching.delete_tag(request.path_params["tag"], tenant)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, max_bytes=self._max_body_bytes)


async def _off(_: Request) -> Response:
    raise CachingOff()
