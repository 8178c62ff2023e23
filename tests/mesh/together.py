"""Requests that a mesh of one prefill and one decode instance decodes side by side, however slow the machine is."""

from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_proto.control import Role
from tests.mesh.harness import Mesh


@contextmanager
def decoded_together(mesh: Mesh, n: int) -> Iterator[None]:
    """The *n* requests that are sent in this context, by others than this thread, are computed one right after the
    other: none before the decode instance, which must be idle, knows all of them."""
    mesh.stop("prefill0")
    try:
        yield
        mesh.wait(lambda: _waiting(mesh) == n or None, what=f"{n} requests to be known")
    finally:
        mesh.cont("prefill0")


def _waiting(mesh: Mesh) -> int:
    """Jobs that wait for their KV, as the decode instance last told."""
    return sum(s.load.queued_jobs for s in mesh.status().cluster.members if s.member.role is Role.DECODE)
