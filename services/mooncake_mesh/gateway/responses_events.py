"""An answer in the shape of ``/v1/responses``, whole or as typed events, made of a chat's chunks. Pure.

Items of the output come in the order in which the model wrote them: a message where there is text, a function call for
each call of a tool. A stream has an item's beginning, its pieces and its end, and ends with the whole response.
"""

import time
from typing import Final

from mooncake_mesh.gateway.openai_errors import Problem
from mooncake_mesh.gateway.openai_responses import Json

_REASONS: Final = {"length": "max_output_tokens"}


class ResponseEvents:
    """The events of one response. *told* are fields of the request that every answer repeats.

    Feed it the chunks of the chat, in order, then its whole answer: :meth:`chunk` and :meth:`ended` give the events of
    a stream, :meth:`whole` the one object where there is no stream.
    """

    def __init__(self, request_id: str, model: str, told: Json) -> None:
        self._id = request_id
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": int(time.time()), "model": model}
        self._told = told
        self._items: list[Json] = []
        self._n_events = 0

    def chunk(self, chunk: Json) -> list[Json]:
        """The events that a chat's *chunk* makes."""
        events: list[Json] = []
        if not self._n_events:
            events += [
                self._event(f"response.{kind}", response=self._response()) for kind in ("created", "in_progress")
            ]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if delta.get("content"):
                events += self._text(delta["content"])
            for call in delta.get("tool_calls", ()):
                events += self._call(call)
            if choice["finish_reason"] is not None:
                events += [] if self._items else self._open_message()  # an answer has at least an empty text
                events += self._close(_status(choice["finish_reason"]))
        return events

    def ended(self, chat: Json) -> list[Json]:
        """The last event of a stream, made of the whole *chat*."""
        status = _status(chat["choices"][0]["finish_reason"])
        return [self._event(f"response.{status}", response=self._finished(chat))]

    def failed(self, problem: Problem) -> Json:
        """The last event of a stream that breaks off."""
        error = {"code": problem.code, "message": problem.message}
        return self._event("response.failed", response={**self._response(), "status": "failed", "error": error})

    def whole(self, chat: Json) -> Json:
        """The response to a request without a stream."""
        (choice,) = chat["choices"]
        message, status = choice["message"], _status(choice["finish_reason"])
        if message["content"] or not message.get("tool_calls"):
            self._items.append({**self._message(), "content": [_part(message["content"])], "status": status})
        for call in message.get("tool_calls", ()):
            self._items.append({**self._function_call(call), "status": status})
        return self._finished(chat)

    # --- items --------------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._is_open("message"):
            events = [*self._close("completed"), *self._open_message()]
        part = self._items[-1]["content"][0]
        part["text"] += text
        return [*events, self._of_text("output_text.delta", delta=text, logprobs=[])]

    def _call(self, call: Json) -> list[Json]:
        """A chunk of a call: the first has its id and name, all may have a piece of its arguments."""
        events: list[Json] = []
        if "id" in call:
            events += self._close("completed")
            self._items.append(self._function_call(call))
            events.append(self._of_item("output_item.added"))
        piece = call["function"].get("arguments")
        if piece and "id" not in call:
            self._items[-1]["arguments"] += piece
        if piece:
            events.append(self._of_arguments("function_call_arguments.delta", delta=piece))
        return events

    def _close(self, status: str) -> list[Json]:
        """The end of the item that is open, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item, events = self._items[-1], []
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            events.append(self._of_text("output_text.done", text=part["text"], logprobs=[]))
            events.append(self._of_text("content_part.done", part=part))
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_arguments("function_call_arguments.done", **done))
        return [*events, self._of_item("output_item.done")]

    def _open_message(self) -> list[Json]:
        self._items.append(self._message())
        added = self._of_item("output_item.added")
        self._items[-1]["content"] = [_part("")]
        return [added, self._of_text("content_part.added", part=_part(""))]

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress"

    def _message(self) -> Json:
        item_id = f"msg_{self._id}-{len(self._items)}"
        return {"id": item_id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def _function_call(self, call: Json) -> Json:
        item_id, function = f"fc_{self._id}-{len(self._items)}", call["function"]
        known = {"call_id": call["id"], "name": function["name"], "arguments": function["arguments"]}
        return {"id": item_id, "type": "function_call", "status": "in_progress", **known}

    # --- events -------------------------------------------------------------------------------------------------------

    def _of_item(self, kind: str) -> Json:
        return self._event(f"response.{kind}", output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _of_text(self, kind: str, **more: object) -> Json:
        return self._of_arguments(kind, content_index=0, **more)

    def _of_arguments(self, kind: str, **more: object) -> Json:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(f"response.{kind}", **place, **more)

    def _event(self, kind: str, **fields: object) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _response(self) -> Json:
        rest = {"status": "in_progress", "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **rest, "output": list(self._items), **self._told}

    def _finished(self, chat: Json) -> Json:
        reason = chat["choices"][0]["finish_reason"]
        details = {"reason": _REASONS[reason]} if reason in _REASONS else None
        ended = {"status": _status(reason), "incomplete_details": details, "usage": _usage(chat["usage"])}
        return {**self._response(), **ended}


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason in _REASONS else "completed"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
