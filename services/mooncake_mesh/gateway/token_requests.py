"""``/tokenize`` and ``/detokenize``, with vLLM's field names; and Kimi's estimate of a chat's tokens, here exact."""

from mooncake_mesh.errors import InvalidRequest
from mooncake_mesh.gateway.json_fields import Fields
from mooncake_mesh.gateway.openai_requests import MAX_LABEL_CHARS, MAX_TEXT_CHARS, parse_messages, parse_token_ids
from mooncake_mesh.gateway.openai_responses import Json
from mooncake_mesh.gateway.preparation import Preparation, ServedModel, check_tokens
from mooncake_mesh.gateway.tokenizer import SpecialTokens


async def tokenize(preparation: Preparation, body: bytes) -> Json:
    """Token ids of ``prompt`` or of ``messages`` as the model would get them. Raises InvalidRequest or Rejected."""
    fields = await preparation.parse(body, Fields)
    model = _model(preparation, fields)
    prompt = fields.string("prompt", longest=MAX_TEXT_CHARS)
    if prompt is None:
        if fields.raw("messages") is None:
            raise InvalidRequest("prompt or messages is required", param="prompt")
        tokens = await preparation.encode_chat(model.tokenizer, parse_messages(fields))
    else:
        keep = fields.boolean("add_special_tokens") is False
        special = SpecialTokens.KEEP if keep else SpecialTokens.ADD
        tokens = await preparation.encode(model.tokenizer, prompt, special)
    return {"count": len(tokens), "max_model_len": model.max_context_tokens, "tokens": tokens}


async def estimate_tokens(preparation: Preparation, body: bytes) -> Json:
    """How many tokens a chat's prompt has. Raises InvalidRequest or Rejected."""
    fields = await preparation.parse(body, Fields)
    model = _model(preparation, fields)
    tokens = await preparation.encode_chat(model.tokenizer, parse_messages(fields))
    return {"data": {"total_tokens": len(tokens)}}


async def detokenize(preparation: Preparation, body: bytes) -> Json:
    """Text of ``tokens``, special tokens as their markers. Raises InvalidRequest or Rejected."""
    fields = await preparation.parse(body, Fields)
    model = _model(preparation, fields)
    entries = fields.array("tokens", longest=MAX_TEXT_CHARS)
    if entries is None:
        raise InvalidRequest("tokens is required", param="tokens")
    tokens = parse_token_ids(entries, "tokens")
    check_tokens(model.tokenizer, tokens, "tokens")
    return {"prompt": await preparation.decode(model.tokenizer, tokens)}


def _model(preparation: Preparation, fields: Fields) -> ServedModel:
    name = fields.string("model", longest=MAX_LABEL_CHARS)
    if name is None:
        raise InvalidRequest("model is required", param="model")
    return preparation.model(name)
