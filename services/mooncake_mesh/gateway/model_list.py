"""The models a gateway serves, as OpenAI lists them; the same for every door."""

from collections.abc import Sequence

from mooncake_mesh.gateway.openai_responses import Json
from mooncake_mesh.gateway.preparation import ServedModel


def model_object(model: ServedModel, created: int) -> Json:
    """One model; *created* is when this gateway started, in Unix seconds."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "mooncake",
        "max_model_len": model.max_context_tokens,
    }


def model_list(served: Sequence[ServedModel], created: int) -> Json:
    return {"object": "list", "data": [model_object(model, created) for model in served]}
