"""The names of the scheduling policies that a conductor can be configured with.

They stand alone so that the configuration needs no policy and no policy needs the configuration.
"""

import enum


class PlacementKind(enum.Enum):
    """How a prefill instance is chosen. What each does: :mod:`mooncake_mesh.policy.prefill_choice`."""

    RANDOM = "random"
    LOAD_BALANCE = "load_balance"
    LOCAL = "local"
    KVCACHE_CENTRIC = "kvcache_centric"
    ADAPTIVE = "adaptive"


class AdmissionKind(enum.Enum):
    """What a request is refused for. What each does: :mod:`mooncake_mesh.policy.admission`."""

    BASELINE = "baseline"
    EARLY = "early"
    PREDICTIVE = "predictive"
    HOLD = "hold"


class LoadMeasure(enum.Enum):
    """What ``baseline``, ``early`` and ``predictive`` take for the load of decoding: that of an instance with the
    request, or that of all on average without it, which refuses the long no more often than the short."""

    WITH_REQUEST = "with_request"
    SIZE_NEUTRAL = "size_neutral"


class HybridDecodeKind(enum.Enum):
    """Whether decode instances compute prompts: never, or where :mod:`mooncake_mesh.policy.hybrid` says so."""

    OFF = "off"
    AUTO = "auto"


class QueueOrderKind(enum.Enum):
    """In which order a prefill instance computes what waits: as it came, or as :mod:`mooncake_mesh.policy.queue_order`
    says."""

    FCFS = "fcfs"
    SLACK = "slack"
