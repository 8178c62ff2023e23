"""Who this process is to senders over TCP, where the transport is encrypted."""

from mooncake_mesh.config import MessengerConfig
from mooncake_mesh.errors import ConfigError
from mooncake_mesh.messenger.transports.tls import Identity


def identity_of(config: MessengerConfig) -> Identity | None:
    """A new one, for the life of the process. Raises ConfigError where cryptography is missing."""
    return identity_for("messenger.tcp_tls") if config.tcp_tls else None


def identity_for(setting: str) -> Identity:
    """A new one, which *setting* asked for. Raises ConfigError where cryptography is missing."""
    try:
        from mooncake_mesh.messenger.transports.certificates import new_identity
    except ImportError as error:
        remedy = "it comes with the extra tls: pip install 'mooncake-mesh[tls]'"
        raise ConfigError(f"{error} ({remedy})", path=setting) from error
    return new_identity()
