"""HTTP requests that must be refused, as data: the unit tests and the live mesh answer the same table.

``{model}`` in a body stands for a served model's name. What depends on the model (context, vocabulary) is chosen
so absurd that it is wrong for every model.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRequest:
    """One request and the refusal it must get. ``param`` None: the error names no field."""

    name: str
    body: bytes
    status: int
    code: str
    param: str | None = None
    method: str = "POST"
    path: str = "/v1/completions"
    headers: dict[str, str] = field(default_factory=dict)

    def body_for(self, model: str) -> bytes:
        return self.body.replace(b"{model}", model.encode())


CHAT = "/v1/chat/completions"


def _completion(
    name: str, fields: str, param: str | None, code: str = "invalid_request", status: int = 400
) -> BadRequest:
    """A completion request with *fields* added; a prompt too, unless they have one."""
    prompt = "" if '"prompt"' in fields else '"prompt": "hi", '
    body = f'{{"model": "{{model}}", {prompt}{fields}}}'
    return BadRequest(name=name, body=body.encode(), status=status, code=code, param=param)


def _chat(name: str, fields: str, param: str | None, code: str = "invalid_request", status: int = 400) -> BadRequest:
    messages = "" if '"messages"' in fields else '"messages": [{"role": "user", "content": "hi"}], '
    body = f'{{"model": "{{model}}", {messages}{fields}}}'
    return BadRequest(name=name, path=CHAT, body=body.encode(), status=status, code=code, param=param)


def _schema(schema: str) -> str:
    return f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}'


def _raw(name: str, body: bytes, code: str = "invalid_json", param: str | None = None) -> BadRequest:
    return BadRequest(name=name, body=body, status=400, code=code, param=param)


UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"

BAD_REQUESTS: tuple[BadRequest, ...] = (
    # not one JSON object
    _raw("empty body", b""),
    _raw("no json", b"hello"),
    _raw("truncated json", b'{"model": "{model}", "prompt": "a'),
    _raw("two objects", b"{}{}"),
    _raw("array body", b"[1, 2]"),
    _raw("null body", b"null"),
    _raw("string body", b'"hi"'),
    _raw("invalid utf-8", b'{"model": "{model}", "prompt": "\xff\xfe"}'),
    _raw("utf-16", '{"model": "m", "prompt": "hi"}'.encode("utf-16")),
    _raw("truncated utf-8", b'{"model": "{model}", "prompt": "\xe2\x82'),
    _raw("nan", b'{"model": "{model}", "prompt": "hi", "temperature": NaN}'),
    _raw("infinity", b'{"model": "{model}", "prompt": "hi", "temperature": -Infinity}'),
    _raw("repeated key", b'{"model": "{model}", "prompt": "hi", "n": 1, "n": 2}'),
    _raw("repeated key inside", b'{"model": "{model}", "prompt": "hi", "x": [{"a": 1, "a": 1}]}'),
    _raw("integer of 5000 digits", b'{"model": "{model}", "prompt": "hi", "n": ' + b"9" * 5000 + b"}"),
    _raw("nested 100000 deep", b'{"model": "{model}", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    _raw("raw newline in a string", b'{"model": "{model}", "prompt": "a\nb"}'),
    _raw("nul bytes", b"\x00" * 64),
    _raw("lone surrogate", b'{"model": "{model}", "prompt": "\\ud800"}', "invalid_request", "prompt"),
    _chat(
        "lone surrogate in a tool",
        '"tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "\\ud83d"}}}]',
        "tools[0].function.parameters.type",
    ),
    _chat(
        "lone surrogate in a key of a tool",
        '"tools": [{"type": "function", "function": {"name": "look", "parameters": {"\\udc00": 1}}}]',
        "a key of tools[0].function.parameters",
    ),
    _chat(
        "lone surrogate in arguments of a call",
        '"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"id": "c",'
        ' "type": "function", "function": {"name": "look", "arguments": "{\\"at\\": \\"\\\\ud83d\\"}"}}]}]',
        "messages[1].tool_calls[0].function.arguments",
    ),
    # the model
    _raw("no model", b'{"prompt": "hi"}', "invalid_request", "model"),
    _raw("model a number", b'{"model": 7, "prompt": "hi"}', "invalid_request", "model"),
    BadRequest(
        name="unknown model",
        body=b'{"model": "no-such", "prompt": "hi"}',
        status=404,
        code="model_not_found",
        param="model",
    ),
    BadRequest(
        name="unknown chat model",
        path=CHAT,
        body=b'{"model": "", "messages": [{"role": "user", "content": "hi"}]}',
        status=404,
        code="model_not_found",
        param="model",
    ),
    # prompts
    _raw("no prompt", b'{"model": "{model}"}', "invalid_request", "prompt"),
    _completion("null prompt", '"prompt": null', "prompt"),
    _completion("empty prompt", '"prompt": [""]', "prompt"),
    _completion("no prompts", '"prompt": []', "prompt"),
    _completion("empty token list", '"prompt": [[]]', "prompt"),
    _completion("prompt an object", '"prompt": {"text": "hi"}', "prompt"),
    _completion("prompt a number", '"prompt": 3', "prompt"),
    _completion("prompts of mixed kinds", '"prompt": ["a", 3]', "prompt[1]"),
    _completion("tokens of mixed kinds", '"prompt": [3, "a"]', "prompt"),
    _completion("boolean tokens", '"prompt": [true, false]', "prompt"),
    _completion("fractional tokens", '"prompt": [[1.5]]', "prompt[0]"),
    _completion("negative token", '"prompt": [-1]', "prompt"),
    _completion("token outside the vocabulary", '"prompt": [2147483647]', "prompt"),
    _completion("token of 40 digits", '"prompt": [[1, ' + "9" * 40 + "]]", "prompt[0]"),
    _completion("17 prompts", '"prompt": [' + ", ".join(['"a"'] * 17) + "]", "prompt"),
    _completion("over-long prompt", '"prompt": "' + "word " * 200_000 + '"', "prompt", TOO_LONG),
    _completion("over-long token prompt", '"prompt": [' + "1, " * 400_000 + "1]", "prompt", TOO_LONG),
    # lengths
    _completion("max_tokens 0", '"max_tokens": 0', "max_tokens"),
    _completion("max_tokens negative", '"max_tokens": -5', "max_tokens"),
    _completion("max_tokens fractional", '"max_tokens": 1.5', "max_tokens"),
    _completion("max_tokens a string", '"max_tokens": "16"', "max_tokens"),
    _completion("max_tokens huge", '"max_tokens": 99999999999999999999', "max_tokens"),
    _completion("max_tokens over the context", '"max_tokens": 2000000000', "max_tokens", TOO_LONG),
    _chat(
        "max_completion_tokens over the context",
        '"max_completion_tokens": 2000000000',
        "max_completion_tokens",
        TOO_LONG,
    ),
    _chat("max_tokens and another", '"max_tokens": 5, "max_completion_tokens": 6', "max_completion_tokens"),
    _completion("min_tokens over max_tokens", '"max_tokens": 4, "min_tokens": 5', "min_tokens"),
    _completion("min_tokens over the context", '"min_tokens": 2000000000', "min_tokens", TOO_LONG),
    # sampling
    _completion("temperature too hot", '"temperature": 2.5', "temperature"),
    _completion("temperature negative", '"temperature": -0.1', "temperature"),
    _completion("temperature overflows", '"temperature": 1e999', "temperature"),
    _completion("temperature a boolean", '"temperature": true', "temperature"),
    _completion("top_p zero", '"top_p": 0', "top_p"),
    _completion("top_p over 1", '"top_p": 1.01', "top_p"),
    _completion("top_k negative", '"top_k": -2', "top_k"),
    _completion("min_p over 1", '"min_p": 2', "min_p"),
    _completion("presence_penalty", '"presence_penalty": 3', "presence_penalty"),
    _completion("frequency_penalty a list", '"frequency_penalty": [1]', "frequency_penalty"),
    _completion("repetition_penalty zero", '"repetition_penalty": 0', "repetition_penalty"),
    _completion("seed a float", '"seed": 1.0', "seed"),
    _completion("seed over 64 bits", '"seed": 18446744073709551616', "seed"),
    _completion("n 0", '"n": 0', "n"),
    _completion("n huge", '"n": 1000000', "n"),
    _completion("n a string", '"n": "2"', "n"),
    _completion("best_of other than n", '"n": 2, "best_of": 3', "best_of", UNSUPPORTED),
    _completion("bias of a word", '"logit_bias": {"the": -100}', "logit_bias"),
    _completion("bias too large", '"logit_bias": {"50": 101}', "logit_bias.50"),
    _completion("bias of an unknown token", '"logit_bias": {"50256": -100}', "logit_bias"),
    _completion("prompt_logprobs", '"prompt_logprobs": 0', "prompt_logprobs", UNSUPPORTED),
    # structured output
    _completion("half a surrogate pair", '"structured_outputs": {"regex": "\\ud800"}', "structured_outputs.regex"),
    _completion("deep schema", '"guided_json": ' + '{"items": ' * 400 + "{}" + "}" * 400, "guided_json"),
    _completion("regex that does not close", '"structured_outputs": {"regex": "("}', "structured_outputs.regex"),
    _completion("two rules at once", '"structured_outputs": {"regex": "a", "choice": ["b"]}', "structured_outputs"),
    _completion("no rule at all", '"structured_outputs": {}', "structured_outputs"),
    _completion("older and newer rule", '"guided_regex": "a", "structured_outputs": {"regex": "a"}', "guided_regex"),
    _completion("empty choice", '"guided_choice": ["yes", ""]', "guided_choice"),
    _completion("grammar without a start", '"guided_grammar": "start: nobody"', "guided_grammar"),
    _completion("schema that is no JSON", '"guided_json": "{"', "guided_json"),
    _completion(
        "white space", '"guided_json": {}, "guided_whitespace_pattern": " *"', "guided_whitespace_pattern", UNSUPPORTED
    ),
    # stopping
    _completion("five stop strings", '"stop": ["a", "b", "c", "d", "e"]', "stop"),
    _completion("500000 stop strings", '"stop": [' + '"a",' * 499_999 + '"a"]', "stop"),
    _completion("long stop string", '"stop": "' + "a" * 10_000 + '"', "stop"),
    _completion("empty stop string", '"stop": ["a", ""]', "stop"),
    _completion("stop a number", '"stop": 3', "stop"),
    _completion("stop of numbers", '"stop": [3]', "stop"),
    _completion("stop_token_ids strings", '"stop_token_ids": ["2"]', "stop_token_ids"),
    _completion("stop_token_ids outside the vocabulary", '"stop_token_ids": [2147483647]', "stop_token_ids"),
    # what comes back
    _completion("logprobs too many", '"logprobs": 6', "logprobs"),
    _completion("logprobs a boolean", '"logprobs": true', "logprobs"),
    _completion("echo with logprobs", '"echo": true, "logprobs": 1', "echo", UNSUPPORTED),
    _completion("suffix", '"suffix": "end"', "suffix", UNSUPPORTED),
    _completion("stream a string", '"stream": "yes"', "stream"),
    _completion("stream_options without stream", '"stream_options": {"include_usage": true}', "stream_options"),
    _completion("stream_options a list", '"stream": true, "stream_options": []', "stream_options"),
    _completion(
        "include_usage a number",
        '"stream": true, "stream_options": {"include_usage": 1}',
        "stream_options.include_usage",
    ),
    _completion("skip_special_tokens a string", '"skip_special_tokens": "no"', "skip_special_tokens"),
    _completion("cache_salt too long", '"cache_salt": "' + "s" * 5000 + '"', "cache_salt"),
    _completion("user a number", '"user": 1', "user"),
    _completion("a bad field in a streaming request", '"stream": true, "n": -1', "n"),
    # chats
    _raw("completion body with messages", b'{"model": "{model}", "messages": []}', "invalid_request", "prompt"),
    _chat("no messages", '"messages": []', "messages"),
    _chat("messages a string", '"messages": "hi"', "messages"),
    _chat("message a string", '"messages": ["hi"]', "messages[0]"),
    _chat("no role", '"messages": [{"content": "hi"}]', "messages[0].role"),
    _chat("unknown role", '"messages": [{"role": "robot", "content": "hi"}]', "messages[0].role"),
    _chat("tool that nobody called", '"messages": [{"role": "tool", "content": "hi"}]', "messages[0].tool_call_id"),
    _chat("no content", '"messages": [{"role": "user"}]', "messages[0].content"),
    _chat("content a number", '"messages": [{"role": "user", "content": 1}]', "messages[0].content"),
    _chat("no content parts", '"messages": [{"role": "user", "content": []}]', "messages[0].content"),
    _chat("content part a string", '"messages": [{"role": "user", "content": ["a"]}]', "messages[0].content[0]"),
    _chat(
        "image part",
        '"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}]',
        "messages[0].content[0].type",
        UNSUPPORTED,
    ),
    _chat(
        "text part without text",
        '"messages": [{"role": "user", "content": [{"type": "text"}]}]',
        "messages[0].content[0].text",
    ),
    _chat("5000 messages", '"messages": [' + ", ".join(['{"role": "user", "content": "a"}'] * 5000) + "]", "messages"),
    _chat(
        "over-long chat",
        '"messages": [{"role": "user", "content": "' + "word " * 200_000 + '"}]',
        "messages",
        TOO_LONG,
    ),
    _chat("tool without a name", '"tools": [{"type": "function", "function": {}}]', "tools[0].function.name"),
    _chat("tool of an unknown type", '"tools": [{"type": "retrieval"}]', "tools[0].type", UNSUPPORTED),
    _chat("tool_choice without tools", '"tool_choice": "required"', "tool_choice"),
    _chat(
        "required tool whose schema is none",
        '"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters":'
        ' {"type": "object", "properties": {"a": {"type": "text"}}}}}]',
        "tools",
    ),
    _chat("response_format unknown", '"response_format": {"type": "xml"}', "response_format.type", UNSUPPORTED),
    _chat("no schema", '"response_format": {"type": "json_schema"}', "response_format.json_schema"),
    _chat("schema of an unknown type", _schema('{"type": "text"}'), "response_format.json_schema.schema"),
    _chat("schema with an unknown keyword", _schema('{"not": {}}'), "response_format.json_schema.schema"),
    _chat("schema an array", _schema("[]"), "response_format.json_schema.schema"),
    _chat("schema too long", _schema('{"const": "' + "a" * 70_000 + '"}'), "response_format.json_schema.schema"),
    _chat("audio", '"modalities": ["text", "audio"]', "modalities", UNSUPPORTED),
    _chat("chat logprobs a number", '"logprobs": 3', "logprobs"),
    _chat("top_logprobs without logprobs", '"top_logprobs": 3', "top_logprobs"),
    _chat("top_logprobs too many", '"logprobs": true, "top_logprobs": 21', "top_logprobs"),
    # paths and methods
    BadRequest(name="unknown path", path="/v1/nothing", body=b"{}", status=404, code="not_found"),
    BadRequest(name="embeddings", path="/v1/embeddings", body=b"{}", status=501, code="not_implemented"),
    BadRequest(name="get a completion", method="GET", body=b"", status=405, code="method_not_allowed"),
    BadRequest(name="delete a chat", method="DELETE", path=CHAT, body=b"", status=405, code="method_not_allowed"),
    BadRequest(name="post health", path="/health", body=b"{}", status=405, code="method_not_allowed"),
    BadRequest(
        name="unknown model card",
        method="GET",
        path="/v1/models/no/such",
        body=b"",
        status=404,
        code="model_not_found",
        param="model",
    ),
    # token endpoints
    BadRequest(
        name="tokenize nothing",
        path="/tokenize",
        body=b'{"model": "{model}"}',
        status=400,
        code="invalid_request",
        param="prompt",
    ),
    BadRequest(
        name="tokenize a number",
        path="/tokenize",
        body=b'{"model": "{model}", "prompt": 1}',
        status=400,
        code="invalid_request",
        param="prompt",
    ),
    BadRequest(
        name="detokenize text",
        path="/detokenize",
        body=b'{"model": "{model}", "tokens": "a"}',
        status=400,
        code="invalid_request",
        param="tokens",
    ),
    BadRequest(
        name="detokenize what is no token",
        path="/detokenize",
        body=b'{"model": "{model}", "tokens": [2147483647]}',
        status=400,
        code="invalid_request",
        param="tokens",
    ),
    # sizes
    BadRequest(name="body of 9 MiB", body=b" " * (9 << 20), status=413, code="request_too_large"),
)
