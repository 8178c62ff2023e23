"""What an operator may order a process of the mesh to do, beside signals: what workers and messengers share of it."""

from mooncake_mesh.errors import Refused
from mooncake_mesh.mesh.runtime import Lifecycle
from mooncake_proto.control import Ok, Stop
from mooncake_proto.ids import Incarnation


def check_incarnation(meant: Incarnation, mine: Incarnation) -> None:
    """Raise Refused for an order that was meant for another life of this instance."""
    if meant != mine:
        raise Refused("another_incarnation", f"the order is for {meant}, this is {mine}")


def stop_ordered(order: Stop, mine: Incarnation, lifecycle: Lifecycle) -> Ok:
    """Handle an order to stop. Raises Refused."""
    check_incarnation(order.incarnation, mine)
    lifecycle.stop("ordered")
    return Ok()
