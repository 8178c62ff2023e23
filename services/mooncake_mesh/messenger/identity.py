"""Who this messenger is to senders over TCP, where the transport is encrypted."""

from mooncake_mesh.config import MessengerConfig
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.transports.tls import Identity


def identity_of(config: MessengerConfig) -> Identity | None:
    """A new one, for the life of the process. Raises ConfigError where cryptography is missing."""
    if not config.tcp_tls:
        return None
    try:
        from mooncake_mesh.messenger.transports.certificates import new_identity
    except ImportError as error:
        remedy = "it comes with the extra tls: pip install 'mooncake-mesh[tls]'"
        raise ConfigError(f"{error} ({remedy})", path="messenger.tcp_tls") from error
    return new_identity()
