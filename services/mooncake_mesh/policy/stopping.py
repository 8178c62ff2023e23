"""When a choice has had its last token; the same rule at prefill (first token) and decode (all others)."""

from mooncake_proto.serving import FinishReason, Stopping


def finish_after(token: int, position: int, stopping: Stopping) -> FinishReason | None:
    """Why the choice ends with *token*, or None. *position* counts the tokens drawn before it."""
    if token in stopping.stop_token_ids and position >= stopping.min_new_tokens:
        return FinishReason.STOP
    if position + 1 >= stopping.max_new_tokens:
        return FinishReason.LENGTH
    return None


def banned_tokens(position: int, stopping: Stopping) -> tuple[int, ...]:
    """Tokens that may not be drawn at *position*: the stop tokens, until ``min_new_tokens`` are there."""
    return stopping.stop_token_ids if position < stopping.min_new_tokens else ()
