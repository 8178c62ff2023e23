"""Whether this machine speaks RDMA, and why not.

Where there is no device the tests are skipped and say why; with REQUIRE_RDMA in the environment that is a failure.
"""

import os

import pytest

from mooncake_mesh.config_rdma import RdmaConfig
from mooncake_mesh.errors import TransferError
from mooncake_mesh.messenger.transports.rdma.devices import read_devices
from mooncake_mesh.messenger.transports.rdma.selection import choose_nics


def skip_module() -> None:
    """Call at the top of a test module, before anything that imports pyverbs."""
    reason = _why_not()
    if reason is None:
        return
    if os.environ.get("REQUIRE_RDMA"):
        raise RuntimeError(f"REQUIRE_RDMA is set, but {reason}")
    pytest.skip(f"{reason} (try scripts/rdma-vm)", allow_module_level=True)


def _why_not() -> str | None:
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported: {error}"
    try:
        choose_nics(read_devices(), RdmaConfig())
    except TransferError as error:
        return str(error)
    return None
