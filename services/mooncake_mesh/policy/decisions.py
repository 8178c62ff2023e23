"""What comes out of a scheduling decision."""

from dataclasses import dataclass
from typing import Final

from mooncake_proto.ids import InstanceId, NodeId
from mooncake_proto.serving import MixedStep

RETRY_AFTER_S: Final = 1.0
"""Least time after which a refused request should come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """``fetch_prefix_blocks`` is the prefix, from the first block on, that the prefill node has after copying from
    ``fetch_node``; without a copy both say so by None and 0. Block counts are hints.

    The last ``read_blocks`` of the prefix that is used are to be read from the SSD of ``read_node``, the prefill node
    or the one copied from. ``read_limit_blocks``, where it is not None, is how far the prefill node's prefix is worth
    having at all: what its SSD holds beyond that costs more time to read than it saves.

    With ``inline_step`` the decode instance, which ``prefill`` names too then, computes the prompt, in chunks with its
    steps.
    """

    prefill: InstanceId
    decode: InstanceId
    local_prefix_blocks: int
    fetch_node: NodeId | None
    fetch_prefix_blocks: int
    ttft_est_s: float
    tbt_est_s: float
    read_node: NodeId | None = None
    read_blocks: int = 0
    read_limit_blocks: int | None = None
    inline_step: MixedStep | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """``unavailable``: nobody could serve this at all (503); otherwise the mesh is too busy for it now (429)."""

    reason: str
    unavailable: bool
    retry_after_s: float


def unavailable(reason: str) -> Refused:
    return Refused(reason=reason, unavailable=True, retry_after_s=RETRY_AFTER_S)


def contended(reason: str, *, after_s: float = 0.0) -> Refused:
    """*after_s* is when the cause is expected to be over."""
    return Refused(reason=reason, unavailable=False, retry_after_s=max(RETRY_AFTER_S, after_s))
