"""The description of the HTTP door in OpenAPI 3.1, as ``/openapi.json``.

It names every path, what it takes and what it answers, and the fields that are checked here. Bodies may have more
fields: those that neither OpenAI nor this server know are ignored.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

from mooncake_mesh.gateway.openai_requests import (
    MAX_BIAS,
    MAX_CHAT_LOGPROBS,
    MAX_CHOICES,
    MAX_COMPLETION_LOGPROBS,
    MAX_STOP_STRINGS,
)
from mooncake_mesh.gateway.tool_requests import MAX_TOOLS
from mooncake_mesh.policy.request_class import BATCH_PRIORITY, MOST_URGENT

Json = dict[str, Any]

_STRING: Final[Json] = {"type": "string"}
_BOOLEAN: Final[Json] = {"type": "boolean"}
_OBJECT: Final[Json] = {"type": "object"}
_TOKENS: Final[Json] = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_RESPONSES: Final[Mapping[int, str]] = {
    400: "the request cannot be served as it is",
    401: "an API key is missing or unknown",
    404: "there is no such model, path or object",
    413: "the body is too long",
    429: "contended, or over the tenant's rate: come back after Retry-After",
    500: "this server's fault",
    501: "not implemented here",
    503: "nobody can serve it now: come back after Retry-After",
    504: "not finished within the deadline",
}


def openapi() -> Json:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mooncake-mesh",
            "version": version("mooncake-mesh"),
            "description": "An OpenAI-compatible endpoint over a disaggregated server for language models.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"apiKey": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
            "responses": {
                "Error": {"description": "OpenAI's error body", "content": _content(_ref("Error"))},
            },
        },
    }


def _paths() -> Json:
    generating = (400, 401, 404, 413, 429, 500, 503, 504)
    described = {
        "/v1/chat/completions": {
            "post": _call(
                "chat", "The assistant's next turn", _ref("ChatRequest"), _ref("Chat"), generating, events=True
            )
        },
        "/v1/completions": {
            "post": _call(
                "complete",
                "What follows a text",
                _ref("CompletionRequest"),
                _ref("Completion"),
                generating,
                events=True,
            )
        },
        "/v1/responses": {
            "post": _call(
                "respond",
                "The assistant's next turn, in the words of OpenAI's newer endpoint",
                _ref("ResponsesRequest"),
                _ref("Response"),
                generating,
                events=True,
            )
        },
        "/v1/models": {"get": _call("listModels", "Models that are served now", None, _ref("Models"), (401,))},
        "/v1/models/{name}": {
            "parameters": [_path("name")],
            "get": _call("getModel", "One model", None, _ref("Model"), (401, 404, 503)),
        },
        "/tokenize": {"post": _call("tokenize", "Token ids of a text or a chat", _OBJECT, _ref("Tokens"), (400, 404))},
        "/detokenize": {"post": _call("detokenize", "The text of token ids", _ref("Detokenize"), _OBJECT, (400, 404))},
        "/v1/tokenizers/estimate-token-count": {
            "post": _call("estimateTokens", "How many tokens a chat has", _OBJECT, _OBJECT, (400, 404))
        },
        "/health": {"get": _call("health", "200 while the process lives", None, _OBJECT, ())},
        "/ping": {"get": _call("ping", "As /health", None, _OBJECT, ())},
        "/ready": {"get": _call("ready", "200 while a request could be served", None, _OBJECT, (503,))},
        "/version": {"get": _call("version", "The server's version", None, _OBJECT, (401,))},
        "/openapi.json": {"get": _call("openapi", "This description", None, _OBJECT, (401,))},
        "/metrics": {"get": _text_call("metrics", "Prometheus metrics of this gateway and the mesh")},
    }
    return described | _caching_paths()


def _caching_paths() -> Json:
    cache, tag = _ref("ContextCache"), _ref("CacheTag")
    errors = (400, 401, 404, 429, 501)
    return {
        "/v1/caching": {
            "post": _call("createCache", "Keep a prompt's beginning in the pool", _OBJECT, cache, errors),
            "get": _call("listCaches", "The tenant's caches", None, _OBJECT, errors),
        },
        "/v1/caching/{cache_id}": {
            "parameters": [_path("cache_id")],
            "get": _call("getCache", "One cache", None, cache, errors),
            "put": _call("updateCache", "A new end or other metadata", _OBJECT, cache, errors),
            "delete": _call("deleteCache", "Let a cache go", None, _OBJECT, errors),
        },
        "/v1/caching/refs/tags": {
            "post": _call("pointTag", "Point a tag to a cache", _OBJECT, tag, errors),
            "get": _call("listTags", "The tenant's tags", None, _OBJECT, errors),
        },
        "/v1/caching/refs/tags/{tag}": {
            "parameters": [_path("tag")],
            "get": _call("getTag", "One tag", None, tag, errors),
            "delete": _call("deleteTag", "Delete a tag, if it is there", None, _OBJECT, errors),
        },
        "/v1/caching/refs/tags/{tag}/content": {
            "parameters": [_path("tag")],
            "get": _call("getTagContent", "The cache that a tag points to", None, cache, errors),
        },
    }


def _schemas() -> Json:
    sampling = {
        "model": _STRING,
        "n": _integer(1, MAX_CHOICES),
        "stream": _BOOLEAN,
        "stream_options": _OBJECT,
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "min_tokens": _integer(0),
        "temperature": _number(0, 2),
        "top_p": _number(0, 1),
        "top_k": _integer(-1),
        "min_p": _number(0, 1),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0, 10),
        "seed": {"type": ["integer", "null"]},
        "stop": {
            "anyOf": [_STRING, {"type": "array", "items": _STRING, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]
        },
        "stop_token_ids": _TOKENS,
        "ignore_eos": _BOOLEAN,
        "logit_bias": {"type": "object", "additionalProperties": _number(-MAX_BIAS, MAX_BIAS)},
        "response_format": _OBJECT,
        "structured_outputs": _OBJECT,
        "priority": _integer(MOST_URGENT, BATCH_PRIORITY),
        "service_tier": {"enum": ["auto", "default", "flex", None]},
        "cache_salt": _STRING,
        "user": _STRING,
        "return_token_ids": _BOOLEAN,
    }
    prompt = {"anyOf": [_STRING, _TOKENS, {"type": "array", "items": {"anyOf": [_STRING, _TOKENS]}}]}
    message = {"role": {"enum": ["system", "developer", "user", "assistant", "tool", "cache"]}, "content": {}}
    chat = {
        "messages": {"type": "array", "minItems": 1, "items": _described(message, required=["role"])},
        "tools": {"type": "array", "maxItems": MAX_TOOLS, "items": _OBJECT},
        "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
        "parallel_tool_calls": _BOOLEAN,
        "logprobs": _BOOLEAN,
        "top_logprobs": _integer(0, MAX_CHAT_LOGPROBS),
    }
    completion = {"prompt": prompt, "echo": _BOOLEAN, "logprobs": _integer(0, MAX_COMPLETION_LOGPROBS)}
    item = {"type": {"enum": ["message", "function_call", "function_call_output"]}, "role": _STRING, "content": {}}
    responses = {
        "model": _STRING,
        "input": {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _described(item)}]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": _integer(1),
        "text": _OBJECT,
        "metadata": _OBJECT,
        **{name: sampling[name] for name in ("temperature", "top_p", "stream", "seed", "service_tier", "user")},
        **{name: chat[name] for name in ("tools", "tool_choice", "parallel_tool_calls")},
    }
    answer = {"id": _STRING, "object": _STRING, "created": {"type": "integer"}, "model": _STRING}
    choices = {"choices": {"type": "array", "items": _OBJECT}, "usage": _ref("Usage")}
    output = {"output": {"type": "array", "items": _OBJECT}, "usage": _OBJECT}
    model = {"id": _STRING, "object": {"const": "model"}, "max_model_len": _integer(1)}
    error = {"message": _STRING, "type": _STRING, "param": {"type": ["string", "null"]}, "code": _STRING}
    counts = {"prompt_tokens": _integer(0), "completion_tokens": _integer(0), "total_tokens": _integer(0)}
    cached = {"prompt_tokens_details": _described({"cached_tokens": _integer(0)})}
    return {
        "ChatRequest": _described({**sampling, **chat}, required=["model", "messages"]),
        "CompletionRequest": _described({**sampling, **completion}, required=["model", "prompt"]),
        "Chat": _described({**answer, **choices}),
        "Completion": _described({**answer, **choices}),
        "ResponsesRequest": _described(responses, required=["model", "input"]),
        "Response": _described({"id": _STRING, "object": {"const": "response"}, "status": _STRING, **output}),
        "Usage": _described({**counts, **cached}),
        "Model": _described(model),
        "Models": _described({"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}),
        "Tokens": _described({"count": _integer(0), "max_model_len": _integer(1), "tokens": _TOKENS}),
        "Detokenize": _described({"model": _STRING, "tokens": _TOKENS}, required=["model", "tokens"]),
        "ContextCache": _described({"id": _STRING, "object": {"const": "context-cache"}, "status": _STRING}),
        "CacheTag": _described({"tag": _STRING, "cache_id": _STRING, "object": _STRING}),
        "Error": _described({"error": _described(error, required=list(error))}, required=["error"]),
    }


def _call(
    name: str, summary: str, body: Json | None, answer: Json, errors: tuple[int, ...], *, events: bool = False
) -> Json:
    content = _content(answer)
    if events:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "with stream: chunks, then [DONE]"}}
    responses: Json = {"200": {"description": summary, "content": content}}
    for status in errors:
        responses[str(status)] = {"description": _RESPONSES[status], "content": _content(_ref("Error"))}
    call: Json = {"operationId": name, "summary": summary, "responses": responses}
    if body is not None:
        call["requestBody"] = {"required": True, "content": _content(body)}
    return call


def _text_call(name: str, summary: str) -> Json:
    content = {"text/plain": {"schema": _STRING}}
    return {"operationId": name, "summary": summary, "responses": {"200": {"description": summary, "content": content}}}


def _content(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": _STRING}


def _described(properties: Json, *, required: list[str] | None = None) -> Json:
    described = {"type": "object", "properties": properties}
    return described if required is None else {**described, "required": required}


def _integer(least: int, most: int | None = None) -> Json:
    return {"type": ["integer", "null"], "minimum": least} | ({} if most is None else {"maximum": most})


def _number(least: float, most: float) -> Json:
    return {"type": ["number", "null"], "minimum": least, "maximum": most}
