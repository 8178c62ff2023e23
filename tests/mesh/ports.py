"""TCP ports for processes that are told where to listen."""

import socket


def held_port(port: int = 0) -> socket.socket:
    """A socket that keeps *port* of 127.0.0.1, or a free one, from everybody who takes any port, until it is closed.

    Who is told the number can listen on it all the while, for nobody listens here: both ask for SO_REUSEADDR, as all
    servers do. A port that was only looked up may be another process' own when it is used.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder
