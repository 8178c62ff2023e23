"""Choices that more than one class of :mod:`mooncake_mesh.config` offers; to be had from there."""

import enum


class LogLevel(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.Enum):
    CONSOLE = "console"
    JSON = "json"


class EngineKind(enum.Enum):
    """Who computes: a real model, or the fake engine (deterministic tokens, configurable delays, no torch)."""

    TRANSFORMERS = "transformers"
    FAKE = "fake"


class FakeOutput(enum.Enum):
    """What the fake engine says: tokens that depend on the KV it reads, or the bytes of a fixed UTF-8 text."""

    HASH = "hash"
    UTF8 = "utf8"


class TransportKind(enum.Enum):
    """How KV leaves a node. ``auto`` takes shared memory between processes of one host, else TCP; RDMA only by name."""

    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    RDMA = "rdma"


class PagesKind(enum.Enum):
    """What an arena is made of: reserved 2 MiB pages, ones that the kernel finds when it can, or ordinary ones.

    ``auto`` takes the best there is. What is asked for by name is had, or the messenger does not start.
    """

    AUTO = "auto"
    HUGETLB = "hugetlb"
    TRANSPARENT = "transparent"
    SMALL = "small"


class CommitKind(enum.Enum):
    """When an arena's memory is taken from the system: all of it at start, in the background, or each page when used.

    Who waits for it at use are the prompts that first come to a page, in each process that does.
    """

    START = "start"
    USE = "use"


class ChecksumKind(enum.Enum):
    XXH3 = "xxh3"
    NONE = "none"
