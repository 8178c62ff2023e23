"""Who comes in at a door of the gateway, for whom, and how often: the same for HTTP and for SDK clients."""

import time
from pathlib import Path
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mooncake_mesh.errors import ConfigError, InvalidApiKey
from mooncake_mesh.gateway import api_keys
from mooncake_mesh.gateway.api_keys import ApiKeys
from mooncake_mesh.gateway.asgi import problem_response, request_id_of
from mooncake_mesh.gateway.openai_errors import problem_of
from mooncake_mesh.gateway.rate_limits import TenantLimits, TenantRates
from mooncake_mesh.mesh.log_allowance import LogAllowance

log = structlog.get_logger(__name__)

_PAGE: Final = ("/", *(f"/page/{name}" for name in ("style.css", "page.js", "charts.js", "chat.js", "words.js")))
PUBLIC_PATHS: Final = frozenset({"/health", "/ping", "/ready", *_PAGE})
"""The questions after the gateway's health, and the page's files, which say nothing of the mesh: a browser cannot send
a key with the first request. Everything else needs a key, also what does not exist."""

NO_TENANT: Final = ""
"""Whose the requests are where no API keys are asked for."""

_LOOK_EVERY_S: Final = 1.0
_LONGEST_KEY: Final = 256


class Doorkeeper:
    """Knows the API keys in *file*, as they are now (a change counts within a second). Without *file* all may enter."""

    def __init__(self, file: Path | None) -> None:
        """Raises ConfigError for a file that is damaged."""
        self._file = file
        self._state = (0, 0)
        self._looked_s = float("-inf")
        self._keys = ApiKeys()
        self._allowance = LogAllowance()
        self.rates = TenantRates(self._limits_of)
        if file is not None:
            self._state = api_keys.state_of(file)
            self._keys = api_keys.read(file)
            log.info("api_keys_required", keys=len(self._keys.keys), file=str(file))

    @property
    def asks_for_keys(self) -> bool:
        return self._file is not None

    def admit(self, shown: str) -> str:
        """The tenant of the key *shown*. Raises InvalidApiKey."""
        if self._file is None:
            return NO_TENANT
        self._look(self._file)
        key = self._keys.find(shown) if len(shown) <= _LONGEST_KEY else None
        if key is None:
            self._tell(shown)
            why = "this API key is not known" if shown else "an API key is needed: Authorization: Bearer KEY"
            raise InvalidApiKey(why)
        return key.tenant

    def _tell(self, shown: str) -> None:
        unsaid = self._allowance.take(time.monotonic())
        if unsaid is not None:
            log.warning("api_key_refused", id=api_keys.id_in(shown[:_LONGEST_KEY]), given=bool(shown), unsaid=unsaid)

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._keys.limits_of(tenant)

    def _look(self, file: Path) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        state = api_keys.state_of(file)
        if state == self._state:
            return
        self._state = state
        try:
            self._keys = api_keys.read(file)
            log.info("api_keys_read", keys=len(self._keys.keys))
        except ConfigError as error:
            self._keys = ApiKeys()  # nobody rather than those who may have been revoked
            log.error("api_keys_unreadable", error=str(error))


class HttpDoorkeeper:
    """Lets HTTP requests in to *app*; their tenant is then in the scope, see :func:`tenant_of`."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app = app
        self._doorkeeper = doorkeeper

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                scope["state"]["tenant"] = self._doorkeeper.admit(_bearer(Headers(scope=scope)))
            except InvalidApiKey as error:
                response = problem_response(problem_of(error, request_id=request_id_of(scope)))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def tenant_of(scope: Scope) -> str:
    """Whose the request is."""
    tenant: str = scope["state"]["tenant"]
    return tenant


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
