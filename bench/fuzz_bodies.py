"""Mutated HTTP requests: bodies of every endpoint that takes one, and bytes that are hardly HTTP."""

import json
import random
from dataclasses import dataclass
from typing import Any, Final

from bench.fuzz_frames import absurd, places

_TOOL: Final = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}
_MESSAGES: Final = [
    {"role": "system", "content": "You know the harbour by heart."},
    {"role": "user", "content": [{"type": "text", "text": "Which ship is the smallest?"}]},
]
_SAMPLING: Final = {
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stop": ["x", "yz"],
    "logit_bias": {"65": 1},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "user": "u",
    "cache_salt": "s",
}
_CACHE: Final = {"name": "c", "description": "d", "tags": ["t"], "ttl": 60, "metadata": {"k": "v"}}
_BODIES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("POST", "/v1/completions", {"prompt": "hello", "logprobs": 2, "echo": True, **_SAMPLING}),
    ("POST", "/v1/completions", {"prompt": [[1, 2], [3]], "suffix": None, "best_of": 2, **_SAMPLING}),
    ("POST", "/v1/chat/completions", {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 2, **_SAMPLING}),
    (
        "POST",
        "/v1/chat/completions",
        {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto", "max_completion_tokens": 4},
    ),
    (
        "POST",
        "/v1/chat/completions",
        {
            "messages": [{"role": "cache", "content": "tag=t;reset_ttl=9"}, *_MESSAGES],
            "max_tokens": 4,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        },
    ),
    ("POST", "/v1/responses", {"input": "hello", "instructions": "Be brief.", "stream": True, "max_output_tokens": 4}),
    (
        "POST",
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Which ship is the smallest?"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "a dinghy"},
            ],
            "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "function", "name": "look"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
            "metadata": {"k": "v"},
            "max_output_tokens": 4,
        },
    ),
    ("POST", "/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("POST", "/tokenize", {"messages": _MESSAGES}),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("POST", "/v1/tokenizers/estimate-token-count", {"messages": _MESSAGES}),
    ("POST", "/v1/caching", {"messages": _MESSAGES, **_CACHE}),
    ("PUT", "/v1/caching/cache-none", {"metadata": {"k": "v"}, "ttl": 60}),
    ("POST", "/v1/caching/refs/tags", {"tag": "t", "cache_id": "cache-none"}),
    ("GET", "/v1/caching?limit=2&order=asc&after=x&metadata[k]=v", {}),
    ("DELETE", "/v1/caching/refs/tags/t", {}),
    ("GET", "/v1/models/fake", {}),
)
_HEADERS: Final = (
    ("content-type", "text/plain"),
    ("authorization", "Bearer \x7f"),
    ("x-request-id", "a" * 300),
    ("traceparent", "00-xyz"),
    ("X-Msh-Context-Cache", "cache-none"),
    ("X-Msh-Context-Cache-Reset-TTL", "1e9"),
    ("x-mooncake-priority", "☾"),
    ("accept-encoding", "*;q=nan"),
    ("expect", "100-continue"),
)
_MOST_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzedRequest:
    """``data`` is the whole request as bytes; with ``is_http`` it must be answered."""

    what: str
    data: bytes
    is_http: bool


class BodyMutator:
    """Requests without end, for a gateway that serves *model*."""

    def __init__(self, rng: random.Random, model: str) -> None:
        self._rng = rng
        self._model = model

    def request(self) -> FuzzedRequest:
        rng = self._rng
        method, path, fields = rng.choice(_BODIES)
        body = json.loads(json.dumps({"model": self._model, **fields}))
        for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
            self._mutate(body)
        for name in ("max_tokens", "max_output_tokens"):
            if isinstance(body.get(name), int) and body[name] <= 2**20:
                body[name] = min(body[name], _MOST_TOKENS)
        data = json.dumps(body).encode(errors="surrogatepass")
        if rng.random() < 0.15:
            data = self._damage(data)
        if rng.random() < 0.1:
            path = path.replace("cache-none", rng.choice(("%00", "..%2f", "%ff", "a" * 3000, "☾"))) + "%"
        return self._packed(method, path, data)

    def _packed(self, method: str, path: str, data: bytes) -> FuzzedRequest:
        rng = self._rng
        lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close"]
        extra = dict([rng.choice(_HEADERS)] if rng.random() < 0.2 else [])
        lines += [f"{name}: {value}" for name, value in {"content-type": "application/json", **extra}.items()]
        head = "\r\n".join([*lines, f"content-length: {len(data)}"]).encode() + b"\r\n\r\n"
        whole = head + data
        if rng.random() < 0.1:
            return FuzzedRequest(what="bytes", data=self._damage(whole), is_http=False)
        return FuzzedRequest(what=f"{method} {path[:60]} {data[:300]!r}", data=whole, is_http="☾" not in path)

    def _mutate(self, body: dict[str, Any]) -> None:
        rng = self._rng
        found = list(places(body))
        if not found:
            return
        container, key = rng.choice(found)
        match rng.randrange(5):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("role", "type", "n", "x", "max_tokens", "cache_id", "schema", "$ref"))] = absurd(
                    rng
                )
            case 2 if isinstance(container[key], list | dict):
                container[key] = [container[key]] * 20
            case _:
                container[key] = absurd(rng)

    def _damage(self, data: bytes) -> bytes:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                return data[: rng.randrange(len(data) or 1)]
            case 1:
                return b"[" * rng.choice((10, 100_000)) + data
            case 2:
                return data.replace(rng.choice((b'"', b"{", b"e", b"\r\n")), rng.randbytes(2))
            case _:
                at = rng.randrange(len(data) or 1)
                return data[:at] + rng.randbytes(4) + data[at:]
