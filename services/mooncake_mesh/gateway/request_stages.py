"""The stages of a request and the moves between them; gateway/core.py has the picture."""

import enum
from typing import Final


class RequestStage(enum.Enum):
    PLACING = "placing"
    STARTING = "starting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE: Final = (RequestStage.PLACING, RequestStage.STARTING, RequestStage.PREFILLING, RequestStage.DECODING)
RUNNING: Final = (RequestStage.PREFILLING, RequestStage.DECODING)
MOVES: Final = frozenset(
    {
        (RequestStage.PLACING, RequestStage.STARTING),
        (RequestStage.STARTING, RequestStage.PREFILLING),
        (RequestStage.STARTING, RequestStage.DECODING),  # the first token overtook the acceptance
        (RequestStage.PREFILLING, RequestStage.DECODING),
        (RequestStage.STARTING, RequestStage.FINISHED),
        (RequestStage.PREFILLING, RequestStage.FINISHED),
        (RequestStage.DECODING, RequestStage.FINISHED),
        (RequestStage.STARTING, RequestStage.PLACING),
        (RequestStage.PREFILLING, RequestStage.PLACING),
        (RequestStage.DECODING, RequestStage.PLACING),
        *((stage, end) for stage in LIVE for end in (RequestStage.FAILED, RequestStage.CANCELLED)),
    }
)
