"""Settings of the fake engine, which stands in for a model in tests and under load."""

from dataclasses import dataclass
from typing import Annotated

from mooncake_mesh.config_checks import at_least
from mooncake_mesh.config_kinds import FakeOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig:
    """The fake engine: its delays and the shape of its KVCache. Read only where ``engine`` is ``fake``."""

    prefill_s_base: Annotated[float, "seconds that each prefill chunk takes at least"] = 0.0
    prefill_s_per_token: Annotated[float, "seconds for each token of a prefill chunk"] = 0.0
    decode_s_base: Annotated[float, "seconds that each decode step takes at least"] = 0.0
    decode_s_per_slot: Annotated[float, "seconds for each sequence in a decode step"] = 0.0
    output: Annotated[FakeOutput, "hash: tokens depend on the KV read; utf8: the bytes of a text"] = FakeOutput.HASH
    layers: Annotated[int, "layers of the KVCache"] = 2
    kv_heads: Annotated[int, "key and value heads of the KVCache"] = 2
    head_dim: Annotated[int, "elements of each head"] = 8

    def __post_init__(self) -> None:
        at_least(self, 0.0, "prefill_s_base", "prefill_s_per_token", "decode_s_base", "decode_s_per_slot")
        at_least(self, 1, "layers", "kv_heads", "head_dim")
