"""OpenAI's endpoints that this server does not have: each says so, instead of looking like a mistyped path."""

from typing import Final, NoReturn

from starlette.requests import Request
from starlette.routing import Route

from mooncake_mesh.gateway.openai_errors import NotImplementedHere

_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_WHY: Final = {
    "/v1/embeddings": "models here generate text",
    "/v1/responses": "nothing is stored here; POST /v1/responses answers at once",
    "/v1/moderations": "models here generate text",
    "/v1/rerank": "models here generate text",
    "/v1/score": "models here generate text",
    "/v1/audio": "only text is understood",
    "/v1/images": "only text is understood",
    "/v1/videos": "only text is understood",
    "/v1/realtime": "only text is understood",
    "/v1/files": "nothing is stored here",
    "/v1/uploads": "nothing is stored here",
    "/v1/vector_stores": "nothing is stored here",
    "/v1/conversations": "nothing is stored here",
    "/v1/batches": "send requests one by one, with service_tier flex",
    "/v1/fine_tuning": "models are served as they are",
    "/v1/evals": "models are served as they are",
    "/v1/assistants": "use /v1/chat/completions with tools",
    "/v1/threads": "use /v1/chat/completions with tools",
}


def not_here_routes() -> list[Route]:
    """One route for each, and for all paths under it. Answers are 501 in OpenAI's form."""
    return [Route(path + rest, _refuse, methods=_METHODS) for path in _WHY for rest in ("", "/{rest:path}")]


async def _refuse(request: Request) -> NoReturn:
    path = request.url.path
    why = next(why for prefix, why in _WHY.items() if path == prefix or path.startswith(prefix + "/"))
    raise NotImplementedHere(f"{path} is not implemented: {why}")
