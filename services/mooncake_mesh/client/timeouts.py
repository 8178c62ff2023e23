"""How long a client waits, and for what."""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. What takes longer ends with PeerUnreachable (``connect_s``) or CallTimeout (the others).

    ``connect_s`` is for reaching the gateway, and for its answers to ``models()`` and ``health()``. ``first_token_s``
    covers queueing and prefill, and the answers to ``caching``; ``between_tokens_s`` is the longest silence after it.
    ``total_s`` bounds the whole request and travels with it, so that the mesh stops working for nobody.
    """

    connect_s: float = 5.0
    first_token_s: float = 120.0
    between_tokens_s: float = 60.0
    total_s: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not 0 < seconds < float("inf"):
                raise ValueError(f"{field.name} must be positive and finite, got {seconds}")
