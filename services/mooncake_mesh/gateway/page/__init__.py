"""The page: a view of the mesh in a browser, and a place to chat with it. See docs/page.md.

::

    GET /  /page/style.css  /page/*.js       static, the same for everybody, so without an API key
    GET /page/state?after=N                  what the page shows, with an API key where keys are in use
"""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.api import Mesh
from mooncake_mesh.gateway.asgi import json_response
from mooncake_mesh.gateway.doorkeeper import Doorkeeper, tenant_of
from mooncake_mesh.gateway.page.state import page_state

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_SCRIPTS: Final = ("page.js", "charts.js", "chat.js", "words.js")
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/page/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
}
_MAX_NUMBER: Final = 2**53
"""What a browser counts exactly."""


def page_routes(mesh: Mesh, doorkeeper: Doorkeeper) -> list[Route]:
    """All routes of the page. The document says whether API keys are in use, so that it asks before it is refused."""
    folder = files(__package__)
    routes = []
    for path, (name, kind) in _FILES.items():
        content = (folder / name).read_bytes()
        if name == "index.html" and doorkeeper.asks_for_keys:
            content = content.replace(b'data-api-keys="none"', b'data-api-keys="asked"', 1)
        routes.append(Route(path, _static(content, {**_HEADERS, "content-type": kind})))

    async def state(request: Request) -> Response:
        """``after`` is the number of the last decision that the page has."""
        after = _after(request)
        report, decisions = await asyncio.gather(mesh.report(), mesh.decisions(after=after))
        body = page_state(report, decisions, models=mesh.models(), tenant=tenant_of(request.scope))
        return json_response(body, headers={"cache-control": "no-store"})

    return [*routes, Route("/page/state", state)]


def _static(content: bytes, headers: dict[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def static(_: Request) -> Response:
        return Response(content, headers=headers)

    return static


def _after(request: Request) -> int:
    """Raises InvalidRequest."""
    text = request.query_params.get("after", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 16 and int(text) < _MAX_NUMBER):
        raise InvalidRequest("after: expected the number of a decision", param="after")
    return int(text)
